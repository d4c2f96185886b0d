"""py-libp2p in a thread of its own: what the p2p daemon is, without the Go program. See `host.Host`.

Owns the thread and the way there and back: requests cross one by one, bytes by unix sockets. The libp2p host that
lives in the thread is `py_node`'s. One that dies is started again, with its identity and its ports.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import trio

from swarm.codec import DEFAULT_LIMITS, FrameLimits
from swarm.errors import AddressInUse, NetworkError, SwarmError, UsageError
from swarm.net.base.frame_stream import FramedStream
from swarm.net.base.tasks import TaskSet
from swarm.net.libp2p.options import HostOptions, same_ports
from swarm.net.libp2p.py_node import PyNode
from swarm.net.libp2p.py_rpc import PyRpc
from swarm.net.libp2p.socket_dir import SocketDir
from swarm.net.security.identity import Identity
from swarm.types import PeerId

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0
RESTART_AFTER_S = (0.0, 0.5, 2.0)  # each try to bring a dead host back waits so long before
MAX_RESTARTS = 8  # then something is wrong that starting it again does not cure

_T = TypeVar("_T")


class PyHost:
    """`await PyHost.start(...)`; then ask its `control`, which is itself; then `await stop()`."""

    pid = 0  # it is no process of its own

    def __init__(self, identity: Identity, options: HostOptions) -> None:
        self.addresses: tuple[str, ...] = ()
        self.failed = asyncio.Event()
        self.restarts = 0
        self._identity = identity
        self._options = options
        self._home = SocketDir()
        self._folder = self._home.path
        self.inbound = self._folder / "inbound"  # for the socket to which streams are delivered
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="py-libp2p")
        self._node: PyNode | None = None  # None while it is down
        self._running: asyncio.Future[None] | None = None
        self._tasks = TaskSet("py-libp2p")
        self._on_down: list[Callable[[], None]] = []
        self._on_up: list[Callable[[], Awaitable[None]]] = []

    @classmethod
    async def start(cls, identity: Identity, options: HostOptions | None = None) -> PyHost:
        """See `host.Host.start`."""
        self = cls(identity, options or HostOptions())
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._launch(self._options)
            self._watch()
        except TimeoutError:
            await self.stop()
            raise NetworkError(f"py-libp2p did not start within {START_TIMEOUT_S:g} s") from None
        except BaseException:
            await self.stop()
            raise
        return self

    @property
    def control(self) -> PyHost:
        return self

    def on_down(self, tell: Callable[[], None]) -> None:
        self._on_down.append(tell)

    def on_up(self, tell: Callable[[], Awaitable[None]]) -> None:
        self._on_up.append(tell)

    async def calls(self) -> PyRpc:
        return await PyRpc.start(self, self._identity.peer, self._folder)

    async def refresh(self) -> None:
        _, self.addresses = await self.identify()

    async def stop(self) -> None:
        """End the host and its thread. Idempotent."""
        self._tasks.cancel()
        try:
            await self._halt()
            await self._tasks.close()
        finally:
            self._thread.shutdown(wait=False)
            self._home.remove()

    # What a host is asked for: `host.Switchboard`.

    async def identify(self) -> tuple[PeerId, tuple[str, ...]]:
        return self._identity.peer, await self._in_trio(self._alive.addresses)

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        await self._in_trio(self._alive.connect, peer, addresses)

    async def open_stream(self, peer: PeerId, protocol: str, limits: FrameLimits = DEFAULT_LIMITS) -> FramedStream:
        near = await self.open_socket(peer, protocol)
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_unix_connection(lambda: FramedStream(limits, preamble=True), sock=near)
        stream.peer = peer  # as it has proven to the host, or there would be no stream
        return stream

    async def open_socket(self, peer: PeerId, protocol: str) -> socket.socket:
        """The near end of a stream. Raises as `open_stream`."""
        near, far = socket.socketpair()
        try:
            near.setblocking(False)
            await self._in_trio(self._alive.open, peer, protocol, far)
        except BaseException:
            near.close()
            far.close()
            raise
        return near

    async def accept_streams(self, protocol: str, path: Path) -> None:
        await self._in_trio(self._alive.accept, protocol, path)

    # The other thread.

    @property
    def _alive(self) -> PyNode:
        if self._node is None:
            raise NetworkError("py-libp2p is down")
        return self._node

    async def _in_trio(self, work: Callable[..., Awaitable[_T]], *args: Any) -> _T:
        """`work(*args)` in the other thread; if we are cancelled, so is it. Raises NetworkError."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_T] = loop.create_future()
        cancel = self._alive.call(partial(work, *args), partial(_tell, loop, answer))
        try:
            return await answer
        finally:
            cancel()

    async def _launch(self, options: HostOptions) -> None:
        """Start a host and wait until it has joined. Raises as `start`."""
        loop = asyncio.get_running_loop()
        node = PyNode(self._identity, options)
        up = asyncio.Event()
        running = loop.run_in_executor(self._thread, trio.run, node.run, partial(loop.call_soon_threadsafe, up.set))
        waiting = asyncio.ensure_future(up.wait())
        either: set[asyncio.Future[Any]] = {running, waiting}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            node.end()
            running.add_done_callback(_forget)
            raise
        finally:
            waiting.cancel()
        if running.done():
            raise _reason(running)
        self._node, self._running = node, running
        await self.refresh()

    async def _halt(self) -> None:
        node, self._node = self._node, None
        if node is not None and self._running is not None:
            node.end()
            await asyncio.wait({self._running}, timeout=STOP_TIMEOUT_S)

    def _watch(self) -> None:
        """Bring it back when it dies from now on."""
        assert self._running is not None
        self._running.add_done_callback(self._died)

    def _died(self, running: asyncio.Future[None]) -> None:
        reason = _reason(running)
        if self._tasks.closed:
            return
        logger.warning("py-libp2p has died: %s; starting it again", reason)
        self._node = None
        for tell in self._on_down:
            tell()
        self._tasks.start(self._restart(), "revive")

    async def _restart(self) -> None:
        # No peers: they may be gone by now, and it would refuse to start without them.
        same = replace(self._options, listen=same_ports(self._options.listen, self.addresses), peers=())
        for pause_s in RESTART_AFTER_S if self.restarts < MAX_RESTARTS else ():
            await asyncio.sleep(pause_s)
            try:
                await self._launch(same)
                for again in self._on_up:
                    await again()
            except SwarmError as error:
                logger.warning("py-libp2p could not be started again: %s", error)
                await self._halt()
                continue
            self.restarts += 1
            self._watch()
            return
        logger.error("py-libp2p is dead for good")
        self.failed.set()


def _tell(loop: asyncio.AbstractEventLoop, answer: asyncio.Future[_T], result: _T | NetworkError) -> None:
    """In the other thread: settle what somebody here waits for."""

    def settle() -> None:
        if answer.done():
            return
        if isinstance(result, NetworkError):
            answer.set_exception(result)
        else:
            answer.set_result(result)

    with contextlib.suppress(RuntimeError):  # nobody waits when the loop is closed
        loop.call_soon_threadsafe(settle)


def _reason(ended: asyncio.Future[None]) -> NetworkError | UsageError | AddressInUse:
    """Why a host ended, which trio wraps in groups."""
    error: BaseException | None = ended.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, NetworkError | UsageError | AddressInUse):
        return error
    return NetworkError(f"py-libp2p ended: {error!r}")


def _forget(ended: asyncio.Future[None]) -> None:
    ended.exception()
