"""One point of an outlined answer: an ordinary generation, buffered until it can be shown, and retried when it fails.

Owns the point's tokens, text and times. A retry continues from the tokens generated so far, so that shown text never
changes, and runs alone, after the other points: a failure for lack of capacity can succeed then. Independent of the
outline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from swarm.errors import InvalidRequest, NetworkError, NoRoute
from swarm.planner.generation.state_machine import FinishReason
from swarm_client.api.outline_report import PointReport
from swarm_client.api.results import GenerationResult, GenerationStream, TextChunk
from swarm_client.generation.stop_strings import StopStrings
from swarm_client.generation.text_stream import TextDecoder

MAX_ATTEMPTS = 3  # more survive more failures; a point that cannot succeed is then reported later

StartPoint = Callable[[Sequence[int], int], GenerationStream]
"""(prompt, max_new_tokens) -> the generation. Raises InvalidRequest."""


class PointSlots:
    """Limits the points of one answer: first attempts run in parallel, as many as `slots` allows; retries run alone."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots = slots
        self._first_attempts = 0  # running or waiting for a slot
        self._no_first_attempts = asyncio.Event()
        self._retrying = asyncio.Lock()

    @asynccontextmanager
    async def first_attempt(self) -> AsyncIterator[None]:
        self._first_attempts += 1
        self._no_first_attempts.clear()
        try:
            async with self._slots:
                yield
        finally:
            self._first_attempts -= 1
            if not self._first_attempts:
                self._no_first_attempts.set()

    @asynccontextmanager
    async def retry(self) -> AsyncIterator[None]:
        async with self._retrying:
            await self._no_first_attempts.wait()
            async with self._slots:
                yield


@dataclass(slots=True)
class PointGeneration:
    """`run` generates it; the reader takes `chunks` up to None. `error`: why it is incomplete, if it is.

    `clock`: seconds after the request. `shared_prefix_tokens`: see PointReport.
    """

    title: str
    heading: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    shared_prefix_tokens: int
    decoder: TextDecoder
    eos_ids: Collection[int]
    stops: StopStrings
    clock: Callable[[], float]
    chunks: asyncio.Queue[TextChunk | None] = field(default_factory=asyncio.Queue)
    tokens: list[int] = field(default_factory=list)
    answers: list[GenerationResult] = field(default_factory=list)  # of each attempt
    error: InvalidRequest | NoRoute | NetworkError | None = None
    reason: FinishReason | None = None
    stream: GenerationStream | None = None  # of the current attempt
    started: float = field(init=False)
    first: float | None = None
    ended: float = 0.0
    _lead: str = ""  # leading blanks, before any text
    _text: list[str] = field(default_factory=list)
    _attempts: int = 0

    def __post_init__(self) -> None:
        self.started = self.clock()

    async def run(self, start: StartPoint, slots: PointSlots) -> None:
        """`error` is left set when the last attempt failed too."""
        try:
            async with slots.first_attempt():
                await self._attempt(start)
            while self.error is not None and self._attempts < MAX_ATTEMPTS:
                async with slots.retry():
                    await self._attempt(start)
        finally:
            self.ended = self.clock()
            self.chunks.put_nowait(None)

    @property
    def longest(self) -> GenerationResult | None:
        """The attempt with the most tokens."""
        return max(self.answers, key=lambda a: len(a.token_ids), default=None)

    def report(self) -> PointReport:
        return PointReport(
            self.title,
            "".join(self._text),
            tuple(self.tokens),
            self.prompt,
            self.reason,
            self.started,
            self.first,
            self.ended or self.clock(),
            self.shared_prefix_tokens,
            max((a.cached_prompt_tokens for a in self.answers), default=0),
            self.longest.strategy if self.longest else "",
            self._attempts,
            str(self.error) if self.error else "",
        )

    async def _attempt(self, start: StartPoint) -> None:
        self._attempts += 1
        self.error = None
        try:
            self.stream = stream = start((*self.prompt, *self.tokens), self.max_new_tokens - len(self.tokens))
            try:
                async with stream:
                    async for chunk in stream:
                        self._commit(chunk)
                        if self.stops.hit is not None:
                            break
            finally:
                self.answers.append(stream.result)
        except (InvalidRequest, NoRoute, NetworkError) as error:
            self.error = None if self._complete() else error
        if self.error is None:
            self._finish()

    def _commit(self, chunk: TextChunk) -> None:
        if chunk.token_ids and self.first is None:
            self.first = self.clock()
        text, before = "", len(self.tokens)
        for token in chunk.token_ids:
            self.tokens.append(token)
            if token not in self.eos_ids:
                text += self._show(self.decoder.push(token))
            if self.stops.hit is not None:
                break  # accepted draft tokens may follow; sequential decoding would have ended here
        if chunk.token_ids or chunk.waiting:
            self.chunks.put_nowait(TextChunk(text, tuple(self.tokens[before:]), chunk.trace, chunk.waiting))

    def _complete(self) -> bool:
        """Whether an attempt failed after its last token."""
        return len(self.tokens) >= self.max_new_tokens or bool(self.tokens and self.tokens[-1] in self.eos_ids)

    def _show(self, text: str) -> str:
        """The text that can be shown now. Leading blanks become one, between the heading and the text."""
        if not self._text:
            self._lead += text
            if not self._lead.strip():
                return ""
            text = " " * (self._lead[0].isspace()) + self._lead.lstrip()
        shown = self.stops.push(text)
        self._text.append(shown)
        return shown

    def _finish(self) -> None:
        shown = self._show(self.decoder.finish())
        held = self.stops.flush()
        self._text.append(held)
        if shown + held:
            self.chunks.put_nowait(TextChunk(shown + held, (), ()))
        if self.stops.hit is not None:
            self.reason = FinishReason.STOP
        elif self.tokens and self.tokens[-1] in self.eos_ids:
            self.reason = FinishReason.EOS
        else:
            self.reason = FinishReason.LENGTH
