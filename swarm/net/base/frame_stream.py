"""Length-prefixed frames over one asyncio byte stream: the base of every socket transport.

Owns parsing without needless copies (a large body is read straight into its own buffer), back-pressure both ways and
the rule that a frame is written whole or not at all. Does not know how the stream was opened or how its peer was
authenticated.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from swarm import codec
from swarm.codec import DEFAULT_LIMITS, PREFIX, Buffer, FrameLimits
from swarm.errors import ConnectionLost, NetworkError, ProtocolError
from swarm.messages import AnyMessage
from swarm.types import PeerId


@dataclass(frozen=True, slots=True)
class StreamPolicy:
    """Buffers of one stream, in bytes: throughput against memory per connection."""

    read_buffer: int = 64 << 10  # read at once; whole small frames are cut out of it
    coalesce_below: int = 4 << 10  # smaller bodies sent in one iteration of the event loop share a write
    write_chunk: int = 256 << 10  # of a large body, between two waits for the socket; also the write high-water mark
    unread_high: int = 2 << 20  # parsed and not yet received: reading pauses above this
    unread_low: int = 1 << 20  # and resumes below this
    frame_overhead: int = 256  # what one queued frame takes besides its content
    close_timeout_s: float = 5.0  # for the peer to read what is still buffered at `close`


POLICY = StreamPolicy()
MAX_LENGTH_VARINT = 5  # bytes


class FramedStream(asyncio.BufferedProtocol):
    """One end of a connection; see `transport.Connection`. Made by an asyncio transport factory.

    `preamble`: messages of other protocols precede the frames, each with its length as a varint. They are read one by
    one with `preamble()`, and no frame is parsed before `begin()`.
    `on_made` is called once the asyncio transport is connected.
    """

    def __init__(
        self,
        limits: FrameLimits = DEFAULT_LIMITS,
        preamble: bool = False,
        on_made: Callable[[FramedStream], None] | None = None,
    ) -> None:
        self.peer: PeerId = ""
        self.remote = ""  # the IP address that the peer was seen at
        self._limits = limits
        self._on_made = on_made
        self._transport: asyncio.Transport | None = None
        self._send_lock = asyncio.Lock()
        self._writable = asyncio.Event()
        self._writable.set()
        self._received = asyncio.Event()
        self._closed = asyncio.Event()  # the asyncio transport is closed
        self._on_closed: Callable[[FramedStream], None] | None = None
        # Writing: small frames of this iteration of the event loop, which go in one write.
        self._pending: list[Buffer] = []
        self._pending_size = 0
        self._flush_scheduled = False
        self._end: NetworkError | None = None  # why there are no more frames
        # Reading: bytes [_start, _stop) of the read buffer, or a part of a frame that is read into its own buffer.
        self._buffer = memoryview(b"")  # made once there is a connection
        self._start = self._stop = 0
        self._partial: memoryview | None = None
        self._partial_filled = 0
        self._framing = not preamble
        self._sizes: tuple[int, int] | None = None  # of the frame being read: header, body
        self._header: bytes | None = None
        self._frames: deque[tuple[bytes, memoryview]] = deque()
        self._unread = 0
        self._reading_paused = False

    # Connection.

    async def send(self, message: AnyMessage, body: Buffer = b"") -> None:
        """See `transport.Connection.send`. A send that is cancelled half way through still completes its frame."""
        header, body = codec.encode(message, body)
        async with self._send_lock:
            await self._ready()
            if len(body) <= POLICY.coalesce_below:
                self._write_coalesced(header, body)
                return
            self._flush()
            if len(body) <= POLICY.read_buffer:
                self._write(header + body)
                return
            self._write(header)
            rest = memoryview(body).cast("B")
            while rest:
                self._write(rest[: POLICY.write_chunk])
                rest = rest[POLICY.write_chunk :]
                try:
                    await self._ready()
                except asyncio.CancelledError:
                    self._write(bytes(rest))
                    raise

    async def receive(self) -> tuple[AnyMessage, memoryview]:
        while not self._frames:
            if self._end is not None:
                error, self._end = self._end, ConnectionLost("the connection is closed")
                raise error
            self._received.clear()
            await self._received.wait()
        header, body = self._frames.popleft()
        self._unread -= len(header) + len(body) + POLICY.frame_overhead
        if self._unread <= POLICY.unread_low:
            self._resume_reading()
        try:
            return codec.decode(header), body
        except ProtocolError:
            self.abort()
            raise

    async def close(self) -> None:
        self._flush()
        self._finish(ConnectionLost("the connection was closed here"))
        self._frames.clear()
        if self._transport is not None and not self._closed.is_set() and not self._transport.is_closing():
            self._transport.close()
            asyncio.get_running_loop().call_later(POLICY.close_timeout_s, self._transport.abort)

    # For the transport that owns the stream.

    def abort(self) -> None:
        """Close without sending what is buffered."""
        self._finish(ConnectionLost("the connection was closed here"))
        self._frames.clear()
        if self._transport is not None:
            self._transport.abort()

    def transport_info(self, name: str) -> Any:
        """See `asyncio.BaseTransport.get_extra_info`; None without a transport."""
        return self._transport.get_extra_info(name) if self._transport is not None else None

    async def closed(self) -> None:
        """Wait until the asyncio transport is closed, with what was buffered sent or dropped."""
        await self._closed.wait()

    def on_closed(self, callback: Callable[[FramedStream], None]) -> None:
        """Have `callback(self)` called once the asyncio transport is closed, at once if it is."""
        self._on_closed = callback
        if self._closed.is_set():
            callback(self)

    async def preamble(self, limit: int = POLICY.read_buffer // 2) -> bytes:
        """The next message before the frames. Raises ConnectionLost, and ProtocolError if it is over `limit` bytes."""
        while True:
            try:
                message = self._cut_preamble(limit)
            except ProtocolError:
                self.abort()
                raise
            if message is not None:
                return message
            if self._end is not None:
                raise self._end
            self._received.clear()
            await self._received.wait()

    def begin(self) -> None:
        """End of the preamble: parse frames from here on. Idempotent."""
        if not self._framing:
            self._framing = True
            self._parse_or_abort()
            self._resume_reading()

    async def write_delimited(self, data: bytes) -> None:
        """Send a message of another protocol, preceded by its length as a varint."""
        self._write(varint(len(data)) + data)
        await self._ready()

    async def _ready(self) -> None:
        await self._writable.wait()
        if self._end is not None or self._transport is None or self._transport.is_closing():
            raise ConnectionLost("the connection is closed")

    def _write_coalesced(self, header: bytes, body: Buffer) -> None:
        """Write a small frame: the first of a loop iteration at once, those that follow it together at its end."""
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._scheduled_flush)
            self._write(header + body if body else header)
            return
        self._pending += (header, body)
        self._pending_size += len(header) + len(body)
        if self._pending_size >= POLICY.read_buffer:
            self._flush()

    def _scheduled_flush(self) -> None:
        self._flush_scheduled = False
        self._flush()

    def _flush(self) -> None:
        if self._pending:
            data = b"".join(self._pending)
            self._pending.clear()
            self._pending_size = 0
            self._write(data)

    def _write(self, data: Buffer) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _finish(self, error: NetworkError) -> None:
        """Accept no more frames after those already received, and no more sends."""
        if self._end is None:
            self._end = error
        self._received.set()
        self._writable.set()

    # asyncio.BufferedProtocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._buffer = memoryview(bytearray(POLICY.read_buffer))
        self._transport.set_write_buffer_limits(high=POLICY.write_chunk)
        if self._on_made is not None:
            self._on_made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed.set()
        if self._on_closed is not None:
            self._on_closed(self)
        self._finish(ConnectionLost("the other side closed the connection" if exc is None else f"lost: {exc}"))

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._partial is not None:
            return self._partial[self._partial_filled :]
        return self._buffer[self._stop :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._end is not None:
            return
        if self._partial is None:
            self._stop += nbytes
        else:
            self._partial_filled += nbytes
        if self._framing:
            self._parse_or_abort()
        else:
            if self._stop == POLICY.read_buffer:
                self._pause_reading()
            self._received.set()

    def _pause_reading(self) -> None:
        if not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._reading_paused and self._transport is not None:
            self._reading_paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    # Parsing.

    def _parse_or_abort(self) -> None:
        try:
            self._parse()
        except ProtocolError as error:
            self._finish(error)
            if self._transport is not None:
                self._transport.abort()

    def _parse(self) -> None:
        """Finish the partial header or body if it is complete, then cut complete ones out of the read buffer."""
        if self._partial is not None:
            if self._partial_filled < len(self._partial):
                return
            part, self._partial = self._partial, None
            self._add_part(part)
        while True:
            if self._sizes is None:
                if self._stop - self._start < PREFIX.size:
                    self._compact()
                    return
                prefix = self._buffer[self._start : self._start + PREFIX.size]
                self._sizes = codec.parse_prefix(prefix, self._limits)
                self._start += PREFIX.size
            need = self._sizes[0] if self._header is None else self._sizes[1]
            part = _allocate(need)
            filled = min(need, self._stop - self._start)
            part[:filled] = self._buffer[self._start : self._start + filled]
            self._start += filled
            if filled < need:  # the read buffer is used up: read the rest into its place
                self._start = self._stop = 0
                self._partial, self._partial_filled = part, filled
                return
            self._add_part(part)

    def _add_part(self, part: memoryview) -> None:
        """A header or a body is complete; after the body the frame is."""
        assert self._sizes is not None
        if self._header is None:
            self._header = bytes(part)
            if self._sizes[1]:
                return
            part = memoryview(b"")
        self._frames.append((self._header, part))
        self._unread += len(self._header) + len(part) + POLICY.frame_overhead
        self._sizes = self._header = None
        self._received.set()
        if self._unread > POLICY.unread_high:
            self._pause_reading()

    def _cut_preamble(self, limit: int) -> bytes | None:
        """The next message of another protocol; None while it is incomplete."""
        data = bytes(self._buffer[self._start : self._stop])
        length = next((i for i, byte in enumerate(data[:MAX_LENGTH_VARINT], 1) if byte < 0x80), 0)  # of the varint
        if not length:
            if len(data) >= MAX_LENGTH_VARINT:
                raise ProtocolError("a preamble without a length")
            return None
        end = length + sum((byte & 0x7F) << 7 * i for i, byte in enumerate(data[:length]))
        if end - length > limit:
            raise ProtocolError(f"a preamble of {end - length} bytes")
        if len(data) < end:
            return None
        self._start += end
        return data[length:end]

    def _compact(self) -> None:
        """Move what is left in the read buffer to its front, so that there is room to read."""
        rest = bytes(self._buffer[self._start : self._stop])
        self._buffer[: len(rest)] = rest
        self._start, self._stop = 0, len(rest)


def _allocate(size: int) -> memoryview:
    """A buffer whose pages are not touched before data arrives, so that a large announced length costs nothing."""
    return np.empty(size, np.uint8).data


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
