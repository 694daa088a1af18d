"""A client process for the crash tests: kills itself with SIGKILL around a chosen message.

    python doomed_client.py client-5.toml 5 [MESSAGE before|after ROUND|any]

Not a test: `test_client_crashes` and `test_epoch_crashes` run it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from network_federation import Contribution

from lightsecagg.drivers.federation.client import FederationClient
from lightsecagg.drivers.federation.config import ClientConfig, load_config
from lightsecagg.drivers.federation.observer import set_up_logging
from lightsecagg.drivers.federation.programs import build_client
from lightsecagg.session.envelope import name_of
from lightsecagg.session.interface import Event, Received


class Doomed(FederationClient):
    """Dies before it sends its first message of one kind in one round, or at the answer to it."""

    death: tuple[str, str, int | None] | None = None
    _dying = False

    async def _post(self, data: bytes) -> None:
        if self.death is not None and self.death[2] in (None, self._session.round):
            name, moment, _ = self.death
            if name_of(data) == name:
                if moment == "before":
                    os.kill(os.getpid(), signal.SIGKILL)
                self._dying = True
        await super()._post(data)

    async def _tell(self, event: Event) -> None:
        if self._dying and isinstance(event, Received):
            os.kill(os.getpid(), signal.SIGKILL)
        await super()._tell(event)


def main() -> None:
    path, client, *death = sys.argv[1:]
    set_up_logging("info")
    config = load_config(ClientConfig, Path(path), ["client.overlap=thread"])
    doomed = build_client(config, Doomed, job=Contribution(int(client)))
    assert isinstance(doomed, Doomed)
    if death:
        number = None if death[2] == "any" else int(death[2])
        doomed.death = (death[0], death[1], number)
    asyncio.run(doomed.run())


if __name__ == "__main__":
    main()
