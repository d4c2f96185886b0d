"""Server-sent events: their text form, and a response that sends them with pings, back-pressure and errors.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from swarm.errors import SwarmError
from swarm_gateway.errors import ApiError
from swarm_gateway.http.disconnect import gone

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"  # a comment, which every reader ignores


@dataclass(frozen=True, slots=True)
class SsePolicy:
    """`buffered_events`: how far the generation may run ahead of a slow reader."""

    ping_interval_s: float = 10.0
    buffered_events: int = 64
    write_timeout_s: float = 60.0  # a reader that takes nothing for so long has left without saying so
    last_words_s: float = 2.0  # for the last frame, when the gateway stops
    drains: bool = True  # when the gateway stops, a stream may come to its end; False: it has none, and is cut at once


POLICY = SsePolicy()


def data(value: Any) -> bytes:
    """One event without a name. `value`: anything that msgspec encodes."""
    return b"data: " + _encode(value) + b"\n\n"


def event(name: str, value: Any) -> bytes:
    """One event with a name, as in Anthropic's API and OpenAI's Responses."""
    return b"event: " + name.encode() + b"\ndata: " + _encode(value) + b"\n\n"


def comment(text: str) -> bytes:
    """Seen by people who watch the stream, ignored by programs. `text`: one line of ours."""
    return b": " + text.encode() + b"\n\n"


class EventStream(Response):
    """Sends `frames` (each one a whole event, by `data` or `event`) as they come; `frames` is closed in every case, at
    once when the reader hangs up.

    An ApiError or SwarmError of `frames` is sent as the last frame, `on_error(error)`. While nothing comes, `ping` is
    sent every `policy.ping_interval_s`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        on_error: Callable[[ApiError], bytes],
        *,
        ping: bytes = PING,
        policy: SsePolicy = POLICY,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no", **(headers or {})}
        self.status_code = 200
        self.background = None
        self.init_headers(headers)
        self._frames = frames
        self._on_error = on_error
        self._ping = ping
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(self._policy.buffered_events)
        producing = asyncio.ensure_future(self._produce(queue))
        writing = asyncio.ensure_future(self._write(queue, send))
        # an error of ours ends the connection, so that the reader does not take a part for the whole
        producing.add_done_callback(lambda task: task.cancelled() or task.exception() is None or writing.cancel())
        state = scope["app"].state
        stopping = asyncio.ensure_future((state.stopping if self._policy.drains else state.draining).wait())
        tasks = [producing, writing, stopping, asyncio.ensure_future(gone(receive))]
        try:
            await asyncio.wait(tasks[1:], return_when=asyncio.FIRST_COMPLETED)
            if stopping.done() and not writing.done():
                producing.cancel()
                await asyncio.wait((producing,))
                tasks.append(asyncio.ensure_future(self._end(queue)))
                await asyncio.wait((writing,), timeout=self._policy.last_words_s)
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception) and not isinstance(outcome, OSError | TimeoutError):
                raise outcome

    async def _produce(self, queue: asyncio.Queue[bytes | None]) -> None:
        try:
            async with aclosing(self._frames) as frames:
                async for frame in frames:
                    await queue.put(frame)
        except ApiError as error:
            await queue.put(self._on_error(error))
        except SwarmError as error:
            await queue.put(self._on_error(ApiError.of(error)))
        await queue.put(None)

    async def _end(self, queue: asyncio.Queue[bytes | None]) -> None:
        error = ApiError(503, "stopping", "the gateway stops; ask again in a moment", retry_after_s=5.0)
        await queue.put(self._on_error(error))
        await queue.put(None)

    async def _write(self, queue: asyncio.Queue[bytes | None], send: Send) -> None:
        while True:
            try:
                async with asyncio.timeout(self._policy.ping_interval_s):
                    frame = await queue.get()
            except TimeoutError:
                frame = self._ping
            parts = [frame] if frame is not None else []
            while frame is not None and not queue.empty():  # several at once cost one write
                frame = queue.get_nowait()
                parts += [frame] if frame is not None else []
            async with asyncio.timeout(self._policy.write_timeout_s):
                body = b"".join(parts)
                await send({"type": "http.response.body", "body": body, "more_body": frame is not None})
            if frame is None:
                return
