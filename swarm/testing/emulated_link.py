"""WAN emulation: any transport with added latency and limited bandwidth, for benchmarks between processes of one host.

Owns one-way delay and a rate cap, each way; keeps the order of frames and their back-pressure. Knows neither the
transport underneath nor the messages. A delay is as exact as the event loop's timers, about a millisecond.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from swarm import codec
from swarm.codec import Buffer
from swarm.errors import ConnectionLost, NetworkError
from swarm.messages import AnyMessage
from swarm.net.base.tasks import TaskSet
from swarm.net.base.transport import Connection, Handler, Transport
from swarm.types import PeerId

WINDOW = 4 << 20  # bytes in flight in one direction of a connection, before its sender waits

_Item = tuple[AnyMessage, Buffer]


@dataclass(frozen=True, slots=True)
class LinkShape:
    """What one machine's link adds. Delays one way, in seconds; rates in bytes a second, shared by all connections."""

    send_delay_s: float = 0.0
    send_rate: float = math.inf
    receive_delay_s: float = 0.0
    receive_rate: float = math.inf


class _Bandwidth:
    """One direction of a machine's link: bytes are sent one after the other."""

    def __init__(self, rate: float, delay_s: float) -> None:
        self._rate = rate
        self._delay_s = delay_s
        self._free_at = 0.0

    def arrival(self, size: int) -> float:
        """The loop time at which `size` bytes sent now arrive at the other end."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + size / self._rate
        return self._free_at + self._delay_s


class _Direction:
    """One direction of one connection: a queue whose items come out in order, later."""

    def __init__(self, bandwidth: _Bandwidth) -> None:
        self._bandwidth = bandwidth
        self._items: deque[tuple[float, int, _Item]] = deque()
        self._bytes = 0
        self._changed = asyncio.Event()
        self._end: NetworkError | None = None

    async def put(self, message: AnyMessage, body: Buffer) -> None:
        """Waits while the window is full. Raises ConnectionLost once this direction has ended."""
        size = len(codec.encode(message)[0]) + len(body)
        while self._end is None and self._items and self._bytes + size > WINDOW:
            await self._changed.wait()
        if self._end is not None:
            raise ConnectionLost(str(self._end))
        self._bytes += size
        self._items.append((self._bandwidth.arrival(size), size, (message, body)))
        self._notify()

    async def get(self) -> _Item:
        """The next frame, once it has arrived. Raises the error given to `end` after the last."""
        while not self._items:
            if self._end is not None:
                error, self._end = self._end, ConnectionLost("the connection is closed")
                raise error
            await self._changed.wait()
        when, size, item = self._items[0]
        if (wait := when - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(wait)
            if not self._items:  # dropped meanwhile
                return await self.get()
        self._items.popleft()
        self._bytes -= size
        self._notify()
        return item

    def end(self, error: NetworkError, drop: bool = False) -> None:
        """Accept no more items; `drop` those in flight as well."""
        if self._end is None:
            self._end = error
        if drop:
            self._items.clear()
            self._bytes = 0
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class EmulatedConnection:
    """See `transport.Connection`."""

    def __init__(self, inner: Connection, send: _Bandwidth, receive: _Bandwidth, tasks: TaskSet) -> None:
        self._inner = inner
        self._out, self._in = _Direction(send), _Direction(receive)
        self._sender = tasks.start(self._send_all(), f"to {inner.peer}")
        tasks.start(self._receive_all(), f"from {inner.peer}")

    @property
    def peer(self) -> PeerId:
        return self._inner.peer

    @property
    def remote(self) -> str:
        return self._inner.remote

    async def send(self, message: AnyMessage, body: Buffer = b"") -> None:
        await self._out.put(message, bytes(body))

    async def receive(self) -> tuple[AnyMessage, memoryview]:
        message, body = await self._in.get()
        return message, memoryview(body)

    async def close(self) -> None:
        self._out.end(ConnectionLost("the connection was closed here"))
        self._in.end(ConnectionLost("the connection was closed here"), drop=True)

    def abort(self) -> None:
        for direction in (self._out, self._in):
            direction.end(ConnectionLost("the connection was closed here"), drop=True)
        self._inner.abort()

    async def flushed(self) -> None:
        """Wait until all that was sent before `close` is sent on."""
        await asyncio.wait({self._sender})

    async def _send_all(self) -> None:
        try:
            while True:
                message, body = await self._out.get()
                await self._inner.send(message, body)
        except NetworkError as error:
            self._out.end(error, drop=True)
        finally:
            await self._inner.close()

    async def _receive_all(self) -> None:
        try:
            while True:
                await self._in.put(*await self._inner.receive())
        except NetworkError as error:
            self._in.end(error)
            self._out.end(error, drop=True)


class EmulatedTransport:
    """See `transport.Transport`. Closing it closes the transport inside."""

    def __init__(self, inner: Transport, shape: LinkShape) -> None:
        self._inner = inner
        self._send = _Bandwidth(shape.send_rate, shape.send_delay_s)
        self._receive = _Bandwidth(shape.receive_rate, shape.receive_delay_s)
        self._tasks = TaskSet("emulated transport")

    @property
    def peer(self) -> PeerId:
        return self._inner.peer

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._inner.addresses

    async def dial(self, peer: PeerId, addresses: Sequence[str] = ()) -> Connection:
        return self._emulate(await self._inner.dial(peer, addresses))

    async def serve(self, handler: Handler) -> None:
        async def emulated(inner: Connection) -> None:
            connection = self._emulate(inner)
            try:
                await handler(connection)
            finally:
                await connection.close()
            await connection.flushed()

        await self._inner.serve(emulated)

    async def close(self) -> None:
        await self._tasks.close()
        await self._inner.close()

    def _emulate(self, inner: Connection) -> EmulatedConnection:
        return EmulatedConnection(inner, self._send, self._receive, self._tasks)
