"""TLS on a socket of our own: an asyncio transport in which OpenSSL reads and writes the socket itself.

The event loops' own TLS passes every byte through buffers in memory on its way; here it goes from the kernel to OpenSSL
to where the protocol wants it. Owns the socket, its handshake, what waits to be sent and a farewell that loses nothing.
Knows neither frames nor whose certificate it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import ssl
import termios
from collections import deque
from collections.abc import Callable
from typing import Any

RECORD = 16 << 10  # bytes of the largest TLS record
READ_AT_ONCE = 256 << 10  # then others have their turn
HIGH_WATER = 64 << 10

_NONE = bytes(4)  # an int of the system's that is 0
_CORK: int | None = getattr(socket, "TCP_CORK", None)
_Watch = Callable[..., Any]


async def shake_hands(plain: socket.socket, context: ssl.SSLContext, server: bool) -> ssl.SSLSocket:
    """TLS on a connected, non-blocking socket, which is closed if that fails. Raises OSError."""
    loop = asyncio.get_running_loop()
    try:
        tls = context.wrap_socket(plain, server_side=server, do_handshake_on_connect=False)
    except BaseException:
        plain.close()
        raise
    try:
        while True:
            try:
                tls.do_handshake()
                return tls
            except ssl.SSLWantReadError:
                await _ready(tls, loop.add_reader, loop.remove_reader)
            except ssl.SSLWantWriteError:
                await _ready(tls, loop.add_writer, loop.remove_writer)
    except BaseException:
        tls.close()
        raise


async def _ready(tls: ssl.SSLSocket, watch: _Watch, unwatch: _Watch) -> None:
    ready = asyncio.Event()
    watch(tls, ready.set)
    try:
        await ready.wait()
    finally:
        unwatch(tls)


class TlsTransport(asyncio.Transport):
    """See `asyncio.Transport`; what is written is not copied and must not change afterwards.

    Extra info: `ssl_object`, the socket, as which it can also be asked for what TLS has agreed on; `socket`.
    """

    def __init__(self, tls: ssl.SSLSocket, protocol: asyncio.BufferedProtocol) -> None:
        super().__init__({"ssl_object": tls, "socket": tls})
        self._loop = asyncio.get_running_loop()
        self._tls = tls
        self._protocol = protocol
        self._backlog: deque[memoryview] = deque()
        self._waiting = 0  # bytes of it
        self._corked = False
        self._high = HIGH_WATER
        self._held_back = False  # the protocol has been told to wait
        self._reading = False
        self._ended = False  # nothing more comes
        self._closing = False
        self._gone = False
        protocol.connection_made(self)
        self.resume_reading()

    # What a protocol asks for.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing or self._gone or not len(data):
            return
        self._backlog.append(memoryview(data))
        self._waiting += len(data)
        if len(self._backlog) == 1:
            if len(data) > RECORD:
                self._cork(True)
            self._send()
            if self._backlog and not self._gone:
                self._loop.add_writer(self._tls, self._writable)
        if self._waiting > self._high and not self._held_back and not self._gone:
            self._held_back = True
            self._protocol.pause_writing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """`low` is 0: whoever waits goes on when all is sent."""
        self._high = HIGH_WATER if high is None else high

    def get_write_buffer_size(self) -> int:
        return self._waiting

    def pause_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._tls)

    def resume_reading(self) -> None:
        if not self._reading and not self._gone:
            self._reading = True
            self._loop.add_reader(self._tls, self._readable)
            self._loop.call_soon(self._readable)  # what OpenSSL has read already does not show at the socket

    def is_reading(self) -> bool:
        return self._reading

    def is_closing(self) -> bool:
        return self._closing or self._gone

    def close(self) -> None:
        """Send what waits, say goodbye, and be gone when the other side has said so too."""
        if not self.is_closing():
            self._closing = True
            if not self._backlog:
                self._say_goodbye()

    def abort(self) -> None:
        self._drop(None)

    # What the event loop tells us.

    def _readable(self) -> None:
        left, dry = READ_AT_ONCE, False
        while self._reading and not self._closing and left > 0 and not dry:
            room = memoryview(self._protocol.get_buffer(-1))[:left]
            try:
                filled, dry = self._fill(room)
            except OSError as error:
                self._drop(error)
                return
            left -= filled
            if filled:
                self._protocol.buffer_updated(filled)
            if self._ended:
                self._protocol.eof_received()
                self.close()
        if self._closing and not self._backlog:
            self._see_off()
        elif self._reading and self._tls.pending():
            self._loop.call_soon(self._readable)

    def _fill(self, room: memoryview) -> tuple[int, bool]:
        """Read until `room` is full or nothing more is there. -> bytes read, whether to stop. Raises OSError."""
        filled = 0
        try:
            while filled < len(room) and not self._ended:
                read = self._tls.recv_into(room[filled:])
                filled += read
                self._ended = not read
                if read < RECORD and filled < len(room) and self._is_dry():
                    return filled, True
        except ssl.SSLWantReadError:
            return filled, True
        return filled, self._ended or not room

    def _is_dry(self) -> bool:
        """Whether nothing is there to read: to ask the system is cheaper than to have OpenSSL try and fail."""
        return not self._tls.pending() and fcntl.ioctl(self._tls, termios.FIONREAD, _NONE) == _NONE

    def _cork(self, corked: bool) -> None:
        """OpenSSL writes each record for itself; corked they travel in full segments, which wake the reader less."""
        if corked != self._corked and _CORK is not None:
            self._corked = corked
            with contextlib.suppress(OSError):
                self._tls.setsockopt(socket.IPPROTO_TCP, _CORK, corked)

    def _send(self) -> None:
        """Send of the backlog what the socket takes."""
        try:
            while self._backlog:
                sent = self._tls.send(self._backlog[0])
                self._waiting -= sent
                if sent == len(self._backlog[0]):
                    self._backlog.popleft()
                else:
                    self._backlog[0] = self._backlog[0][sent:]
            self._cork(False)
        except ssl.SSLWantWriteError:
            return
        except OSError as error:
            self._drop(error)

    def _writable(self) -> None:
        self._send()
        if self._gone or self._backlog:
            return
        self._loop.remove_writer(self._tls)
        if self._closing:
            self._say_goodbye()
        elif self._held_back:
            self._held_back = False
            self._protocol.resume_writing()

    # The end.

    def _say_goodbye(self) -> None:
        """All is sent. To close the socket now might destroy that at the other side: it has to close its end first."""
        with contextlib.suppress(OSError):
            self._tls.unwrap()  # which wants to read the other side's goodbye at once, but says ours before
        try:
            self._tls.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._drop(error)
            return
        self.resume_reading()

    def _see_off(self) -> None:
        """Nobody wants what still comes; its end is the end."""
        try:
            while os.read(self._tls.fileno(), READ_AT_ONCE):
                pass
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(error)
            return
        self._drop(None)

    def _drop(self, error: OSError | None) -> None:
        if self._gone:
            return
        self._gone = True
        self._reading = False
        self._loop.remove_reader(self._tls)
        self._loop.remove_writer(self._tls)
        self._backlog.clear()
        self._waiting = 0
        self._tls.close()
        self._loop.call_soon(self._protocol.connection_lost, error)
