"""The default transport: one long-lived gRPC stream per client, raw chunks, mutual TLS.

There is no protobuf: the one method passes bytes through unchanged, and `framing` gives them
meaning. Every client has its own connection, several of one process too, so none waits behind
another's flow control. Compression is refused, because a small request could unpack to anything.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Container
from typing import Any, Final

from lightsecagg.drivers.transport.communicator import Limits
from lightsecagg.drivers.transport.framing import MAX_CHUNK
from lightsecagg.drivers.transport.link import (
    CLOSED_BY_PEER,
    CLOSED_HERE,
    LOST,
    Link,
    Read,
    Write,
)
from lightsecagg.drivers.transport.stream_client import StreamClient, told_to_client
from lightsecagg.drivers.transport.stream_server import StreamServer
from lightsecagg.drivers.transport.tls import (
    Credentials,
    client_of_pem,
    explain_failure,
    fingerprint_of_pem,
    is_loopback,
    join_address,
    split_address,
)
from lightsecagg.errors import (
    ConfigurationError,
    LightSecAggError,
    MissingExtra,
    PeerGone,
    Refused,
    TransportError,
)
from lightsecagg.foreign import explain, shown

# Its own complaints, on stderr, would stand above ours, which say the same for people.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

try:
    import grpc
    import grpc.aio
except ImportError as missing:
    raise MissingExtra("the networked system needs gRPC", "grpc") from missing

# The version is part of the name: peers of another version find no such method (R37).
_log = logging.getLogger(__name__)
_SERVICE: Final = "lightsecagg.v2.Transport"
_METHOD: Final = "Stream"
_REVOKED: Final = "this certificate was revoked; use the one that replaced it"
_CLIENT_ID: Final = "lightsecagg-client"
"""Metadata: the id a client believes it has; the server answers with the id it authenticated."""


def _options(limits: Limits) -> list[tuple[str, int | str]]:
    """What both sides ask of gRPC."""
    keepalive = int(1000 * limits.keepalive)
    return [
        # A little room above our own limit, so that we are the ones who refuse and say why. Beyond
        # it gRPC refuses by the length that a message announces, before it buffers anything.
        ("grpc.max_receive_message_length", MAX_CHUNK + 1024),
        ("grpc.max_send_message_length", MAX_CHUNK),
        ("grpc.compression_enabled_algorithms_bitset", 1),  # identity and nothing else
        ("grpc.max_metadata_size", 8 * 1024),
        # A peer that vanished without a word is noticed after one and a half of these.
        ("grpc.keepalive_time_ms", keepalive),
        ("grpc.keepalive_timeout_ms", keepalive // 2),
        ("grpc.http2.ping_timeout_ms", keepalive // 2),  # a minute unless told, and it prevails
        ("grpc.http2.max_pings_without_data", 0),  # training is silent for as long as it takes
    ]


class GrpcServer(StreamServer):
    """A `ServerCommunicator` that listens on a socket."""

    def __init__(
        self,
        address: str,
        clients: Container[int],
        credentials: Credentials | None,
        *,
        plaintext: bool = False,
        limits: Limits | None = None,
    ) -> None:
        """`address` is host:port, port 0 for any; `clients` holds the ids that may connect.

        `plaintext` is for laboratories: on loopback only, and every peer is believed its id.
        """
        super().__init__(clients, limits or Limits())
        self._host, self._port = split_address(address)
        _check_mode(self._host, credentials, plaintext)
        self._credentials = credentials
        self._server: Any = None
        self._streams = 0
        self._judged = 0
        self._certificates: dict[int, bytes] = {}
        """Client -> SHA-256 of the certificate that its latest stream came with."""

    async def start(self) -> None:
        """Listen; refuses to start on certificates that no client would accept."""
        tls = None if self._credentials is None else self._tls(self._credentials)
        server = grpc.aio.server(
            options=(
                *_options(self._limits),
                # Counted when a connection is accepted: strangers have no certificate to show.
                ("grpc.max_allowed_incoming_connections", self._limits.connections),
                # What a client may send before we read: left alone, gRPC lets fast ones send
                # megabytes each, which wait in memory that is nobody's budget (R53).
                ("grpc.http2.bdp_probe", 0),
                ("grpc.http2.lookahead_bytes", self._limits.ahead),
                ("grpc.so_reuseport", 0),  # a second server on this port is an error, not a rival
                ("grpc.max_concurrent_streams", 1),
                ("grpc.server_handshake_timeout_ms", int(1000 * self._limits.connect_timeout)),
                # Else one certificate, even a revoked one, could hold all connections for ever.
                ("grpc.max_connection_idle_ms", int(1000 * self._limits.connect_timeout)),
                # It would not be idle if it opened one stream after the other. A stream that was
                # let in outlives this age: there is one for each client.
                ("grpc.max_connection_age_ms", int(1000 * self._limits.connect_timeout)),
                ("grpc.http2.min_ping_interval_without_data_ms", int(500 * self._limits.keepalive)),
            ),
            compression=grpc.Compression.NoCompression,
        )
        handler = grpc.stream_stream_rpc_method_handler(self._stream)
        service = grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler})
        server.add_generic_rpc_handlers((service,))
        address = join_address(self._host, self._port)
        try:
            if tls is None:
                self._port = server.add_insecure_port(address)
            else:
                self._port = server.add_secure_port(address, tls)
        except RuntimeError as error:
            await server.stop(None)
            raise TransportError(
                f"cannot listen on {address}; is another server running there?"
            ) from error
        await server.start()
        self._server = server
        _log.info("listening on %s%s", self.address, " without TLS" if tls is None else "")

    @property
    def address(self) -> str:
        """host:port, with the real port once the server has started."""
        return join_address(self._host, self._port)

    def admit(self, clients: Container[int], revoked: Container[bytes]) -> None:
        """From now on these ids may connect, with certificates that are not revoked."""
        super().admit(clients, revoked)
        for client, certificate in self._certificates.items():
            if client in clients and certificate in revoked:
                self.disconnect(client, _REVOKED)

    async def close(self) -> None:
        """Send what is queued, as long as the deadline allows, then end every stream."""
        await super().close()
        if self._server is not None:
            await self._server.stop(self._limits.close_timeout)
            self._server = None

    def _tls(self, credentials: Credentials) -> Any:
        credentials.check_server()
        loop = asyncio.get_running_loop()

        def handshake_begins() -> None:
            # Called by gRPC's threads before each handshake: the only trace of those that fail.
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._handshake_began)

        configuration = grpc.ssl_server_certificate_configuration(
            [(credentials.key, credentials.certificate)], credentials.authority
        )
        return grpc.dynamic_ssl_server_credentials(
            configuration, handshake_begins, require_client_authentication=True
        )

    def _handshake_began(self) -> None:
        self.stats.handshakes += 1
        loop = asyncio.get_running_loop()
        loop.call_later(self._limits.connect_timeout, self._judge_handshake)

    def _judge_handshake(self) -> None:
        """Count the handshakes whose time is up and that led to no stream."""
        self._judged += 1
        failed = self._judged - self._streams
        if failed > self.stats.refused["TLS handshake"]:
            self._refuse(
                "TLS handshake",
                "a peer began a TLS handshake and opened no stream: it has no certificate, an "
                "expired one or one of another authority, it does not trust this server, or its "
                "connection broke",
            )

    async def _stream(self, _requests: object, context: Any) -> None:
        """One client's stream, from authentication to its last byte."""
        self._streams += 1
        try:
            client = self._authenticate(context)
            link = self._admit(client)
        except Refused as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        except TransportError as error:
            await context.abort(grpc.StatusCode.ABORTED, str(error))
        try:
            reason = await self._carry(client, link, context)
        finally:
            self._release(link)
        if reason not in (CLOSED_HERE, CLOSED_BY_PEER):
            await context.abort(grpc.StatusCode.ABORTED, told_to_client(reason))

    def _authenticate(self, context: Any) -> int:
        """The id of the peer: its certificate's, or (plaintext) the one that it announces."""
        if not context.peer():
            # gRPC had ended the call before it reached us: compressed, or cancelled at once.
            raise self._refuse("ended early", "a stream ended before it began")
        announced = _announced(context)
        if self._credentials is None:
            if announced is None:
                raise self._refuse("no identity", f"a peer sent no valid {_CLIENT_ID}")
            return announced
        try:
            certificates = context.auth_context()["x509_pem_cert"]
            client = client_of_pem(certificates[0])
        except (KeyError, IndexError, TransportError) as error:
            raise self._refuse("no identity", f"no client certificate: {error}") from error
        if announced != client:
            raise self._refuse(
                "identity mismatch",
                f"a peer with the certificate of client {client} calls itself client {announced}; "
                "check [client] id and [tls] certificate",
            )
        self._check_not_revoked(client, certificates[0])
        return client

    def _check_not_revoked(self, client: int, pem: bytes) -> None:
        certificate = fingerprint_of_pem(pem)
        if client in self._clients and certificate in self._revoked:
            raise self._refuse("revoked certificate", f"client {client}: {_REVOKED}")
        self._certificates[client] = certificate

    async def _carry(self, client: int, link: Link, context: Any) -> str:
        async def read() -> bytes | None:
            try:
                chunk = await context.read()
            except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
                raise PeerGone(LOST) from None
            return None if chunk is grpc.aio.EOF else chunk

        async def write(chunk: bytes) -> None:
            try:
                await context.write(chunk)
            except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
                raise PeerGone(LOST) from None

        try:
            async with asyncio.timeout(self._limits.stall_timeout):
                await context.send_initial_metadata(((_CLIENT_ID, str(client)),))
        except (TimeoutError, grpc.RpcError, grpc.aio.BaseError):
            return LOST
        return await link.run(read, write)


class GrpcClient(StreamClient):
    """A `ClientCommunicator` to a `GrpcServer`."""

    def __init__(
        self,
        address: str,
        client: int,
        credentials: Credentials | None,
        *,
        server_name: str | None = None,
        plaintext: bool = False,
        limits: Limits | None = None,
    ) -> None:
        """`server_name` is the name in the server's certificate, if it is not `address`'s host."""
        super().__init__(limits or Limits())
        self._host, self._port = split_address(address)
        _check_mode(self._host, credentials, plaintext)
        self._client = client
        self._credentials = credentials
        self._server_name = server_name or self._host
        self._channel: Any = None
        self._call: Any = None
        self._admitted = False
        """Whether the server has ever let us in."""

    async def _open(self) -> tuple[Read, Write]:
        if self._credentials is not None:
            self._credentials.check_client(self._client)
        self._channel = self._make_channel()
        try:
            async with asyncio.timeout(self._limits.connect_timeout):
                await self._establish(self._channel)
        except TimeoutError:
            await self._shut()
            raise TransportError(
                f"client {self._client} cannot connect: {join_address(self._host, self._port)} did "
                f"not answer within {self._limits.connect_timeout:g} s; check the address, the "
                "network and any firewall"
            ) from None
        except BaseException as error:
            await self._shut()
            if isinstance(error, Exception) and not isinstance(error, LightSecAggError):
                raise TransportError(
                    f"client {self._client} cannot connect: {explain(error)}"
                ) from error
            if isinstance(error, Refused) and self._admitted:
                # These certificates have worked. An impostor on the way, or a server that comes
                # back with a wrong file, must not end this client for good.
                raise TransportError(str(error)) from error
            raise
        self._admitted = True
        return self._read, self._write

    async def _shut(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    def _make_channel(self) -> Any:
        options: list[tuple[str, int | str]] = [
            *_options(self._limits),
            ("grpc.use_local_subchannel_pool", 1),  # a connection of our own
            ("grpc.enable_retries", 0),
        ]
        if is_loopback(self._host):
            options.append(("grpc.enable_http_proxy", 0))
        target = join_address(self._host, self._port)
        compression = grpc.Compression.NoCompression
        if self._credentials is None:
            return grpc.aio.insecure_channel(target, options, compression)
        options.append(("grpc.ssl_target_name_override", self._server_name))
        tls = grpc.ssl_channel_credentials(
            self._credentials.authority, self._credentials.key, self._credentials.certificate
        )
        return grpc.aio.secure_channel(target, tls, options, compression)

    async def _establish(self, channel: Any) -> None:
        """Connect, open the stream, and hear from the server that it knows us."""
        state = channel.get_state(try_to_connect=True)
        while state is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                raise await self._failure()
            await channel.wait_for_state_change(state)
            state = channel.get_state()
        own = str(self._client)
        call = self._call = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")(
            metadata=((_CLIENT_ID, own),)
        )
        answered = dict(await call.initial_metadata()).get(_CLIENT_ID)
        if answered is None:
            raise await self._refusal(call)
        if answered != own:
            raise Refused(f"the server takes client {own} for client {shown(answered)}")

    async def _refusal(self, call: Any) -> TransportError:
        code, details = await call.code(), shown(await call.details())
        if code is grpc.StatusCode.UNAVAILABLE:
            return await self._failure()
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return Refused(
                "the server speaks another version of this transport; use the same release"
            )
        if code is grpc.StatusCode.PERMISSION_DENIED:
            return Refused(f"the server refused this client: {details}")
        return TransportError(f"the server opened no stream: {details} ({code.name})")

    async def _failure(self) -> TransportError:
        found = await explain_failure(self._host, self._port, self._credentials, self._server_name)
        return type(found)(f"client {self._client} cannot connect: {found}")

    async def _read(self) -> bytes | None:
        call = self._call
        try:
            chunk = await call.read()
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            raise PeerGone(await _ending(call)) from None
        if chunk is grpc.aio.EOF:
            raise PeerGone(await _ending(call))
        return bytes(chunk)

    async def _write(self, chunk: bytes) -> None:
        call = self._call
        try:
            await call.write(chunk)
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            raise PeerGone(await _ending(call)) from None


async def _ending(call: Any) -> str:
    """Why a call is over."""
    code, details = await call.code(), shown(await call.details() or "")
    if code is grpc.StatusCode.ABORTED:
        return details
    return f"{LOST}: {details or code.name}"


def _check_mode(host: str, credentials: Credentials | None, plaintext: bool) -> None:
    """Mutual TLS, or on loopback and by explicit wish nothing at all (S24)."""
    if plaintext and credentials is not None:
        raise ConfigurationError("plaintext and certificates exclude each other; give one")
    if credentials is None and not plaintext:
        raise ConfigurationError(
            "mutual TLS needs [tls] ca, certificate and key; `lightsecagg provision` makes them"
        )
    if plaintext and not is_loopback(host):
        raise ConfigurationError(
            f"plaintext to or on {host} is refused: anybody could read the traffic and call "
            "itself any client; use certificates, or a loopback address in a laboratory"
        )


def _announced(context: Any) -> int | None:
    """The id in the peer's metadata, if it is one."""
    text = str(dict(context.invocation_metadata()).get(_CLIENT_ID, ""))
    valid = text.isascii() and text.isdecimal() and len(text) <= 10
    return int(text) if valid and str(int(text)) == text else None
