"""py-libp2p in a thread of its own: the alternative to the Go daemon. See `host.Libp2pHost`.

Owns the thread and the communication with it: requests cross one by one, stream bytes by unix sockets. The libp2p host
in the thread is `py_node.PyNode`. One that dies is restarted, with its identity and its ports.
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
from swarm.net.libp2p.policy import PyHostPolicy
from swarm.net.libp2p.py_node import PyNode
from swarm.net.libp2p.py_rpc import PyRpc
from swarm.net.libp2p.socket_dir import SocketDir
from swarm.net.security.identity import Identity
from swarm.types import PeerId

logger = logging.getLogger(__name__)

POLICY = PyHostPolicy()

_T = TypeVar("_T")


class PyHost:
    """`await PyHost.start(...)`; then use its `control`, which is itself; then `await stop()`."""

    pid = 0  # no process of its own

    def __init__(self, identity: Identity, options: HostOptions) -> None:
        self.addresses: tuple[str, ...] = ()
        self.failed = asyncio.Event()
        self.restarts = 0
        self._identity = identity
        self._options = options
        self._socket_dir = SocketDir()
        self._folder = self._socket_dir.path
        self.inbound = self._folder / "inbound"  # for the socket to which streams are delivered
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="py-libp2p")
        self._node: PyNode | None = None  # None while it is down
        self._running: asyncio.Future[None] | None = None
        self._tasks = TaskSet("py-libp2p")
        self._on_down: list[Callable[[], None]] = []
        self._on_up: list[Callable[[], Awaitable[None]]] = []

    @classmethod
    async def start(cls, identity: Identity, options: HostOptions | None = None) -> PyHost:
        """See `host.Libp2pHost.start`."""
        self = cls(identity, options or HostOptions())
        try:
            async with asyncio.timeout(POLICY.start_timeout_s):
                await self._launch(self._options)
            self._watch()
        except TimeoutError:
            await self.stop()
            raise NetworkError(f"py-libp2p did not start within {POLICY.start_timeout_s:g} s") from None
        except BaseException:
            await self.stop()
            raise
        return self

    @property
    def control(self) -> PyHost:
        return self

    def on_down(self, callback: Callable[[], None]) -> None:
        self._on_down.append(callback)

    def on_up(self, callback: Callable[[], Awaitable[None]]) -> None:
        self._on_up.append(callback)

    async def hivemind_p2p(self) -> PyRpc:
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
            self._socket_dir.remove()

    # host.HostControl.

    async def identify(self) -> tuple[PeerId, tuple[str, ...]]:
        return self._identity.peer, await self._in_trio(self._alive.addresses)

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        await self._in_trio(self._alive.connect, peer, addresses)

    async def connected(self) -> dict[PeerId, str]:
        return await self._in_trio(self._alive.connected)

    async def open_stream(self, peer: PeerId, protocol: str, limits: FrameLimits = DEFAULT_LIMITS) -> FramedStream:
        near = await self.open_socket(peer, protocol)
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_unix_connection(lambda: FramedStream(limits, preamble=True), sock=near)
        stream.peer = peer  # authenticated by the host, or there would be no stream
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
        cancel = self._alive.call(partial(work, *args), partial(_resolve, loop, answer))
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
            running.add_done_callback(_consume_error)
            raise
        finally:
            waiting.cancel()
        if running.done():
            raise _error_of(running)
        self._node, self._running = node, running
        await self.refresh()

    async def _halt(self) -> None:
        node, self._node = self._node, None
        if node is not None and self._running is not None:
            node.end()
            await asyncio.wait({self._running}, timeout=POLICY.stop_timeout_s)

    def _watch(self) -> None:
        """Restart it when it dies from now on."""
        assert self._running is not None
        self._running.add_done_callback(self._died)

    def _died(self, running: asyncio.Future[None]) -> None:
        reason = _error_of(running)
        if self._tasks.closed:
            return
        logger.warning("py-libp2p has died: %s; restarting it", reason)
        self._node = None
        for notify_down in self._on_down:
            notify_down()
        self._tasks.start(self._restart(), "restart")

    async def _restart(self) -> None:
        # No peers: they may be gone by now, and it would refuse to start without them.
        same = replace(self._options, listen=same_ports(self._options.listen, self.addresses), peers=())
        for pause_s in POLICY.restart_backoff_s if self.restarts < POLICY.max_restarts else ():
            await asyncio.sleep(pause_s)
            try:
                await self._launch(same)
                for notify_up in self._on_up:
                    await notify_up()
            except SwarmError as error:
                logger.warning("py-libp2p could not be restarted: %s", error)
                await self._halt()
                continue
            self.restarts += 1
            self._watch()
            return
        logger.error("py-libp2p is dead for good")
        self.failed.set()


def _resolve(loop: asyncio.AbstractEventLoop, answer: asyncio.Future[_T], result: _T | NetworkError) -> None:
    """Called in the other thread: set the result of a future of this loop."""

    def set_result() -> None:
        if answer.done():
            return
        if isinstance(result, NetworkError):
            answer.set_exception(result)
        else:
            answer.set_result(result)

    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(set_result)


def _error_of(ended: asyncio.Future[None]) -> NetworkError | UsageError | AddressInUse:
    """Why a host ended; trio wraps it in exception groups."""
    error: BaseException | None = ended.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, NetworkError | UsageError | AddressInUse):
        return error
    return NetworkError(f"py-libp2p ended: {error!r}")


def _consume_error(ended: asyncio.Future[None]) -> None:
    ended.exception()
