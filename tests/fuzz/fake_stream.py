"""A FramedStream without a socket: bytes go in by `feed`, and what it writes is kept."""

from __future__ import annotations

import asyncio
from typing import Any

from swarm.net.base.frame_stream import FramedStream


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.aborted = False

    def write(self, data: Any) -> None:
        self.written += data

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.aborted = True


def feed(stream: FramedStream, data: bytes, size: int) -> None:
    """Have `data` arrive, at most `size` bytes at a time."""
    at = 0
    while at < len(data):
        room = stream.get_buffer(-1)
        count = min(len(room), size, len(data) - at)
        if not count:
            return  # the buffer is full: a real transport would read no more
        room[:count] = data[at : at + count]
        stream.buffer_updated(count)
        at += count
