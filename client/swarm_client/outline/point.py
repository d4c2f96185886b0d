"""One part of an outlined answer: an ordinary generation, kept until its turn to be shown, redone when it fails.

Owns the part's tokens, text and times. A part that fails is gone on with from the tokens it has, so that nothing which
was shown changes, and alone, after the others: what failed for want of room finds some then. Knows no outline.
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

ATTEMPTS = 3

Ask = Callable[[Sequence[int], int], GenerationStream]
"""(prompt, max_new_tokens) -> the generation. Raises InvalidRequest."""


class PointSlots:
    """The parts of one answer are written together, as many at once as `slots` has room for; redone ones alone."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots = slots
        self._together = 0  # parts that are being written for the first time, or wait to be
        self._calm = asyncio.Event()
        self._redoing = asyncio.Lock()

    @asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        self._together += 1
        self._calm.clear()
        try:
            async with self._slots:
                yield
        finally:
            self._together -= 1
            if not self._together:
                self._calm.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self._redoing:
            await self._calm.wait()
            async with self._slots:
                yield


@dataclass(slots=True)
class PointGeneration:
    """`run` writes it; whoever shows it takes `pieces` until None comes. `error`: why it is incomplete, if it is.

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
    pieces: asyncio.Queue[TextChunk | None] = field(default_factory=asyncio.Queue)
    tokens: list[int] = field(default_factory=list)
    answers: list[GenerationResult] = field(default_factory=list)  # of each attempt
    error: InvalidRequest | NoRoute | NetworkError | None = None
    reason: FinishReason | None = None
    stream: GenerationStream | None = None  # of the attempt under way
    began: float = field(init=False)
    first: float | None = None
    ended: float = 0.0
    _lead: str = ""  # blanks before any text
    _text: list[str] = field(default_factory=list)
    _attempts: int = 0

    def __post_init__(self) -> None:
        self.began = self.clock()

    async def run(self, ask: Ask, turns: PointSlots) -> None:
        """Leaves in `error` what three attempts could not overcome."""
        try:
            async with turns.together():
                await self._attempt(ask)
            while self.error is not None and self._attempts < ATTEMPTS:
                async with turns.alone():
                    await self._attempt(ask)
        finally:
            self.ended = self.clock()
            self.pieces.put_nowait(None)

    @property
    def longest(self) -> GenerationResult | None:
        """The attempt that brought most of it."""
        return max(self.answers, key=lambda a: len(a.token_ids), default=None)

    def report(self) -> PointReport:
        return PointReport(
            self.title,
            "".join(self._text),
            tuple(self.tokens),
            self.prompt,
            self.reason,
            self.began,
            self.first,
            self.ended or self.clock(),
            self.shared_prefix_tokens,
            max((a.cached_prompt_tokens for a in self.answers), default=0),
            self.longest.strategy if self.longest else "",
            self._attempts,
            str(self.error) if self.error else "",
        )

    async def _attempt(self, ask: Ask) -> None:
        self._attempts += 1
        self.error = None
        try:
            self.stream = stream = ask((*self.prompt, *self.tokens), self.max_new_tokens - len(self.tokens))
            try:
                async with stream:
                    async for piece in stream:
                        self._settle(piece)
                        if self.stops.hit is not None:
                            break
            finally:
                self.answers.append(stream.result)
        except (InvalidRequest, NoRoute, NetworkError) as error:
            self.error = None if self._complete() else error
        if self.error is None:
            self._finish()

    def _settle(self, piece: TextChunk) -> None:
        if piece.token_ids and self.first is None:
            self.first = self.clock()
        text, before = "", len(self.tokens)
        for token in piece.token_ids:
            self.tokens.append(token)
            if token not in self.eos_ids:
                text += self._show(self.decoder.push(token))
            if self.stops.hit is not None:
                break  # a lucky guess may have brought more, and guesses change no token
        if piece.token_ids or piece.waiting:
            self.pieces.put_nowait(TextChunk(text, tuple(self.tokens[before:]), piece.trace, piece.waiting))

    def _complete(self) -> bool:
        """Whether an attempt failed when there was nothing left to write."""
        return len(self.tokens) >= self.max_new_tokens or bool(self.tokens and self.tokens[-1] in self.eos_ids)

    def _show(self, text: str) -> str:
        """What can be shown now. Whatever blanks come first, one separates the text from its heading."""
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
            self.pieces.put_nowait(TextChunk(shown + held, (), ()))
        if self.stops.hit is not None:
            self.reason = FinishReason.STOP
        elif self.tokens and self.tokens[-1] in self.eos_ids:
            self.reason = FinishReason.EOS
        else:
            self.reason = FinishReason.LENGTH
