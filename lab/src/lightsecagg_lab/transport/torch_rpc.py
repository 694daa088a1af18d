"""PyTorch RPC, the transport of the paper's own system: for laboratories, and off unless asked for.

**Whoever reaches an agent's port can execute code in its process**: PyTorch RPC unpickles calls
and knows neither certificates nor passwords. So every address must be loopback, unless the user
says in so many words that this is understood; every peer is believed the id that it announces.

What is ours crosses as bytes: one function, `exchange`, takes a tensor of bytes and returns one.
Only clients call. A client opens a stream, pushes chunks, and pulls: a pull is answered when there
is a chunk, or after a second with nothing. So the server never has to find a client, clients come
and go as they like (members of a PyTorch RPC group may not), and who has stopped pulling is gone.

    request   operation u8 | stream 16 bytes | payload
    answer    verdict u8 | payload

PyTorch allows a process one agent, which all clients in it share (`torch_agent`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from lightsecagg.crypto.entropy import draw, system_entropy
from lightsecagg.drivers.transport.communicator import Limits, Transport
from lightsecagg.drivers.transport.link import LOST, Read, Write
from lightsecagg.drivers.transport.pipes import Pipe, PipeServer
from lightsecagg.drivers.transport.stream_client import StreamClient, told_to_client
from lightsecagg.drivers.transport.tls import is_loopback, join_address, split_address
from lightsecagg.errors import (
    ConfigurationError,
    DecodeError,
    LightSecAggError,
    PeerGone,
    Refused,
    TransportError,
)
from lightsecagg.foreign import explain, shown, where
from lightsecagg_lab.transport.torch_agent import (
    SERVER,
    Agent,
    futures,
    join_in_thread,
    leave,
    rpc,
    to_bytes,
    to_tensor,
)

FLAG: Final = "--unsafe-transport"
"""With this the command line lets PyTorch RPC leave the machine."""

_log = logging.getLogger(__name__)
_VERSION: Final = 1
_OPEN, _PUSH, _PULL, _CLOSE = range(4)
_DONE, _NOT_YET, _GONE, _REFUSED, _FAILED = range(5)
_REQUEST: Final = struct.Struct("!B16s")
_OPENING: Final = struct.Struct("!BI")
_HOLD: Final = 1.0
"""Seconds after which a pull is answered, whether or not there is a chunk."""

_serving: TorchRpcServer | None = None


@rpc.functions.async_execution  # type: ignore[untyped-decorator, unused-ignore]
def exchange(request: Any) -> Any:
    """What a client calls at its server: bytes in, bytes out, later."""
    answer: Any = futures.Future()
    server = _serving
    if server is None:
        answer.set_result(to_tensor(_reply(_FAILED, "the server is closing")))
    else:
        server.ask(to_bytes(request), answer)
    return answer


def _reply(verdict: int, reason: object) -> bytes:
    return bytes([verdict]) + str(reason).encode("utf-8")


# -- the server ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Stream:
    """A client's stream, as its calls know it."""

    inwards: Pipe
    outwards: Pipe
    pushing: bool = False
    """Whether a chunk waits for room."""
    watch: asyncio.TimerHandle | None = None


class TorchRpcServer(PipeServer):
    """A `ServerCommunicator` whose clients reach their pipes by remote calls."""

    def __init__(
        self,
        address: str,
        clients: Container[int],
        *,
        understood: bool = False,
        limits: Limits | None = None,
    ) -> None:
        """`address` is host:port, port 0 for any; `clients` holds the ids that may connect.

        `understood`: the user accepts that whoever reaches a port can execute code.
        """
        super().__init__(clients, limits)
        self._host, self._port = split_address(address)
        check_address(self._host, understood)
        self._agent: Agent | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[bytes, _Stream] = {}
        self._emptied = asyncio.Event()
        self._calls: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """host:port, with the real port once the server has started."""
        return join_address(self._host, self._port)

    async def start(self) -> None:
        """Listen, on the address itself: PyTorch left alone would listen on every one."""
        global _serving
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            listener = socket.create_server((self._host, self._port), family=family)
        except OSError as error:
            raise TransportError(
                f"cannot listen on {self.address}; is another server running there?"
            ) from error
        with listener:
            self._port = listener.getsockname()[1]
            self._agent = await join_in_thread(
                self._host, self._port, self._limits.connect_timeout, listener
            )
        self._loop = asyncio.get_running_loop()
        _serving = self
        await super().start()
        _log.warning(
            "listening on %s with PyTorch RPC: no TLS, and anybody who reaches it can execute code",
            self.address,
        )

    async def close(self) -> None:
        """Send what is queued, as long as the deadline allows, then end every stream."""
        global _serving
        await super().close()
        # A client that has pulled the end says so; only then is nothing under way to it.
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.close_timeout):
                while self._streams:
                    self._emptied.clear()
                    await self._emptied.wait()
        for token in tuple(self._streams):
            self._forget(token)
        if _serving is self:
            _serving = None
        await asyncio.gather(*self._calls)
        if self._agent is not None:
            agent, self._agent = self._agent, None
            await asyncio.to_thread(leave, agent)

    def ask(self, request: bytes, answer: Any) -> None:
        """Answer a call, later; PyTorch calls this from a thread of its own."""
        assert self._loop is not None  # noqa: S101 - start() has set it
        self._loop.call_soon_threadsafe(self._begin, request, answer)

    def _begin(self, request: bytes, answer: Any) -> None:
        task = asyncio.create_task(self._answer(request, answer))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _answer(self, request: bytes, answer: Any) -> None:
        answer.set_result(to_tensor(await self._serve_safely(request)))

    async def _serve_safely(self, request: bytes) -> bytes:
        try:
            return await self._serve(request)
        except Exception as error:  # a call does no harm beyond itself (S41)
            return _reply(_GONE, explain(error))

    async def _serve(self, request: bytes) -> bytes:
        if len(request) < _REQUEST.size:
            raise DecodeError(f"a request has {_REQUEST.size} bytes or more, not {len(request)}")
        operation, token = _REQUEST.unpack_from(request)
        payload = request[_REQUEST.size :]
        if operation == _OPEN:
            return self._open(payload)
        stream = self._streams.get(token)
        if stream is None:
            return _reply(_GONE, LOST)
        if operation == _PUSH:
            return await self._push(stream, payload)
        if operation == _PULL:
            return await self._pull(token, stream)
        if operation == _CLOSE:
            self._forget(token)
            return bytes([_DONE])
        raise DecodeError(f"operation {operation} does not exist")

    def _open(self, payload: bytes) -> bytes:
        try:
            if len(payload) != _OPENING.size or payload[0] != _VERSION:
                raise self._refuse("another version", "use the same release on both sides")
            inwards, outwards = self.accept(_OPENING.unpack(payload)[1])
        except Refused as error:
            return _reply(_REFUSED, error)
        except TransportError as error:
            return _reply(_FAILED, error)
        token = draw(system_entropy, 16)
        self._streams[token] = _Stream(inwards, outwards)
        self._watch(token)
        return bytes([_DONE]) + token

    async def _push(self, stream: _Stream, chunk: bytes) -> bytes:
        if stream.pushing:
            stream.inwards.close("the peer did not wait for the answer to its last chunk")
        stream.pushing = True
        # What comes after the end is dropped: the client learns of the end where it pulls, behind
        # everything that was said to it before.
        with suppress(PeerGone):
            await stream.inwards.put(chunk)
        stream.pushing = False
        return bytes([_DONE])

    async def _pull(self, token: bytes, stream: _Stream) -> bytes:
        self._watch(token)
        try:
            async with asyncio.timeout(_HOLD):
                return bytes([_DONE]) + await stream.outwards.get()
        except TimeoutError:
            return bytes([_NOT_YET])
        except PeerGone as gone:
            return _reply(_GONE, gone)

    def _watch(self, token: bytes) -> None:
        """From now on, the client has so long to pull again."""
        stream, seconds = self._streams[token], _HOLD + self._limits.keepalive
        if stream.watch is not None:
            stream.watch.cancel()
        loop = asyncio.get_running_loop()
        stream.watch = loop.call_later(seconds, self._forget, token)

    def _forget(self, token: bytes) -> None:
        """The client has left, or has not been heard of."""
        stream = self._streams.pop(token, None)
        if stream is None:
            return
        if stream.watch is not None:
            stream.watch.cancel()
        stream.inwards.close(LOST)
        stream.outwards.close(told_to_client(LOST))
        self._emptied.set()


# -- a client --------------------------------------------------------------------------------------


class TorchRpcClient(StreamClient):
    """A `ClientCommunicator` to a `TorchRpcServer`."""

    def __init__(
        self,
        address: str,
        client: int,
        *,
        understood: bool = False,
        limits: Limits | None = None,
    ) -> None:
        """`understood`: the user accepts that whoever reaches a port can execute code."""
        super().__init__(limits or Limits())
        self._host, self._port = split_address(address)
        check_address(self._host, understood)
        self._client = client
        self._agent: Agent | None = None
        self._token = bytes(16)
        self._admitted = False
        """Whether the server has ever let us in."""

    async def _open(self) -> tuple[Read, Write]:
        try:
            async with asyncio.timeout(self._limits.connect_timeout):
                await self._establish()
        except TimeoutError:
            await self._shut()
            raise TransportError(
                f"client {self._client} cannot connect: {join_address(self._host, self._port)} "
                f"did not answer within {self._limits.connect_timeout:g} s; check the address, and "
                "that it is a server of this transport"
            ) from None
        except BaseException as error:
            await self._shut()
            if isinstance(error, TransportError):
                # Who was let in before has the right configuration: it is not refused for good.
                final = isinstance(error, Refused) and not self._admitted
                kind = Refused if final else TransportError
                raise kind(f"client {self._client} cannot connect: {error}") from error
            if isinstance(error, Exception) and not isinstance(error, LightSecAggError):
                raise TransportError(
                    f"client {self._client} cannot connect: {where(error)}"
                ) from error
            raise
        self._admitted = True
        return self._read, self._write

    async def _establish(self) -> None:
        await self._knock()
        self._agent = await join_in_thread(self._host, self._port, self._limits.connect_timeout)
        opening = _OPENING.pack(_VERSION, self._client)
        verdict, payload = await self._call(_OPEN, opening, self._limits.connect_timeout)
        if verdict == _REFUSED:
            raise Refused(
                f"the server refused this client: {shown(payload.decode('utf-8', 'replace'))}"
            )
        if verdict != _DONE or len(payload) != len(self._token):
            raise TransportError(
                f"the server opened no stream: {shown(payload.decode('utf-8', 'replace'))}"
            )
        self._token = payload

    async def _knock(self) -> None:
        """PyTorch tries again for long where no server listens, and logs much."""
        try:
            _, writer = await asyncio.open_connection(self._host, self._port)
        except ConnectionRefusedError:
            address = join_address(self._host, self._port)
            raise TransportError(f"no server listens at {address}; is it running?") from None
        except OSError as error:
            raise TransportError(f"{self._host} cannot be reached: {error.strerror}") from error
        writer.close()

    async def _shut(self) -> None:
        if self._agent is None:
            return
        agent, self._agent = self._agent, None
        try:
            if not agent.broken:
                with suppress(PeerGone):
                    await self._call(_CLOSE, b"", self._limits.close_timeout, agent)
        finally:
            await asyncio.to_thread(leave, agent)

    async def _read(self) -> bytes:
        while True:
            # Answered within _HOLD, by a server that lives.
            verdict, payload = await self._call(_PULL, b"", _HOLD + self._limits.keepalive)
            if verdict == _DONE:
                return payload
            if verdict != _NOT_YET:
                raise PeerGone(shown(payload.decode("utf-8", "replace")))

    async def _write(self, chunk: bytes) -> None:
        # The link has a deadline of its own, which comes first and says what happened.
        verdict, payload = await self._call(_PUSH, chunk, 2 * self._limits.stall_timeout)
        if verdict != _DONE:
            raise PeerGone(shown(payload.decode("utf-8", "replace")))

    async def _call(
        self, operation: int, payload: bytes, seconds: float, agent: Agent | None = None
    ) -> tuple[int, bytes]:
        """One remote call, with its deadline; `PeerGone` if it fails."""
        agent = agent or self._agent
        if agent is None:
            raise PeerGone(LOST)
        request = to_tensor(_REQUEST.pack(operation, self._token) + payload)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[bytes] = loop.create_future()

        def settle(future: Any) -> None:
            if done.done():  # nobody waits any more
                return
            try:
                done.set_result(to_bytes(future.value()))
            except Exception:  # PyTorch's own, and in many words
                done.set_exception(PeerGone(LOST))

        def wake(future: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, future)

        try:
            rpc.rpc_async(SERVER, exchange, (request,), timeout=seconds).add_done_callback(wake)
            answer = await done
        except (RuntimeError, PeerGone):
            agent.broken = True
            raise PeerGone(LOST) from None
        return answer[0], answer[1:]


def check_address(host: str, understood: bool) -> None:
    """Loopback, or by explicit wish anything (S21)."""
    if not is_loopback(host) and not understood:
        raise ConfigurationError(
            f"PyTorch RPC on or to {host} is refused: anybody who reaches a port of it can execute "
            'code in the process behind; use server.transport = "grpc", a loopback address in a '
            f"laboratory, or say {FLAG}"
        )


TRANSPORT: Final = Transport(TorchRpcServer, TorchRpcClient)
"""What `server.transport = "torch-rpc"` finds."""
