"""One outlined answer as the user sees it: the points in order, each as soon as it can be shown, then the result.

Owns the tasks that generate the outline and its points, the joined text, and the fallback: without a usable outline the
answer is an ordinary one, and its report has the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import takewhile
from typing import Protocol

from swarm.errors import NetworkError, NoRoute
from swarm.net.base.tasks import TaskSet
from swarm.planner.generation.state_machine import FinishReason
from swarm.types import Chain
from swarm_client.api.options import OUTLINE, ChatMessage, GenerationOptions
from swarm_client.api.outline_report import OutlineReport
from swarm_client.api.results import GenerationResult, GenerationStream, TextChunk
from swarm_client.generation.stop_strings import StopStrings
from swarm_client.generation.text_stream import TextDecoder
from swarm_client.outline.parser import OutlineParser
from swarm_client.outline.point import PointGeneration, PointSlots
from swarm_client.outline.router import OutlineDecision
from swarm_client.outline.templates import MIN_POINTS, Template

StartGeneration = Callable[[Sequence[int], GenerationOptions], GenerationStream]
"""(prompt, options) -> an ordinary generation. Raises InvalidRequest."""


class Tokenizer(Protocol):
    """The part of `ChatTokenizer` used here."""

    eos_token_ids: tuple[int, ...]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def apply_chat_template(self, messages: Sequence[ChatMessage]) -> list[int]: ...

    def stream(self, *, skip_special_tokens: bool = True) -> TextDecoder: ...


class OutlineStream(GenerationStream):
    """An outline and its points, or the ordinary answer if there is no usable outline.

    All points are sampled with the same seed, by the position in their own session: each has the tokens that a
    separate generation with the same prompt would have.
    """

    def __init__(
        self,
        start_generation: StartGeneration,
        tokenizer: Tokenizer,
        messages: Sequence[ChatMessage],
        options: GenerationOptions,
        routing: OutlineDecision,
        slots: asyncio.Semaphore,
        clock: Callable[[], float],
    ) -> None:
        """Raises InvalidRequest."""
        self._start_generation, self._tokenizer, self._messages = start_generation, tokenizer, messages
        self._options = replace(options, decoding=options.point_decoding, seed=options.sampling().seed)
        self._routing, self._outline_reason = routing, routing.reason
        self._clock, self._started = clock, clock()
        self._tasks, self._slots = TaskSet(OUTLINE), PointSlots(slots)
        self._stops = StopStrings(options.stop)
        self._parser = OutlineParser(routing.points)
        self._prompt: list[int] = []
        self._outline: GenerationStream | None = None
        self._outline_tokens: list[int] = []
        self._outline_ended = 0.0
        self._error: NoRoute | NetworkError | None = None  # of the outline
        self._points: list[PointGeneration] = []
        self._point_tasks: list[asyncio.Task[None]] = []
        self._events: asyncio.Queue[PointGeneration | TextChunk | None] = asyncio.Queue()  # None: no more points
        self._ordinary: GenerationStream | None = None
        self._ordinary_started = 0.0
        self._shown: GenerationStream | None = None  # whose text is shown now
        self._text: list[str] = []
        self._pending_space = ""  # trailing, shown only if more of the same point follows
        if routing.template is None:
            self._ordinary = self._start_ordinary()
        else:
            self._outline = self._start_outline(routing.template)
        super().__init__(self._run())

    async def cancel(self) -> None:
        """Stop all generations; the text shown so far is the answer. Idempotent."""
        await self._stop_reading()
        for stream in (self._outline, self._ordinary):
            if stream is not None:
                await stream.cancel()
        if self._reason is None:
            self._reason = FinishReason.CANCELLED

    @property
    def chain(self) -> Chain | None:
        """The hops of what is shown now; None before its chain is open."""
        return self._shown.chain if self._shown is not None else None

    @property
    def result(self) -> GenerationResult:
        """Raises RuntimeError before the stream has ended."""
        if self._reason is None:
            raise RuntimeError("the generation has not ended; read the stream to its end, or cancel it")
        if self._ordinary is not None:
            answer = self._ordinary.result
            waited = answer.time_to_first_token_s + self._ordinary_started
            return replace(answer, time_to_first_token_s=waited, outline=self._report())
        return self._joined()

    # Display ---------------------------------------------------------------------------------------------------------

    async def _run(self) -> AsyncGenerator[TextChunk, None]:
        try:
            if self._outline is not None:
                async with aclosing(self._show_points(self._outline)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                if not self._points:
                    self._ordinary_started = self._clock() - self._started
                    self._ordinary = self._start_ordinary()
            if self._ordinary is not None:
                self._shown = self._ordinary
                async for chunk in self._ordinary:
                    yield chunk
                self._reason = self._ordinary.result.finish_reason
        finally:
            await self._tasks.close()

    async def _show_points(self, outline: GenerationStream) -> AsyncGenerator[TextChunk, None]:
        """Yields nothing when there is no outline. Raises the error of the outline or of a point at the end, after all
        points are shown.
        """
        assert self._routing.template is not None
        self._shown = outline
        outline_task = self._tasks.start(self._generate_outline(outline, self._routing.template), "outline")
        while (event := await self._events.get()) is not None:
            if isinstance(event, TextChunk):
                yield event
                continue
            yield TextChunk(self._show_heading(event), (), ())
            while (chunk := await event.chunks.get()) is not None and self._stops.hit is None:
                self._shown = event.stream
                yield replace(chunk, text=self._show(chunk.text))
            if self._stops.hit is not None:
                self._reason = FinishReason.STOP
                return
        for task in (outline_task, *self._point_tasks):
            await task
        for error in (self._error, *(point.error for point in self._points)):
            if error is not None:
                raise error
        if self._points:
            self._reason = self._ended_by()
            rest = self._stops.flush()
            self._text.append(rest)
            if rest:
                yield TextChunk(rest, (), ())

    def _show_heading(self, point: PointGeneration) -> str:
        self._pending_space = ""
        text = self._stops.push(("\n\n" if self._text else "") + point.heading)
        self._text.append(text)
        return text

    def _show(self, text: str) -> str:
        text = self._pending_space + text
        shown = text.rstrip()
        self._pending_space = text[len(shown) :]
        shown = self._stops.push(shown)
        self._text.append(shown)
        return shown

    def _ended_by(self) -> FinishReason:
        cut = any(point.reason is FinishReason.LENGTH for point in self._points)
        return FinishReason.LENGTH if cut else FinishReason.EOS

    # Generation ------------------------------------------------------------------------------------------------------

    def _start_ordinary(self) -> GenerationStream:
        return self._start_generation(self._tokenizer.apply_chat_template(self._messages), self._options)

    def _start_outline(self, template: Template) -> GenerationStream:
        messages = template.outline_prompt(self._messages, self._routing.points)
        self._prompt = self._tokenizer.apply_chat_template(messages)
        self._prompt += self._tokenizer.encode(template.begin, add_special_tokens=False)
        options = replace(self._options, max_new_tokens=template.outline_tokens, stop=())
        return self._start_generation(self._prompt, options)

    async def _generate_outline(self, outline: GenerationStream, template: Template) -> None:
        """Starts each point when its line is complete, and ends the outline when there are enough."""
        parser = self._parser
        parser.push(template.begin)
        try:
            async with outline:
                async for chunk in outline:
                    if chunk.waiting:
                        self._events.put_nowait(chunk)
                    self._outline_tokens += chunk.token_ids
                    parser.push(chunk.text)
                    if parser.full:
                        break
                    if template.eager:
                        self._start_points(template)
            parser.finish(cut=outline.result.finish_reason is not FinishReason.EOS)
            self._start_points(template)
            if not self._points:
                self._outline_reason = f"asking for an outline brought {_count(len(parser.titles))}"
        except (NoRoute, NetworkError) as error:
            self._error = error
        finally:
            self._outline_ended = self._clock() - self._started
            self._events.put_nowait(None)

    def _start_points(self, template: Template) -> None:
        titles = self._parser.titles
        if len(titles) < MIN_POINTS:
            return  # so few lines may be no outline
        for number in range(len(self._points) + 1, len(titles) + 1):
            point = self._point(template, number, titles[:number] if template.eager else titles)
            self._points.append(point)
            self._point_tasks.append(self._tasks.start(point.run(self._start_point, self._slots), f"point {number}"))
            self._events.put_nowait(point)

    def _point(self, template: Template, number: int, titles: Sequence[str]) -> PointGeneration:
        title = titles[number - 1]
        heading = template.heading(number, title)
        prompt = self._tokenizer.apply_chat_template(template.point_prompt(self._messages, titles, number))
        prompt += self._tokenizer.encode(heading, add_special_tokens=False)
        return PointGeneration(
            title,
            heading,
            tuple(prompt),
            min(template.point_tokens, self._options.max_new_tokens // self._routing.points),
            max(_shared_prefix(prompt, other) for other in (self._prompt, *(point.prompt for point in self._points))),
            self._tokenizer.stream(skip_special_tokens=self._options.skip_special_tokens),
            self._tokenizer.eos_token_ids,
            StopStrings(template.stop),
            lambda: self._clock() - self._started,
        )

    def _start_point(self, prompt: Sequence[int], max_new_tokens: int) -> GenerationStream:
        return self._start_generation(prompt, replace(self._options, max_new_tokens=max_new_tokens, stop=()))

    # Report ----------------------------------------------------------------------------------------------------------

    def _report(self) -> OutlineReport:
        template = self._routing.template
        return OutlineReport(
            bool(self._points),
            self._outline_reason,
            template.name if template is not None else "",
            self._parser.text,
            len(self._outline_tokens),
            self._outline_ended,
            tuple(point.report() for point in self._points),
        )

    def _joined(self) -> GenerationResult:
        """The points as one answer. Its hops and speculation are those of the longest generation in it."""
        assert self._outline is not None
        assert self._reason is not None
        report = self._report()
        results = [self._outline.result, *(answer for point in self._points for answer in point.answers)]
        longest = max(results[1:], key=lambda a: len(a.token_ids), default=results[0])
        tokens = tuple(token for point in self._points for token in point.tokens)
        first = min((p.first_token_s for p in report.points if p.first_token_s is not None), default=0.0)
        took = max((p.ended_s for p in report.points), default=0.0) - first
        return replace(
            longest,
            text="".join(self._text),
            token_ids=tokens,
            prompt_token_ids=tuple(self._prompt),
            finish_reason=self._reason,
            tokens_per_second=(len(tokens) - 1) / took if len(tokens) > 1 and took > 0 else 0.0,
            time_to_first_token_s=first,
            strategy=OUTLINE,
            explanation=f"an outline, because {self._outline_reason}; {longest.explanation}",
            repairs=tuple(repair for answer in results for repair in answer.repairs),
            outline=report,
            stop_string=self._stops.hit,
        )


def _shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length in tokens of the longest common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _count(headings: int) -> str:
    return ("not one point", "one point")[headings] if headings < 2 else f"{headings} points"
