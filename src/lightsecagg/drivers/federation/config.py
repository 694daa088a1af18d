"""The configuration of the server and client programs: TOML, environment, flags.

    lightsecagg server --config server.toml --set rounds.number=20
    LIGHTSECAGG_SERVER__ADDRESS=0.0.0.0:9000 lightsecagg server --config server.toml

The file is read first; an environment variable LIGHTSECAGG_<TABLE>__<KEY> overrides it, `--set
table.key=value` overrides both. Every key is documented in `tables` and `training_tables` and shown
by `--print-config`; an unknown key is an error. Relative paths are relative to the file.
Nothing here is a secret: keys are files, named by their paths.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar, get_args

from pydantic import BaseModel, ValidationError, model_validator

from lightsecagg.drivers.federation import tables, training_tables
from lightsecagg.errors import ConfigurationError, DecodeError
from lightsecagg.foreign import decode, shown

ENVIRONMENT_PREFIX = "LIGHTSECAGG_"
_TASK_PATHS = {"data_dir", "writer_ids"}


class ServerConfig(tables.Table):
    """server.toml"""

    federation: tables.FederationTable
    aggregation: tables.AggregationTable
    server: tables.ServerTable = tables.ServerTable()
    rounds: tables.RoundsTable = tables.RoundsTable()
    tls: tables.TlsTable = tables.TlsTable()
    training: training_tables.TrainingTable | None = None
    vectors: training_tables.VectorsTable | None = None
    early_stopping: training_tables.StoppingTable | None = None
    tracking: tables.TrackingTable = tables.TrackingTable()
    checkpoints: training_tables.CheckpointsTable = training_tables.CheckpointsTable()
    buffering: tables.ServerBufferingTable | None = None

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        asynchronous = self.aggregation.mode == "async"
        if asynchronous != (self.buffering is not None):
            raise ValueError(
                'aggregation.mode = "async" and the table [buffering] (size = K at least) go '
                "together; give both, or neither"
            )
        changing = (
            self.training is not None and self.training.schedule != training_tables.ScheduleTable()
        )
        if asynchronous and changing:
            raise ValueError(
                "[training.schedule] is for rounds: in the asynchronous mode all clients of an "
                "epoch train alike; set [training.local]"
            )
        return self

    @model_validator(mode="after")
    def _check_min_clients(self) -> Self:
        if self.rounds.min_clients > self.aggregation.clients:
            raise ValueError(
                f"rounds.min_clients = {self.rounds.min_clients} exceeds aggregation.clients N = "
                f"{self.aggregation.clients}: no round would ever start"
            )
        return self


class ClientConfig(tables.Table):
    """client.toml"""

    federation: tables.FederationTable
    client: tables.ClientTable
    server: tables.ServerTable = tables.ServerTable()
    tls: tables.TlsTable = tables.TlsTable()
    training: training_tables.TrainingTable | None = None
    vectors: training_tables.VectorsTable | None = None
    buffering: tables.BufferingTable | None = None


Config = TypeVar("Config", ServerConfig, ClientConfig)
_TABLES = tuple({**ServerConfig.model_fields, **ClientConfig.model_fields})


def load_config(
    kind: type[Config],
    path: Path,
    overrides: Iterable[str] = (),
    environment: Mapping[str, str] = os.environ,
) -> Config:
    """Read, override, validate; `ConfigurationError` names the key and what is allowed."""
    try:
        document = decode(tomllib.loads, path.read_text(encoding="utf-8"), "TOML")
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"no configuration file {path}; `lightsecagg provision` writes one"
        ) from error
    except (OSError, UnicodeDecodeError, DecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    for name, value in environment.items():
        table, separator, key = name.removeprefix(ENVIRONMENT_PREFIX).lower().partition("__")
        if not name.startswith(ENVIRONMENT_PREFIX) or not separator:
            continue
        if table in kind.model_fields:
            _override(document, f"{table}.{key.replace('__', '.')}", value, name)
        elif table not in _TABLES:
            raise ConfigurationError(f"{name}: no table [{table}]; tables: {', '.join(_TABLES)}")
    for item in overrides:
        key, separator, value = item.partition("=")
        if not separator:
            raise ConfigurationError(f"--set {shown(item)}: write table.key=value")
        _override(document, key, value, f"--set {shown(key)}")
    try:
        config = kind.model_validate(document)
    except ValidationError as error:
        raise ConfigurationError(f"{path}: {_explain(kind, error)}") from error
    return _anchor(config, path.resolve().parent)


def _override(document: dict[str, Any], key: str, value: str, source: str) -> None:
    *tables, last = key.split(".")
    target = document
    for table in tables:
        target = target.setdefault(table, {})
        if not isinstance(target, dict):
            raise ConfigurationError(f"{source}: {table} is not a table")
    target[last] = _parse(value)


def _parse(value: str) -> Any:
    """A TOML value, or the bare string."""
    try:
        return decode(tomllib.loads, f"value = {value}", "value")["value"]
    except DecodeError:
        return value


def _explain(kind: type[BaseModel], error: ValidationError) -> str:
    """Every mistake: the key, what was given and what is allowed."""
    return "; ".join(_explain_one(kind, dict(item)) for item in error.errors())


def _explain_one(kind: type[BaseModel], item: dict[str, Any]) -> str:
    key = ".".join(shown(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        known = ", ".join(_known_keys(kind, item["loc"][:-1]))
        return f"{key} is not a key; known here: {known}"
    if item["type"] == "missing":
        return f"{key} is missing"
    message = str(item["msg"]).removeprefix("Value error, ")
    return f"{key} = {item['input']!r}: {message}" if key else message


def _known_keys(kind: type[BaseModel], place: tuple[int | str, ...]) -> list[str]:
    for name in place:
        annotation = kind.model_fields[str(name)].annotation
        candidates = (annotation, *get_args(annotation))
        kind = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return list(kind.model_fields)


def _anchor(config: Config, folder: Path) -> Config:
    """Paths relative to the configuration file become absolute."""

    def anchored(table: Any) -> Any:
        if not isinstance(table, BaseModel):
            return folder / table if isinstance(table, Path) else table
        changes = {name: anchored(getattr(table, name)) for name in type(table).model_fields}
        return table.model_copy(update=changes)

    result: Config = anchored(config)
    if result.training is not None:
        for key in _TASK_PATHS & set(result.training.task):
            result.training.task[key] = str(folder / str(result.training.task[key]))
    return result
