"""The one agent that PyTorch RPC allows a process, shared by all parties in it.

The server's is found through a store of PyTorch's, which the server serves at its address; clients
join as they come. What crosses between agents is the business of `torch_rpc`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from lightsecagg.drivers.transport.tls import is_loopback, join_address
from lightsecagg.errors import ConfigurationError, DecodeError, MissingExtra, TransportError

# Its own complaints, on stderr, would stand above ours, which say the same for people.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

try:
    import torch
    import torch.distributed.autograd
    import torch.distributed.rpc
except ImportError as missing:
    raise MissingExtra("PyTorch RPC needs torch", "torch") from missing

distributed: Any = torch.distributed  # parts of it are not in its stubs
rpc: Any = distributed.rpc
futures: Any = torch.futures
if not rpc.is_available():
    raise ConfigurationError(
        f"this build of torch ({torch.__version__}) has no RPC; take another build, or "
        'server.transport = "grpc"'
    )

SERVER: Final = "server"
"""The name of its agent."""
_SERVING: Final = "serving"
"""What the store holds once the server's agent is in PyTorch's list of agents."""
_AGENTS: Final = 0x7FFF
"""Numbers that PyTorch has for the agents of a group; the server's is 0."""
_THREADS: Final = 4


@dataclass(slots=True)
class Agent:
    """This process's membership, shared by the parties in it."""

    host: str
    port: int
    store: Any
    """Where the server's agent can be found; PyTorch's, and served by the server."""
    users: int = 0
    broken: bool = False
    """The connection to the server was lost: everybody has to leave before somebody may join."""


_lock = threading.Lock()
_agent: Agent | None = None


def join(host: str, port: int, seconds: float, listener: socket.socket | None = None) -> Agent:
    """Join the group of the server at this address, as its server if there is a listener. Blocks.

    An agent is made without PyTorch's own ceremony, `init_rpc`, in which a newcomer calls on every
    member: one that has crashed would keep all others out for ever.
    """
    global _agent
    with _lock:
        if _agent is not None:
            if listener is not None or _agent.broken or (_agent.host, _agent.port) != (host, port):
                where_to = join_address(_agent.host, _agent.port)
                raise TransportError(
                    f"this process still speaks PyTorch RPC with {where_to}, and one agent is all "
                    "that PyTorch allows it; try again once that has ended, or use a process each"
                )
        else:
            _agent = _new_agent(host, port, seconds, listener)
        _agent.users += 1
        return _agent


def _new_agent(host: str, port: int, seconds: float, listener: socket.socket | None) -> Agent:
    if is_loopback(host):
        # Otherwise the agent, which listens on a port of its own, would be found by the network.
        os.environ["TP_SOCKET_IFNAME"] = _loopback_interface()
    store = given = _store(host, port, seconds, listener)
    if listener is not None:
        # PyTorch keeps what it gave a process's first agent for ever, and that must not listen.
        given = _store(host, port, seconds)
    number = 0 if listener is not None else store.add("agents", 1)
    if listener is None:
        # Agents write themselves into one list, which they read, extend and store: two at once, and
        # one of them is not in it. Of clients that does no harm; a server would never be found.
        store.wait([_SERVING])
    if number > _AGENTS:
        raise TransportError(f"PyTorch RPC has numbers for {_AGENTS} agents; restart the server")
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=_THREADS, rpc_timeout=seconds, _transports=["uv"], _channels=["basic"]
    )
    name = SERVER if listener is not None else f"peer{number}"
    group = distributed.PrefixStore("lightsecagg", given)
    # Every call asks for it; always the same number, or it is refused.
    distributed.autograd._init(0)
    rpc.api._init_rpc_states(rpc.TensorPipeAgent(group, name, number, None, options, {}, []))
    if listener is not None:
        store.set(_SERVING, "yes")
    return Agent(host, port, store)


def _store(host: str, port: int, seconds: float, listener: socket.socket | None = None) -> Any:
    return distributed.TCPStore(
        host,
        port,
        is_master=listener is not None,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
        master_listen_fd=None if listener is None else listener.detach(),
    )


def leave(agent: Agent) -> None:
    """The last one out ends the agent. Blocks."""
    global _agent
    with _lock:
        agent.users -= 1
        if agent.users == 0:
            _agent = None
            rpc.shutdown(graceful=False)
            agent.store = None  # its port is free now, and not when somebody forgets the agent


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), names[0])


async def join_in_thread(
    host: str, port: int, seconds: float, listener: socket.socket | None = None
) -> Agent:
    """As `join`; if nobody waits for it any more, leave again."""
    joining = asyncio.ensure_future(asyncio.to_thread(join, host, port, seconds, listener))

    def leave_again(task: asyncio.Future[Agent]) -> None:
        if not task.cancelled() and task.exception() is None:
            threading.Thread(target=leave, args=(task.result(),)).start()

    try:
        return await asyncio.shield(joining)
    except asyncio.CancelledError:
        joining.add_done_callback(leave_again)
        raise


# -- what agents carry -----------------------------------------------------------------------------


def to_tensor(data: bytes) -> Any:
    """Bytes, as an agent carries them."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def to_bytes(tensor: Any) -> bytes:
    """What has come; nothing but bytes may."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype is not torch.uint8:
        raise DecodeError("only bytes cross this transport")
    return bytes(tensor.numpy().tobytes())
