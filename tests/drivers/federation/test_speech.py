"""What a server and its clients say, in the order in which it happens; and what they never say."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from datetime import datetime
from pathlib import Path

import pytest
from small_federation import Federation, FreshVectors

from lightsecagg.drivers.federation.observer import JsonFormatter, LineFormatter
from lightsecagg.errors import Aborted
from lightsecagg.session.envelope import Hello, RoundModel, describe, pack_control
from lightsecagg.session.record import listed


def told(caplog: pytest.LogCaptureFixture, start: str, level: int = logging.INFO) -> list[str]:
    """The lines that begin so, without the seconds that nobody can foresee."""
    lines = [item.getMessage() for item in caplog.records if item.levelno >= level]
    return [re.sub(r"\d+\.\d s", "... s", line) for line in lines if line.startswith(start)]


def in_order(lines: list[str], *wanted: str) -> bool:
    rest = iter(lines)
    return all(any(each == line for line in rest) for each in wanted)


def test_a_server_says_what_happens_as_it_happens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = Federation(tmp_path, 4, privacy=1, dropouts=1)
    federation.job.evaluate = lambda: {"rmse": 7.4234}
    with caplog.at_level(logging.INFO, "lightsecagg"):
        asyncio.run(federation.run(number=2))
    lines = told(caplog, "")
    connected = [line for line in lines if re.match(r"client \d connected", line)]
    assert sorted(line[7] for line in connected) == list("0123")
    assert [line[-8:] for line in connected] == [f"({count} of 4)" for count in range(1, 5)]
    assert in_order(
        lines,
        "waiting for clients: 0 here, 4 needed, N = 4 at most",
        connected[-1],
        "round 1 begins with 4 clients: 0-3 (0 of 2 rounds done)",
        "round 1: advertise: waiting for 4 clients, 30 s at most",
        "round 1: share: waiting for 4 clients, 120 s at most",
        "round 1: upload: waiting for 4 clients, 5 s at most",
        "round 1: agree: waiting for 4 clients, 2 s at most",
        "round 1: recover: waiting for 4 clients, 2 s at most",
        "round 1 is done after ... s: 4 of 4 clients included; rmse 7.423 (1 of 2 rounds done)",
        "round 2 begins with 4 clients: 0-3 (1 of 2 rounds done)",
        "round 2 is done after ... s: 4 of 4 clients included; rmse 7.423 (2 of 2 rounds done)",
        "goodbye to 4 clients: the federation has finished",
    ), lines


def test_a_client_says_what_happens_as_it_happens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = Federation(tmp_path, 4, privacy=1, dropouts=1)

    async def scenario() -> None:
        # Nobody is cancelled: every client hears the goodbye and ends by itself.
        clients = [asyncio.create_task(federation.client(i).run()) for i in range(4)]
        federation.awaited = 4
        await federation.server().run()
        await asyncio.wait_for(asyncio.gather(*clients), 60)

    with caplog.at_level(logging.INFO, "lightsecagg"):
        asyncio.run(scenario())
    lines = told(caplog, "client 2: ")
    assert in_order(
        lines,
        "client 2: connected",
        "client 2: round 1 begins",
        "client 2: round 1: its update is ready after ... s",
        "client 2: round 1 is done, with this client's update",
        "client 2: goodbye: the federation has finished; rounds with its update: 1",
    ), lines
    (upload,) = (line for line in lines if "uploads" in line)
    assert re.fullmatch(r"client 2: round 1: uploads its masked update, \d+ bytes", upload)


def test_an_aborted_round_is_told_on_both_sides(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = Federation(tmp_path, 4, privacy=1, dropouts=1)
    for client in (0, 1):
        federation.jobs[client] = FreshVectors(client, fail_in=1)

    async def scenario() -> None:
        clients = [asyncio.create_task(federation.client(i).run()) for i in range(4)]
        federation.awaited = 4
        with pytest.raises(Aborted):
            await federation.server(retries=1, number=2, upload=60).run()
        await asyncio.wait_for(asyncio.gather(*clients, return_exceptions=True), 60)

    # Nobody is bound by a round that failed before U1; the second attempt fails alike.
    for client in (0, 1):
        federation.jobs[client].compute = lambda *_: (_ for _ in ()).throw(Aborted("no data"))
    with caplog.at_level(logging.INFO, "lightsecagg"):
        asyncio.run(scenario())
    server = told(caplog, "round ", logging.WARNING)
    assert len(server) == 2
    assert server[0].startswith("round 1 was aborted after ... s: only 2 clients")
    assert "trying again: attempt 2 of 2" in told(caplog, "trying")
    assert told(caplog, "goodbye to 4 clients: 2 attempts at round 1")
    assert any("round 1 was aborted: only 2 clients" in line for line in told(caplog, "client 3: "))
    assert any("client 0 sits round 1 out" in line for line in told(caplog, "client 0 sits"))


def test_quiet_programs_say_nothing_when_all_is_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = Federation(tmp_path, 4, privacy=1, dropouts=1)

    async def scenario() -> None:
        server = federation.server()
        run = asyncio.create_task(server.run())
        while not federation.transport._listening:
            await asyncio.sleep(0)
        async with federation.connected([federation.client(i) for i in range(4)]):
            await asyncio.wait_for(run, 60)

    with caplog.at_level(logging.WARNING, "lightsecagg"):
        asyncio.run(scenario())
    assert told(caplog, "") == []


def test_S22_debug_tells_messages_by_type_and_size_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`test_secrets` looks for keys, seeds and updates in the same lines."""
    federation = Federation(tmp_path, 4, privacy=1, dropouts=1)
    with caplog.at_level(logging.DEBUG, "lightsecagg"):
        asyncio.run(federation.run())
    debug = [item.getMessage() for item in caplog.records if item.levelno == logging.DEBUG]
    shape = r"((to|from) client \d:|client \d (sends|receives)) (\w+), \d+ bytes"
    found = [re.fullmatch(shape, line) for line in debug if "client" in line]
    assert all(found), debug
    kinds = {(match[2] or match[3], match[4]) for match in found if match}
    for kind in ("Opening", "RoundModel", "Roster", "SumRequest", "UploadStored", "RoundOver"):
        assert {("to", kind), ("receives", kind)} <= kinds
    for kind in ("Hello", "Advertise", "MaskedUpload", "Consent", "AggregatedShare"):
        assert {("from", kind), ("sends", kind)} <= kinds
    assert {("from", "ShareBundle"), ("to", "ShareBundle")} <= kinds


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00", b"\x01", b"\x01" + bytes(9), b"\x01" + bytes(8) + b"\x02\xff", b"\x07abc"],
)
def test_S48_a_message_that_is_none_is_called_unknown(data: bytes) -> None:
    assert describe(data) == f"an unknown message, {len(data)} bytes"


def test_S22_a_description_repeats_nothing_of_the_message() -> None:
    model = RoundModel(1, b"secret" * 9, 1.0)
    assert describe(pack_control(model)).startswith("RoundModel, ")
    assert "secret" not in describe(pack_control(model))
    forged = pack_control(Hello(2, -1)).replace(b"Hello", b"\x1b[2J!")
    assert describe(forged).startswith("an unknown message, ")


@pytest.mark.parametrize("formatter", [LineFormatter(), JsonFormatter()])
def test_times_are_iso_8601_with_an_offset(formatter: logging.Formatter) -> None:
    record = logging.LogRecord("x", logging.INFO, "x.py", 1, "hello", (), None)
    line = formatter.format(record)
    is_json = isinstance(formatter, JsonFormatter)
    moment = datetime.fromisoformat(json.loads(line)["time"] if is_json else line.split()[0])
    assert moment.utcoffset() is not None
    assert moment.timestamp() == pytest.approx(record.created, abs=0.001)


def test_ids_are_listed_as_ranges() -> None:
    assert listed([]) == ""
    assert listed([4, 0, 1, 2, 7, 8]) == "0-2, 4, 7-8"
    assert listed(range(0, 1000, 2)) == "0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, ..."
