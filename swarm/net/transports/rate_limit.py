"""Any transport with a cap on its upload bandwidth: a volunteer's `--upload-limit`.

Owns the token bucket and the count of bytes sent. All connections of the transport share the bucket, first come first
served. What the directory sends is not counted: a few kilobytes a second.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from swarm.codec import Buffer
from swarm.messages import AnyMessage
from swarm.net.base.transport import Connection, Handler, OnUpgrade, Transport, UpgradingTransport
from swarm.types import PeerId

FRAME_OVERHEAD = 160  # bytes that prefix, header and encryption add to a frame's body, about


class UploadBucket:
    """A token bucket for what a node sends. `rate`: bytes a second, infinite for no cap. `sent`: bytes so far.

    `burst_s`: how many seconds' worth of the rate may be sent at once after a pause.
    """

    def __init__(self, rate: float = math.inf, burst_s: float = 0.25) -> None:
        self.rate = rate
        self.sent = 0
        self._burst_s = burst_s
        self._free_at = -math.inf  # loop time at which all that was taken so far is sent

    async def take(self, size: int) -> None:
        """Wait until `size` bytes may be sent."""
        self.sent += size
        if math.isinf(self.rate):
            return
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now - self._burst_s) + size / self.rate
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)


class RateLimitedConnection:
    """See `transport.Connection`."""

    def __init__(self, inner: Connection, upload: UploadBucket, on_closed: Callable[[Connection], None]) -> None:
        self._inner = inner
        self._upload = upload
        self._on_closed = on_closed
        self._send_lock = asyncio.Lock()  # frames are sent in the order of the calls

    @property
    def peer(self) -> PeerId:
        return self._inner.peer

    @property
    def remote(self) -> str:
        return self._inner.remote

    async def send(self, message: AnyMessage, body: Buffer = b"") -> None:
        async with self._send_lock:
            await self._upload.take(memoryview(body).nbytes + FRAME_OVERHEAD)
            await self._inner.send(message, body)

    async def receive(self) -> tuple[AnyMessage, memoryview]:
        return await self._inner.receive()

    async def close(self) -> None:
        self._on_closed(self._inner)
        await self._inner.close()

    def abort(self) -> None:
        self._on_closed(self._inner)
        self._inner.abort()


class RateLimitedTransport:
    """See `transport.Transport` and `transport.UpgradingTransport`. Closing it closes the transport inside."""

    def __init__(self, inner: Transport, upload: UploadBucket) -> None:
        self._inner = inner
        self._upload = upload
        self._live: dict[Connection, RateLimitedConnection] = {}  # by the connection inside

    @property
    def peer(self) -> PeerId:
        return self._inner.peer

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._inner.addresses

    async def dial(self, peer: PeerId, addresses: Sequence[str] = ()) -> Connection:
        return self._wrap(await self._inner.dial(peer, addresses))

    async def serve(self, handler: Handler) -> None:
        async def rate_limited(inner: Connection) -> None:
            connection = self._wrap(inner)
            try:
                await handler(connection)
            finally:
                await connection.close()

        await self._inner.serve(rate_limited)

    def on_upgrade(self, callback: OnUpgrade) -> None:
        """Does nothing if the transport inside does not look for better connections."""

        async def wrapped(old: Connection, better: Connection) -> None:
            wrapper = self._live.get(old)
            if wrapper is None:
                await better.close()
            else:
                await callback(wrapper, self._wrap(better))

        if isinstance(self._inner, UpgradingTransport):
            self._inner.on_upgrade(wrapped)

    async def close(self) -> None:
        await self._inner.close()

    def _wrap(self, inner: Connection) -> RateLimitedConnection:
        connection = self._live[inner] = RateLimitedConnection(inner, self._upload, self._forget)
        return connection

    def _forget(self, inner: Connection) -> None:
        self._live.pop(inner, None)
