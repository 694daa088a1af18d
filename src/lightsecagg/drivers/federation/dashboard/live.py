"""The dashboard of a server that runs: a callback that is a board and serves it."""

from __future__ import annotations

import ssl

from lightsecagg.drivers.federation.config import ServerConfig
from lightsecagg.drivers.federation.dashboard.board import Board
from lightsecagg.drivers.federation.dashboard.web import PageServer, read_token
from lightsecagg.drivers.federation.observer import log
from lightsecagg.drivers.transport.tls import is_loopback
from lightsecagg.errors import ConfigurationError


class Dashboard(Board):
    """Shows what it is told, until it is closed."""

    def __init__(
        self,
        port: int,
        address: str = "127.0.0.1",
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__()
        self.pages = PageServer(self, port, address, token, tls)
        self.pages.start()

    def close(self) -> None:
        """See `ServerCallback`."""
        super().close()
        self.pages.close()


def make_dashboard(config: ServerConfig) -> Dashboard | None:
    """What `[server]` asks for, if anything; beyond loopback with the server's certificate."""
    table = config.server
    if table.dashboard_port is None:
        return None
    token = None if table.dashboard_token is None else read_token(table.dashboard_token)
    tls = None if is_loopback(table.dashboard_address) else _tls(config)
    made = Dashboard(table.dashboard_port, table.dashboard_address, token, tls)
    log.info("dashboard on %s", made.pages.url)
    return made


def _tls(config: ServerConfig) -> ssl.SSLContext:
    """No token crosses a network in the clear."""
    if config.tls.certificate is None or config.tls.key is None:
        raise ConfigurationError(
            f"server.dashboard_address = {config.server.dashboard_address!r} is not loopback: "
            "[tls] needs certificate and key, or the token would travel in the clear"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(config.tls.certificate, config.tls.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"the dashboard cannot use {config.tls.certificate}: {error.strerror}"
        ) from error
    return context
