"""Settings of local training from the server, within what a client's own file accepts.

A server announces what its [training.local] names and, round by round, its [training.schedule].
A client takes a value that is its own anyway, or that lies in the range of its [training.accept];
anything else it refuses, by name, and sits the round out. Steps of a schedule count completed
rounds: an attempt that is repeated from the same model has the same settings (S42).
"""

from __future__ import annotations

from dataclasses import fields, replace

from lightsecagg.drivers.federation.training_tables import AcceptTable, ScheduleTable
from lightsecagg.errors import ParameterError, RemoteProtocolError
from lightsecagg.foreign import shown
from lightsecagg.session.instructions import Instructions, Value
from lightsecagg.training.config import LocalConfig


def scheduled(schedule: ScheduleTable, local: LocalConfig, completed: int) -> dict[str, Value]:
    """What the schedule says for the round after so many completed ones, on top of `local`."""
    values: dict[str, Value] = {}
    for name in ("epochs", "batch_size", "learning_rate"):
        steps: dict[int, float] = getattr(schedule, name)
        begun = [first for first in steps if first <= completed + 1]
        if begun:
            values[name] = steps[max(begun)]
    decay = schedule.decay
    if decay is not None:
        rate = float(values.get("learning_rate", local.learning_rate))
        fallen = rate * decay.factor ** (completed // decay.every)
        values["learning_rate"] = max(fallen, min(decay.least, rate))
    return values


def adopt(instructions: Instructions, own: LocalConfig, accept: AcceptTable) -> LocalConfig:
    """The settings to train with; `RemoteProtocolError` names what this client does not accept."""
    known = {field.name for field in fields(LocalConfig)}
    changes: dict[str, Value] = {}
    for name, value in instructions.local.items():
        if name not in known:
            raise _refused(name, value, "which this client does not know")
        mine = getattr(own, name)
        if value == mine:
            continue
        allowed = getattr(accept, name, None)
        if allowed is None:
            raise _refused(
                name, value, f"this client's own is {mine!r}, and [training.accept] has no range"
            )
        low, high = allowed
        whole = isinstance(mine, int) and not isinstance(value, int)
        if isinstance(value, str) or whole or not low <= value <= high:
            raise _refused(name, value, f"this client accepts {low!r} to {high!r}")
        changes[name] = type(mine)(value)
    try:
        return replace(own, **changes)  # type: ignore[arg-type]  # checked above
    except ParameterError as error:
        raise RemoteProtocolError(f"the server's settings of local training: {error}") from error


def differences(adopted: LocalConfig, own: LocalConfig) -> str:
    """What the server has set otherwise, for a log line; empty if nothing."""
    changed = [
        f"{field.name} = {getattr(adopted, field.name)!r} (own: {getattr(own, field.name)!r})"
        for field in fields(LocalConfig)
        if getattr(adopted, field.name) != getattr(own, field.name)
    ]
    return ", ".join(changed)


def _refused(name: str, value: Value, why: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"the server asks for {shown(name)} = {shown(repr(value))}; {why}")
