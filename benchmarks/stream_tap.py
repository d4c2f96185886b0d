"""A TCP relay in front of a gateway that notes when each part of each streamed answer passed.

Owns the timing of bytes. Knows of HTTP and SSE only what separates one answer from the next on a connection, so that
any load generator can be timed without its help.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

BEGIN, DATA, END = b"HTTP/1.1 ", b"data: {", b"data: [DONE]"


@dataclass(slots=True)
class TimedAnswer:
    """One response: its status, and when data passed, in seconds of `time.perf_counter`."""

    status: int
    requested: float
    times: list[float] = field(default_factory=list)
    done: bool = False

    @property
    def longest_gap_s(self) -> float:
        """Between two parts after the first; 0 with fewer than two. Pings are no data."""
        return max((b - a for a, b in itertools.pairwise(self.times)), default=0.0)


@dataclass(slots=True)
class StreamTap:
    """`port`: for clients, in place of the gateway's. HTTP/1.1: one answer at a time on a connection."""

    port: int = 0
    answers: list[TimedAnswer] = field(default_factory=list)

    def streamed(self) -> list[TimedAnswer]:
        return [answer for answer in self.answers if len(answer.times) > 1]

    async def relay(self, target_port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it."""
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", target_port)
        requested = time.perf_counter()

        async def up() -> None:
            nonlocal requested
            while part := await reader.read(1 << 16):
                requested = time.perf_counter()
                there_writer.write(part)
                await there_writer.drain()
            there_writer.close()

        async def down() -> None:
            answer: TimedAnswer | None = None
            while part := await there_reader.read(1 << 16):
                answer = self._note(answer, part, requested)
                writer.write(part)
                await writer.drain()
            writer.close()

        with contextlib.suppress(ConnectionError):
            await asyncio.gather(up(), down())

    def _note(self, answer: TimedAnswer | None, part: bytes, requested: float) -> TimedAnswer | None:
        if part.startswith(BEGIN):
            answer = TimedAnswer(int(part[len(BEGIN) : len(BEGIN) + 3]), requested)
            self.answers.append(answer)
        if answer is not None and DATA in part:
            answer.times.append(time.perf_counter())
        if answer is not None and END in part:
            answer.done = True
        return answer


@asynccontextmanager
async def tapped(target_port: int) -> AsyncIterator[StreamTap]:
    """Relay connections to `target_port` of this machine, and note what comes back."""
    tap = StreamTap()
    server = await asyncio.start_server(lambda r, w: tap.relay(target_port, r, w), "127.0.0.1", 0)
    tap.port = server.sockets[0].getsockname()[1]
    async with server:
        yield tap
