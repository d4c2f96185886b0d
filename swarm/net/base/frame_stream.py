"""Frames over one byte stream of asyncio: what every socket-like transport has in common.

Owns parsing without needless copies (a large body is read straight into its own buffer), back-pressure both ways and
the rule that a frame is written whole or not at all. Knows neither how the stream came about nor who is at its end.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import numpy as np

from swarm import codec
from swarm.codec import DEFAULT_LIMITS, PREFIX, Buffer, FrameLimits
from swarm.errors import ConnectionLost, NetworkError, ProtocolError
from swarm.messages import AnyMessage
from swarm.types import PeerId

STAGING = 64 << 10  # bytes read at once; whole small frames are cut out of it
SMALL = 4 << 10  # a body that is sent together with what follows it in the same turn of the loop
PIECE = 256 << 10  # of a large body, between two waits for the socket
UNREAD_HIGH = 2 << 20  # bytes parsed and not yet received, before we stop reading
UNREAD_LOW = 1 << 20
FRAME_COST = 256  # bytes that one queued frame takes besides its content
CLOSE_GRACE_S = 5.0  # for the other side to take what is still buffered


class FramedStream(asyncio.BufferedProtocol):
    """One end of a connection; see `transport.Connection`. Made by an asyncio transport factory.

    `preamble`: before the frames come messages of other protocols, each preceded by its length as a varint. They are
    read one by one with `preamble()`, and not one frame is looked at before `begin()`.
    `on_made` is called once the transport is there.
    """

    def __init__(
        self,
        limits: FrameLimits = DEFAULT_LIMITS,
        preamble: bool = False,
        on_made: Callable[[FramedStream], None] | None = None,
    ) -> None:
        self.peer: PeerId = ""
        self._limits = limits
        self._on_made = on_made
        self._transport: asyncio.Transport | None = None
        self._sending = asyncio.Lock()
        self._writable = asyncio.Event()
        self._writable.set()
        self._arrived = asyncio.Event()
        self._gone = asyncio.Event()  # the transport is closed
        self._on_gone: Callable[[FramedStream], None] | None = None
        # Writing: small frames of this turn of the loop, which go as one.
        self._small: list[Buffer] = []
        self._small_size = 0
        self._turn = False
        self._end: NetworkError | None = None  # why there are no more frames
        # Reading: bytes [_start, _stop) of the staging buffer, or a piece that is read into its own buffer.
        self._staging = memoryview(bytearray(STAGING))
        self._start = self._stop = 0
        self._piece: memoryview | None = None
        self._piece_filled = 0
        self._begun = not preamble
        self._sizes: tuple[int, int] | None = None  # of the frame being read: header, body
        self._header: bytes | None = None
        self._frames: deque[tuple[bytes, memoryview]] = deque()
        self._unread = 0
        self._reading_paused = False

    # What a connection does.

    async def send(self, message: AnyMessage, body: Buffer = b"") -> None:
        """See `transport.Connection.send`. A send that is cancelled half way through still completes its frame."""
        header, body = codec.encode(message, body)
        async with self._sending:
            await self._ready()
            if len(body) <= SMALL:
                self._write_soon(header, body)
                return
            self._flush()
            if len(body) <= STAGING:
                self._write(header + body)
                return
            self._write(header)
            rest = memoryview(body).cast("B")
            while rest:
                self._write(rest[:PIECE])
                rest = rest[PIECE:]
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
            self._arrived.clear()
            await self._arrived.wait()
        header, body = self._frames.popleft()
        self._unread -= len(header) + len(body) + FRAME_COST
        if self._unread <= UNREAD_LOW:
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
        if self._transport is not None and not self._gone.is_set() and not self._transport.is_closing():
            self._transport.close()
            asyncio.get_running_loop().call_later(CLOSE_GRACE_S, self._transport.abort)

    # What a transport does with it.

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
        """Wait until the transport is gone, what was buffered sent or given up."""
        await self._gone.wait()

    def on_gone(self, callback: Callable[[FramedStream], None]) -> None:
        """Have `callback(self)` called once the transport is gone, at once if it is."""
        self._on_gone = callback
        if self._gone.is_set():
            callback(self)

    async def preamble(self, limit: int = STAGING // 2) -> bytes:
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
            self._arrived.clear()
            await self._arrived.wait()

    def begin(self) -> None:
        """Frames from here on. Idempotent."""
        if not self._begun:
            self._begun = True
            self._guarded(self._parse)
            self._resume_reading()

    async def write_delimited(self, data: bytes) -> None:
        """A message of another protocol, preceded by its length as a varint."""
        self._write(varint(len(data)) + data)
        await self._ready()

    async def _ready(self) -> None:
        await self._writable.wait()
        if self._end is not None or self._transport is None or self._transport.is_closing():
            raise ConnectionLost("the connection is closed")

    def _write_soon(self, header: bytes, body: Buffer) -> None:
        """A small frame. The first of a turn of the loop goes at once; those that follow it go together after them."""
        if not self._turn:
            self._turn = True
            asyncio.get_running_loop().call_soon(self._end_turn)
            self._write(header + body if body else header)
            return
        self._small += (header, body)
        self._small_size += len(header) + len(body)
        if self._small_size >= STAGING:
            self._flush()

    def _end_turn(self) -> None:
        self._turn = False
        self._flush()

    def _flush(self) -> None:
        if self._small:
            data = b"".join(self._small)
            self._small.clear()
            self._small_size = 0
            self._write(data)

    def _write(self, data: Buffer) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def _finish(self, error: NetworkError) -> None:
        """No more frames after those that have arrived, and no more sends."""
        if self._end is None:
            self._end = error
        self._arrived.set()
        self._writable.set()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=PIECE)
        if self._on_made is not None:
            self._on_made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone.set()
        if self._on_gone is not None:
            self._on_gone(self)
        self._finish(ConnectionLost("the other side closed the connection" if exc is None else f"lost: {exc}"))

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._piece is not None:
            return self._piece[self._piece_filled :]
        return self._staging[self._stop :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._end is not None:
            return
        if self._piece is None:
            self._stop += nbytes
        else:
            self._piece_filled += nbytes
        if self._begun:
            self._guarded(self._parse)
        else:
            if self._stop == STAGING:
                self._pause_reading()
            self._arrived.set()

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

    def _guarded(self, parse: Callable[[], None]) -> None:
        try:
            parse()
        except ProtocolError as error:
            self._finish(error)
            if self._transport is not None:
                self._transport.abort()

    def _parse(self) -> None:
        """Take the piece that is complete, then cut whatever is complete out of the staging buffer."""
        if self._piece is not None:
            if self._piece_filled < len(self._piece):
                return
            piece, self._piece = self._piece, None
            self._take(piece)
        while True:
            if self._sizes is None:
                if self._stop - self._start < PREFIX.size:
                    self._compact()
                    return
                prefix = self._staging[self._start : self._start + PREFIX.size]
                self._sizes = codec.parse_prefix(prefix, self._limits)
                self._start += PREFIX.size
            need = self._sizes[0] if self._header is None else self._sizes[1]
            available = self._stop - self._start
            piece = _allocate(need)
            filled = min(need, available)
            piece[:filled] = self._staging[self._start : self._start + filled]
            self._start += filled
            if filled < need:  # the staging buffer is used up: read the rest into its place
                self._start = self._stop = 0
                self._piece, self._piece_filled = piece, filled
                return
            self._take(piece)

    def _take(self, piece: memoryview) -> None:
        """A header or a body is complete."""
        assert self._sizes is not None
        if self._header is None:
            self._header = bytes(piece)
            if self._sizes[1]:
                return
            piece = memoryview(b"")
        self._frames.append((self._header, piece))
        self._unread += len(self._header) + len(piece) + FRAME_COST
        self._sizes = self._header = None
        self._arrived.set()
        if self._unread > UNREAD_HIGH:
            self._pause_reading()

    def _cut_preamble(self, limit: int) -> bytes | None:
        """The next message of another protocol; None while it is incomplete."""
        data = bytes(self._staging[self._start : self._stop])
        length = next((i for i, byte in enumerate(data[:5], 1) if byte < 0x80), 0)  # of the varint
        if not length:
            if len(data) >= 5:
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
        """Move what is left in the staging buffer to its front, so that there is room to read."""
        rest = bytes(self._staging[self._start : self._stop])
        self._staging[: len(rest)] = rest
        self._start, self._stop = 0, len(rest)


def _allocate(size: int) -> memoryview:
    """A buffer whose pages are not touched before data arrives, so that announcing a large body costs us nothing."""
    return np.empty(size, np.uint8).data


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
