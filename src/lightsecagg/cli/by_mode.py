"""Commands whose asynchronous mode has options of its own: `COMMAND --mode async --help`."""

from __future__ import annotations

import importlib
from itertools import pairwise
from typing import Any

import typer
from typer.core import TyperCommand

from lightsecagg.errors import ParameterError


class ByMode(TyperCommand):
    """Hands the arguments to another command if they say `--mode async`."""

    asynchronous: str
    """The module of that command."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **kw: Any
    ) -> Any:
        """As the command of the mode has it."""
        command = typer.main.get_command(importlib.import_module(self.asynchronous).app)
        if "--mode=async" not in args and ("--mode", "async") not in pairwise(args):
            for given in {arg.split("=")[0] for arg in args} - _names(self):
                if given in _names(command):
                    raise ParameterError(
                        f"{given} belongs to the asynchronous mode; add --mode async"
                    )
            return super().make_context(info_name, args, parent, **kw)
        return command.make_context(info_name, _without_mode(args), parent, **kw)


def _names(command: Any) -> set[str]:
    return {name for option in command.params for name in (*option.opts, *option.secondary_opts)}


def _without_mode(args: list[str]) -> list[str]:
    pairs = zip(["", *args], args, strict=False)
    return [arg for before, arg in pairs if before != "--mode" and not arg.startswith("--mode")]
