"""The dashboard in a real browser, while a federation runs over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import browser as browsers
import numpy as np
import pytest
from browser import Browser
from network_federation import Contribution, NetworkFederation

from lightsecagg.drivers.federation.provisioning import free_port
from lightsecagg.protocol.interface import Update

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not browsers.is_installed(), reason=browsers.NEEDS),
]
TOKEN = "only-the-operator-knows-this"  # noqa: S105
DOOMED = Path(__file__).with_name("doomed_client.py")
STATES = """Object.fromEntries(
    [...document.querySelectorAll('.cell')].map(c => [c.dataset.client, c.dataset.state])
)"""
RIGHT = "\ue014"
ENTER = "\ue007"


class Held(Contribution):
    """Trains in rounds 2 and 3 only when it is let."""

    gates: dict[int, threading.Event]

    def compute(self, model: bytes, round_number: int, bound: float) -> Update:
        assert self.gates[round_number].wait(120)
        return super().compute(model, round_number, bound)


class Running:
    """Five clients, one of them a process that is killed in round 2, and a server, in a thread."""

    def __init__(self, folder: Path) -> None:
        self.gates = {number: threading.Event() for number in (1, 2, 3)}
        self.gates[1].set()
        self.failure: BaseException | None = None
        self.port = free_port()
        self._federation = NetworkFederation(folder, 5)
        token = folder / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        settings = [f"server.dashboard_port={self.port}", f'server.dashboard_token="{token}"']
        self._settings = settings
        self.start_client("MaskedUpload", "before", "2")
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def start_client(self, *death: str) -> None:
        path = str(self._federation.made.clients[4])
        self.doomed = subprocess.Popen([sys.executable, str(DOOMED), path, "4", *death])

    def _run(self) -> None:
        try:
            asyncio.run(self._rounds())
        except BaseException as error:
            self.failure = error

    async def _rounds(self) -> None:
        server = self._federation.server(
            settings=self._settings, number=3, wait_for_clients=60, min_clients=5
        )
        tasks = []
        for i in range(4):
            job = Held(i)
            job.gates = self.gates
            tasks.append(asyncio.create_task(self._federation.client(i, job=job).run()))
        await server.run()
        await asyncio.gather(*tasks)

    def close(self) -> None:
        for gate in self.gates.values():
            gate.set()
        self.doomed.kill()
        self.doomed.wait()
        self.thread.join(60)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    made = Browser(tmp_path / "profile")
    yield made
    made.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    made = Running(tmp_path)
    yield made
    made.close()


def told(browser: Browser) -> dict[str, Any]:
    """What a reader sees."""
    return {
        "title": browser.run("return document.querySelector('#now-title').textContent"),
        "words": browser.run("return document.querySelector('#now-words').textContent"),
        "legend": browser.run("return document.querySelector('#legend').textContent"),
    }


def test_a_federation_is_watched_while_it_runs(browser: Browser, running: Running) -> None:
    address = f"http://127.0.0.1:{running.port}/"
    browser.until(lambda: _listens(running))
    browser.open(address)
    browser.type("#token", "a wrong one" + ENTER)
    browser.until("document.body.textContent.includes('That is not the token.')")
    statuses = [
        message["params"]["response"]["status"]
        for message in _messages(browser, "Network.responseReceived")
        if message["params"]["response"]["url"] in (address, f"{address}login")
    ]
    assert statuses == [401, 401]
    browser.log("browser")  # a browser counts these among the errors
    browser.type("#token", TOKEN + ENTER)

    # Round 2 is held while four clients train; the fifth has been killed.
    browser.until("document.querySelector('[data-client=\"4\"]')?.dataset.state === 'dropped'")
    expected = {str(i): "training" for i in range(4)} | {"4": "dropped"}
    browser.until(f"JSON.stringify({STATES}) === '{json.dumps(expected, separators=(',', ':'))}'")
    seen = told(browser)
    assert seen["title"] == "Round 2"
    assert seen["words"].startswith("Upload: 0 of 5 have delivered")
    assert "4training" in seen["legend"]
    assert "1dropped" in seen["legend"]
    assert "1not connected" in seen["legend"]
    tiles = browser.run("return document.querySelector('#tiles').innerText")
    assert "4 of 5, 5 needed" in tiles
    red = browser.run(
        "return getComputedStyle(document.querySelector('[data-client=\"4\"]')).color"
    )
    channels = np.array([int(part) for part in red.strip("rgb()").split(",")])
    assert channels[0] > 2 * channels[1:].max(), f"{red} is not red"
    label = browser.run("return document.querySelector('[data-client=\"4\"]').ariaLabel")
    assert label.startswith("client 4 dropped in upload")
    assert "not connected since " in label
    assert browser.run("return document.querySelectorAll('#history tbody tr').length") == 1

    # By keyboard alone: the arrow leads from one client to the next, and its words are shown.
    browser.run("document.querySelector('.cell[tabindex=\"0\"]').focus()")
    browser.type(".cell[tabindex='0']", RIGHT * 4)
    browser.until("document.querySelector('#client-words').textContent.startsWith('Client 4 ')")
    assert browser.run("return document.activeElement.dataset.client") == "4"

    # It is started again, and a reload in round 3 keeps the history.
    running.doomed.wait()
    running.start_client()
    running.gates[2].set()
    browser.until("document.querySelector('#now-title').textContent === 'Round 3'")
    browser.open(address)
    browser.until("document.querySelectorAll('#history tbody tr').length === 2")
    rows = browser.run(
        "return [...document.querySelectorAll('#history tbody tr')].map(r => r.innerText)"
    )
    assert [row.split()[0] for row in rows] == ["2", "1"]
    assert "4 of 5" in rows[0]
    assert "5 of 5" in rows[1]
    browser.type("[data-round='2']", ENTER)
    browser.until("document.querySelector('#now-title').textContent === 'Round 2'")
    browser.until("document.querySelector('[data-client=\"4\"]')?.dataset.state === 'dropped'")

    # On a phone nothing is wider than the screen.
    metrics = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.command("Emulation.setDeviceMetricsOverride", **metrics)
    browser.until("document.documentElement.scrollWidth === 390")

    running.gates[3].set()
    browser.until("document.querySelector('#status').textContent === 'finished'")
    running.thread.join(60)
    assert running.failure is None
    assert [line["message"] for line in browser.log("browser")] == []
    asked = {message["params"]["request"]["url"] for message in _messages(browser, _REQUEST)}
    hosts = {urlsplit(url).netloc for url in asked if not url.startswith(("data:", "chrome"))}
    assert hosts == {f"127.0.0.1:{running.port}"}


_REQUEST = "Network.requestWillBeSent"
_kept: dict[str, list[dict[str, Any]]] = {}


def _messages(browser: Browser, kind: str) -> list[dict[str, Any]]:
    """What the browser's network has told, of one kind, from the beginning on."""
    for line in browser.log("performance"):
        message = json.loads(line["message"])["message"]
        _kept.setdefault(message["method"], []).append(message)
    return _kept.get(kind, [])


def _listens(running: Running) -> bool:
    assert running.failure is None
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", running.port)) == 0
