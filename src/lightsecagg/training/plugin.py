"""The user's own code, named as `package.module:Name` or `path/to/file.py:Name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from lightsecagg.errors import ConfigurationError


def load_named(name: str, flag: str) -> Callable[..., Any]:
    """What the name stands for, a class or a function; `flag` is where the user wrote it.

    The part before the colon is a module, looked for in the working directory too, or a path that
    ends in `.py`.
    """
    module_name, _, attribute = name.rpartition(":")
    if not module_name:
        raise ConfigurationError(f"{flag} {name}: write package.module:Name")
    factory = getattr(_load_module(module_name, flag), attribute, None)
    if not callable(factory):
        raise ConfigurationError(
            f"{flag} {name}: the module {module_name} defines no {attribute!r}"
        )
    result: Callable[..., Any] = factory
    return result


def _load_module(name: str, flag: str) -> ModuleType:
    if name.endswith(".py"):
        path = Path(name).resolve()
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise ConfigurationError(f"{flag}: {path} does not exist")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    here = str(Path.cwd())
    if here not in sys.path:
        # A console script does not look in the working directory, and users expect it to.
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigurationError(
                f"{flag}: there is no module {name!r}, neither installed nor in {here}"
            ) from error
        raise
