"""A real browser, Debian's chromium, driven by its driver: WebDriver's JSON over HTTP."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

NEEDS = "chromium and chromium-driver are not installed; `apt-get install chromium-driver` does"
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
_FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def is_installed() -> bool:
    return bool(shutil.which("chromium") and shutil.which("chromedriver"))


class Browser:
    """One window, with a profile of its own."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._driver = subprocess.Popen(
            ["chromedriver", f"--port={port}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._base = f"http://127.0.0.1:{port}"
        try:
            self.until(self._is_up)
            options = {"args": [*_FLAGS, f"--user-data-dir={folder}"]}
            wanted = {
                "browserName": "chrome",
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            }
            made = self._call("POST", "/session", capabilities={"alwaysMatch": wanted})
            self._base += f"/session/{made['sessionId']}"
        except BaseException:
            self._driver.kill()
            self._driver.wait()
            raise

    def close(self) -> None:
        try:
            self._call("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait()

    def _is_up(self) -> bool:
        try:
            return bool(self._call("GET", "/status")["ready"])
        except OSError:
            return False

    def _call(self, method: str, path: str, **body: Any) -> Any:
        data = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(self._base + path, data, method=method)  # noqa: S310
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return json.load(answer)["value"]

    def open(self, address: str) -> None:
        self._call("POST", "/url", url=address)

    def run(self, script: str) -> Any:
        """What JavaScript returns."""
        return self._call("POST", "/execute/sync", script=script, args=[])

    def type(self, selector: str, text: str) -> None:
        """Into an element; `\\ue014` and the like are keys."""
        found = self._call("POST", "/element", using="css selector", value=selector)
        self._call("POST", f"/element/{found[_ELEMENT]}/value", text=text)

    def command(self, name: str, **parameters: Any) -> Any:
        """One of the browser's own."""
        return self._call("POST", "/goog/cdp/execute", cmd=name, params=parameters)

    def log(self, kind: str) -> list[dict[str, Any]]:
        """What has been logged since it was last asked for."""
        lines: list[dict[str, Any]] = self._call("POST", "/se/log", type=kind)
        return lines

    def until(self, look: Any) -> Any:
        """What a look, or a script, finds as soon as that is true; after a minute it fails."""
        deadline = time.monotonic() + 60
        while not (found := self.run(f"return {look}") if isinstance(look, str) else look()):
            assert time.monotonic() < deadline, f"it did not happen: {look}"
            time.sleep(0.05)
        return found
