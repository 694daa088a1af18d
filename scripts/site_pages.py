"""Pages of the documentation site that follow from the code, and links that leave `docs/`.

MkDocs calls the functions at the end (see mkdocs.yml). The reference is made anew in every
build, so it cannot be out of date: commands from the command line itself, configuration from its
tables, metrics from what a server exposes, messages from the wire's table, names from `__all__`.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import re
import runpy
import types
import typing
import urllib.request
from collections.abc import Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

ROOT = Path(__file__).resolve().parents[1]

PAGES_OF_THE_PROJECT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security-policy.md",
}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(?=[)#])")
"""The path of a link that is neither an address nor an anchor on the same page."""
FENCE = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)


# -- links -----------------------------------------------------------------------------------------


def site_path(source: Path) -> str:
    """Where a file of the repository is on the site."""
    inside = source.relative_to(ROOT).as_posix()
    if inside in PAGES_OF_THE_PROJECT:
        return PAGES_OF_THE_PROJECT[inside]
    if inside.startswith("docs/"):
        return inside.removeprefix("docs/")
    return f"files/{inside}/index.md" if source.is_dir() else f"files/{inside}"


def links_of(text: str, source: Path) -> Iterator[Path]:
    """The files and folders of the repository that a page links to."""
    for match in LINK.finditer(FENCE.sub("", text)):
        target = (source.parent / match[1]).resolve()
        if target.exists() and target.is_relative_to(ROOT):
            yield target


def relink(text: str, source: Path) -> str:
    """The page with its links as they are on the site."""
    home = Path(site_path(source)).parent

    def moved(match: re.Match[str]) -> str:
        target = (source.parent / match[1]).resolve()
        if not target.exists():
            return match[1]  # the strict build names it
        return os.path.relpath(site_path(target), home)

    return LINK.sub(moved, text)


def folder_page(folder: Path) -> str:
    """A list of the files of an example."""
    files = [file.relative_to(folder).as_posix() for file in files_of(folder)]
    links = [f"* [{name}]({name})" for name in files]
    return "\n".join([f"# {folder.relative_to(ROOT).as_posix()}", "", *links])


def files_of(folder: Path) -> list[Path]:
    """Everything in it but pages, which have links of their own, and what Python leaves behind."""
    found = (file for file in sorted(folder.rglob("*")) if file.is_file())
    return [file for file in found if file.suffix not in (".md", ".pyc")]


# -- command line ----------------------------------------------------------------------------------


def cli_page() -> str:
    """Every command with its options."""
    import typer

    from lightsecagg.cli.main import app

    root: Any = typer.main.get_command(app)
    parts = ["# Command line", "`lightsecagg` is one program with these commands.", ""]
    context = root.make_context("lightsecagg", [], resilient_parsing=True)
    for name in root.list_commands(context):
        parts += _command(f"lightsecagg {name}", root.get_command(context, name))
    return "\n".join(parts)


def _command(path: str, command: Any) -> list[str]:
    commands = getattr(command, "commands", {})
    parts = [f"## `{path}`", "", command.help or command.short_help or "", ""]
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    options = [each for each in options if not each.hidden and "--help" not in each.opts]
    usage = [path, *(["[OPTIONS]"] if options else []), *(["COMMAND"] if commands else [])]
    usage += [
        each.name.upper() if each.required else f"[{each.name.upper()}]" for each in arguments
    ]
    parts += ["```", " ".join(usage), "```", ""]
    if options:
        parts += ["| option | default | |", "|---|---|---|"]
        parts += [_option(each) for each in options] + [""]
    for name, child in commands.items():
        parts += _command(f"{path} {name}", child)
    return parts


def _option(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    choices = getattr(option.type, "choices", None)
    kind = "" if option.is_flag else option.metavar or ("/".join(choices) if choices else "")
    default = option.default() if callable(option.default) else option.default
    if option.required:
        shown = "required"
    elif isinstance(option.show_default, str):
        shown = _cell(option.show_default)
    elif default in (None, False, ()) or default == []:
        shown = ""
    else:
        shown = f"`{getattr(default, 'value', default)}`"
    text = _cell(" ".join(filter(None, [option.help, f"`{kind}`" if kind else ""])))
    return f"| {names} | {shown} | {text} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# -- configuration ---------------------------------------------------------------------------------


def configuration_page() -> str:
    """Every key of the configuration files, with type, default and meaning."""
    from lightsecagg.drivers.federation import config

    parts = [
        "# Configuration",
        "",
        "Made from the tables that read the files; "
        "[Operate a federation](../federation.md#configuration) "
        "explains how they are read and overridden.",
        "",
    ]
    for title, kind in (("server.toml", config.ServerConfig), ("client.toml", config.ClientConfig)):
        parts += [f"## {title}", ""]
        for name, field in kind.model_fields.items():
            parts += _model(f"{title.split('.')[0]}: [{name}]", _model_of(field.annotation))
    parts += ["## Training", "", "The tables inside `[training]`.", ""]
    for title, module, name in (
        ("[training.task]", "lightsecagg.training.config", "TaskConfig"),
        ("[training.local]", "lightsecagg.training.config", "LocalConfig"),
        ("[training.server]", "lightsecagg.training.server_optimizers", "ServerConfig"),
    ):
        parts += _table(title, getattr(importlib.import_module(module), name), _dataclass_defaults)
    return "\n".join(parts)


def _model_of(annotation: Any) -> Any:
    from pydantic import BaseModel

    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _model(title: str, model: Any) -> list[str]:
    """A table and, after it, those inside it."""
    parts = _table(title, model, _model_defaults)
    for name, field in model.model_fields.items():
        if inner := _model_of(field.annotation):
            parts += _model(f"{title[:-1]}.{name}]", inner)
    return parts


def _table(title: str, kind: type, defaults: Any) -> list[str]:
    source = _griffe(kind)
    about = re.sub(r"^\[[\w.]+\] ", "", source.docstring.value) if source.docstring else ""
    parts = [f"### {title}", "", about, "", "| key | type | default | |", "|---|---|---|---|"]
    kinds = typing.get_type_hints(kind)
    for name, default in defaults(kind).items():
        attribute = source.all_members[name]
        text = _cell(attribute.docstring.value) if attribute.docstring else ""
        parts.append(f"| `{name}` | {_kind(kinds[name])} | {default} | {text} |")
    return [*parts, ""]


def _kind(annotation: Any) -> str:
    """A type as a reader of a TOML file sees it."""
    inside = [each for each in get_args(annotation) if each is not type(None)]
    match get_origin(annotation):
        case typing.Literal:
            return " or ".join(inside)
        case typing.Union | types.UnionType:
            return _kind(inside[0])
        case builtins.tuple:
            return "list"
        case builtins.dict:
            return "table"
    if issubclass(annotation, Enum):
        return " or ".join(str(each.value) for each in annotation)
    return {Path: "path", str: "text", bool: "true or false"}.get(annotation, annotation.__name__)


@cache
def _sources() -> Any:
    import griffe

    return griffe.load("lightsecagg", search_paths=[str(ROOT / "src")])


def _griffe(kind: type) -> Any:
    place = f"{kind.__module__}.{kind.__name__}".removeprefix("lightsecagg.")
    return _sources()[place]


def _model_defaults(model: Any) -> dict[str, str]:
    return {
        name: "required"
        if field.is_required()
        else _shown(field.get_default(call_default_factory=True))
        for name, field in model.model_fields.items()
        if _model_of(field.annotation) is None
    }


def _dataclass_defaults(kind: Any) -> dict[str, str]:
    from dataclasses import MISSING, fields

    return {
        each.name: "required"
        if each.default is MISSING and each.default_factory is MISSING
        else _shown(None if each.default is MISSING else each.default)
        for each in fields(kind)
    }


def _shown(value: Any) -> str:
    if value is None or value == () or value == {}:
        return ""
    if isinstance(value, tuple):
        return f"`{[str(each) for each in value]}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


# -- metrics and messages --------------------------------------------------------------------------


def metrics_page() -> str:
    """What a server that has seen one round exposes."""
    from prometheus_client.parser import text_string_to_metric_families

    from lightsecagg.drivers.federation.observer import Metrics
    from lightsecagg.session.record import MetricMean, PhaseRecord, RoundRecord

    metrics = Metrics()
    metrics.expires = {"server": 0.0}
    metrics.serve(0)
    try:
        metrics.record(
            RoundRecord(
                1,
                "lightsecagg",
                invited=[0, 1, 2],
                dropped={"upload": [2]},
                refusals={"malformed": 1},
                late={"MaskedUpload": 1},
                phases={"upload": PhaseRecord(0.0)},
                figures={"accuracy": 0.9},
                metrics={"loss": MetricMean(0.1, 0.0)},
            )
        )
        address = f"http://127.0.0.1:{metrics.port}/metrics"
        with urllib.request.urlopen(address) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    finally:
        metrics.close()
    parts = [
        "# Metrics",
        "",
        "What `server.metrics_port` serves for Prometheus, as `/metrics`. "
        "[Watch a federation](../observability.md#prometheus-and-grafana) has a dashboard.",
        "",
        "| metric | type | labels | |",
        "|---|---|---|---|",
    ]
    for family in families:
        if family.name.endswith("_created"):
            continue
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        name = family.name + ("_total" if family.type == "counter" else "")
        named = ", ".join(f"`{label}`" for label in labels)
        parts.append(f"| `{name}` | {family.type} | {named} | {_cell(family.documentation)} |")
    keys = ", ".join(f"`{key}`" for key in json.loads(metrics.health()))
    return "\n".join([*parts, "", f"`/health` answers JSON: {keys}."])


def messages_page() -> str:
    """The wire's messages and the client's table of states."""
    tables = runpy.run_path(str(ROOT / "scripts" / "make_protocol_tables.py"))
    return "\n".join(
        [
            "# Messages",
            "",
            "[Protocol](../protocol.md) explains who says what and when, and the encoding.",
            "",
            "## Tags",
            "",
            tables["tag_table"](),
            "",
            "## Fields",
            "",
            "::: lightsecagg.protocol.messages",
            "    options: {show_root_heading: false, show_root_toc_entry: false}",
        ]
    )


# -- Python ----------------------------------------------------------------------------------------

MORE_MODULES = {
    "lightsecagg.statistics.Numbers": "Numbers: a column in `Statistics`",
    "lightsecagg.statistics.CrossTable": "CrossTable: a table in `Statistics`",
    "lightsecagg.statistics.Present": "Present: how many rows have a value",
    "lightsecagg.statistics.Figure": "Figure: a value and its error",
    "lightsecagg.drivers.local": "A whole round on one page",
    "lightsecagg.training": "Training (extra: torch)",
    "lightsecagg.training.task": "Your own task",
    "lightsecagg.drivers.federation.callbacks": "Callbacks of a federation (extra: grpc)",
}


def api_page() -> str:
    """Everything that `lightsecagg` exports, by the module it comes from, and a little more."""
    import lightsecagg

    parts = ["# Python", "", "What `lightsecagg` exports, by its home.", ""]
    homes: dict[str, list[str]] = {}
    for name in lightsecagg.__all__:
        if name != "__version__":
            homes.setdefault(lightsecagg._HOME_OF[name], []).append(name)
    first = ("lightsecagg.drivers.aggregation", "lightsecagg.params")
    for home in sorted(homes, key=lambda each: (each not in first, each)):
        summary = (importlib.import_module(home).__doc__ or "").split("\n\n")[0]
        parts += [f"## {home.removeprefix('lightsecagg.')}", "", summary, ""]
        for name in homes[home]:
            parts += [f"::: {home}.{name}", ""]
    parts += ["# Beyond the package's front door", ""]
    for module, title in MORE_MODULES.items():
        parts += [f"## {title}", "", f"::: {module}", "    options: {show_root_heading: false}", ""]
    return "\n".join(parts)


# -- what MkDocs calls -----------------------------------------------------------------------------

GENERATED = {
    "reference/api.md": api_page,
    "reference/cli.md": cli_page,
    "reference/configuration.md": configuration_page,
    "reference/metrics.md": metrics_page,
    "reference/messages.md": messages_page,
}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made here, those of the repository's root, and what pages link to."""
    from mkdocs.structure.files import File

    for path, make in GENERATED.items():
        files.append(File.generated(config, path, content=make()))
    sources = sorted((ROOT / "docs").rglob("*.md"))
    for name, path in PAGES_OF_THE_PROJECT.items():
        sources.append(ROOT / name)
        files.append(File.generated(config, path, content=(ROOT / name).read_text("utf-8")))
    linked = {each for page in sources for each in links_of(page.read_text("utf-8"), page)}
    folders = {each for each in linked if each.is_dir()}
    for folder in folders:
        linked |= set(files_of(folder))
    for target in sorted(linked):
        if files.get_file_from_path(site_path(target)) is None:
            content = folder_page(target) if target in folders else target.read_bytes()
            files.append(File.generated(config, site_path(target), content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links as they are on the site."""
    uri = page.file.src_uri
    if uri in GENERATED or uri.startswith("files/"):
        return markdown
    homes = {site: name for name, site in PAGES_OF_THE_PROJECT.items()}
    source = ROOT / homes[uri] if uri in homes else ROOT / "docs" / uri
    return relink(markdown, source)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Every picture leads to itself in full size."""
    return re.sub(r'<img [^>]*src="([^"]+)"[^>]*>', r'<a href="\1">\g<0></a>', html)
