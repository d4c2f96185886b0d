"""Outlined answers over a scripted model: order, fallbacks, failures, limits and cancelling, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from virtual_clock import virtual_time

from swarm.errors import ConnectionLost, ContextOverflow, InvalidRequest, NetworkError, NoRoute
from swarm.planner.generation.state_machine import FinishReason
from swarm.types import Chain, Hop
from swarm_client.api.options import GenerationOptions
from swarm_client.api.results import GenerationResult, TextChunk
from swarm_client.outline.outliner import SkeletonDecoder
from swarm_client.outline.stream import OutlineStream
from swarm_client.outline.templates import BUILT_IN, Template

CHAIN = Chain((Hop("peer-a", 0, 3),), 1.0)
EOS = 0
QUESTION = [{"role": "user", "content": "Explain how bread is made."}]
OUTLINE = " Flour\n2. Water\n3. Fire\n"
POINTS = {"Flour": " ground from wheat. \n", "Water": " wet.", "Fire": " hot, and it bakes."}
JOINED = "**Flour.** ground from wheat.\n\n**Water.** wet.\n\n**Fire.** hot, and it bakes."
TOKEN_S = 0.01


class Letters:
    """One token a character."""

    eos_token_ids = (EOS,)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def apply_chat_template(self, messages: Sequence[Any]) -> list[int]:
        return self.encode("".join(f"<{m['role']}>{m['content']}\n" for m in messages) + "<assistant>")

    def stream(self, *, skip_special_tokens: bool = True) -> Letters:
        return self

    def push(self, token: int) -> str:
        return chr(token)

    def finish(self) -> str:
        return ""


@dataclass
class Script:
    """A scripted model and swarm. `breaks`: by title, after how many tokens each attempt fails."""

    outline: str = OUTLINE
    points: dict[str, str] = field(default_factory=lambda: dict(POINTS))
    ordinary: str = "Just bake it."
    breaks: dict[str, list[int]] = field(default_factory=dict)
    error: Callable[[], Exception] = lambda: ConnectionLost("the node is gone")
    asked: list[tuple[str, GenerationOptions]] = field(default_factory=list)
    stride: int = 1  # tokens a step
    running: int = 0
    most: int = 0

    def ask(self, prompt: Sequence[int], options: GenerationOptions) -> Reply:
        text = "".join(map(chr, prompt))
        self.asked.append((text, options))
        if "Explain point" in text:
            title, had = text.rpartition(".**")[0].rpartition("**")[2], text.rpartition(".**")[2]
            assert self.points[title].startswith(had)
            return Reply(self, title, self.points[title][len(had) :], options)
        if "Do not answer yet" in text:
            return Reply(self, "outline", self.outline, options)
        return Reply(self, "ordinary", self.ordinary, options)


class Reply:
    def __init__(self, script: Script, name: str, text: str, options: GenerationOptions) -> None:
        self.script, self.name, self.options = script, name, options
        self.tokens = [*map(ord, text), EOS][: options.max_new_tokens]
        breaks = script.breaks.get(name, [])
        self.breaks_at = breaks.pop(0) if breaks else None
        self.generated: list[int] = []
        self.reason: FinishReason | None = None
        self.pieces = self.run()

    chain = CHAIN

    def __aiter__(self) -> AsyncIterator[TextChunk]:
        return self.pieces

    async def __aenter__(self) -> Reply:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cancel()

    async def cancel(self) -> None:
        await self.pieces.aclose()
        self.reason = self.reason or FinishReason.CANCELLED

    async def read(self) -> GenerationResult:
        raise AssertionError("a point is streamed, not read at once")

    async def run(self) -> AsyncGenerator[TextChunk, None]:
        script = self.script
        script.running += 1
        script.most = max(script.most, script.running)
        try:
            for number in range(0, len(self.tokens), script.stride):
                await asyncio.sleep(TOKEN_S)
                if number == self.breaks_at:
                    raise script.error()
                step = self.tokens[number : number + script.stride]
                self.generated += step
                yield TextChunk("".join(chr(t) for t in step if t != EOS), tuple(step), ((0.0, 1.0),))
            self.reason = FinishReason.EOS if self.tokens[-1] == EOS else FinishReason.LENGTH
        finally:
            script.running -= 1

    @property
    def result(self) -> GenerationResult:
        assert self.reason is not None
        text = "".join(map(chr, self.generated)).rstrip("\0")
        seed = self.options.seed or 0
        return GenerationResult(
            text, tuple(self.generated), (1,), self.reason, 1.0, TOKEN_S, CHAIN, "sequential", seed, "one way"
        )


def answer_of(script: Script, slots: int = 8, messages: Any = QUESTION, **options: Any) -> OutlineStream:
    templates = options.pop("templates", BUILT_IN)
    context = options.pop("context", 4096)
    clock = asyncio.get_running_loop().time
    outliner = SkeletonDecoder(script.ask, Letters(), context, asyncio.Semaphore(slots), templates, clock)
    asked = GenerationOptions(**{"decoding": "outline", "max_new_tokens": 600, **options})
    return outliner.stream(messages, asked, outliner.route(messages, asked))


async def read(stream: OutlineStream) -> tuple[str, list[tuple[float, str]]]:
    """-> the text as it was shown, and when each piece of it was."""
    clock = asyncio.get_running_loop().time
    shown = [(clock(), piece.text) async for piece in stream]
    return "".join(text for _, text in shown), shown


async def read_to_error(stream: OutlineStream) -> tuple[str, Exception | None]:
    text = ""
    try:
        async for piece in stream:
            text += piece.text
    except NetworkError as error:
        await stream.cancel()
        return text, error
    return text, None


@virtual_time
async def test_points_are_written_side_by_side_and_shown_in_order() -> None:
    script = Script()
    stream = answer_of(script, seed=5, temperature=0.7, point_decoding="sequential")
    text, _ = await read(stream)
    answer = stream.result
    assert text == answer.text == JOINED
    assert answer.finish_reason is FinishReason.EOS
    assert (answer.strategy, answer.seed, answer.chain) == ("outline", 5, CHAIN)
    assert "".join(map(chr, answer.token_ids)).split("\0") == [*POINTS.values(), ""]
    assert script.most == 3  # 24 tokens of an outline, and the last point does not begin before its end
    report = answer.outline
    assert report is not None
    assert report.used
    assert report.text == "1." + OUTLINE
    assert [point.title for point in report.points] == list(POINTS)
    assert [point.text for point in report.points] == list(POINTS.values())
    assert all(point.attempts == 1 and not point.error for point in report.points)
    assert report.points[-1].ended_s == pytest.approx((len(OUTLINE) + len(POINTS["Fire"]) + 1) * TOKEN_S)
    assert all((o.seed, o.temperature, o.decoding) == (5, 0.7, "sequential") for _, o in script.asked)
    json = answer.to_json()["outline"]
    assert [point["tokens"] for point in json["points"]] == [len(p) + 1 for p in POINTS.values()]


@virtual_time
async def test_the_first_point_is_shown_while_the_outline_is_written() -> None:
    script = Script(" Flour\n2. Water\n3. Fire: for hours and hours and hours\n", {**POINTS, "Flour": "F" * 30})
    _, shown = await read(answer_of(script))
    first_letter = next(at for at, text in shown if text == "F")
    assert first_letter == pytest.approx((len(" Flour\n2. Water\n") + 1) * TOKEN_S)
    _, shown = await read(answer_of(Script(), templates=(_late(),)))
    assert next(at for at, text in shown if text == " g") > len(OUTLINE) * TOKEN_S


def _late() -> Template:
    return Template(name="late", fits="it may", when=("explain",), eager=False)


@virtual_time
async def test_prompts_share_a_prefix() -> None:
    script = Script()
    stream = answer_of(script)
    await read(stream)
    assert stream.result.outline is not None
    first, *others = stream.result.outline.points
    for point in others:
        outline = "".join(map(chr, point.prompt_token_ids[: point.shared_prefix_tokens]))
        assert QUESTION[0]["content"] in outline
        assert outline.endswith("1. Flour\n" if point is others[0] else "1. Flour\n2. Water\n")
        assert point.shared_prefix_tokens > first.shared_prefix_tokens


@pytest.mark.parametrize(
    "outline", ["Bread is made of flour. Then it is baked.", " Flour", " Flour\n2. flour\n", "\n\n\n", " x" * 90]
)
@virtual_time
async def test_a_malformed_outline_becomes_an_ordinary_answer(outline: str) -> None:
    script = Script(outline=outline)
    stream = answer_of(script)
    text, shown = await read(stream)
    answer = stream.result
    assert text == answer.text == "Just bake it."
    assert answer.finish_reason is FinishReason.EOS
    assert answer.outline is not None
    assert not answer.outline.used
    assert "asking for an outline brought" in answer.outline.reason
    assert answer.outline.text.startswith("1." + outline[:60])
    assert answer.time_to_first_token_s == pytest.approx(shown[0][0])
    assert len(script.asked) == 2


@virtual_time
async def test_a_request_that_does_not_fit_is_answered_at_once() -> None:
    script = Script()
    stream = answer_of(script, messages=[{"role": "user", "content": "Write a poem."}])
    text, shown = await read(stream)
    assert text == "Just bake it."
    assert shown[0][0] == pytest.approx(TOKEN_S)
    assert len(script.asked) == 1
    assert stream.result.outline is not None
    assert "thread" in stream.result.outline.reason
    assert "thread" in stream.result.to_json()["outline"]["reason"]


@virtual_time
async def test_a_conversation_that_fills_the_context_is_answered_without() -> None:
    stream = answer_of(Script(), context=300)
    assert (await read(stream))[0] == "Just bake it."
    assert stream.result.outline is not None
    assert "no room" in stream.result.outline.reason


@virtual_time
async def test_a_conversation_that_takes_no_outline_is_answered_without() -> None:
    class Strict(Letters):
        def apply_chat_template(self, messages: Sequence[Any]) -> list[int]:
            if any("Do not answer yet" in m["content"] for m in messages):
                raise InvalidRequest("no orders, please")
            return super().apply_chat_template(messages)

    outliner = SkeletonDecoder(Script().ask, Strict(), 4096, asyncio.Semaphore(8))
    asked = GenerationOptions(decoding="outline", max_new_tokens=600)
    stream = outliner.stream(QUESTION, asked, outliner.route(QUESTION, asked))
    assert (await read(stream))[0] == "Just bake it."
    assert stream.result.outline is not None
    assert "no orders" in stream.result.outline.reason


@pytest.mark.parametrize("at", [0, 3, 19])
@pytest.mark.parametrize("title", ["Flour", "Fire"])
@pytest.mark.parametrize("error", [lambda: ConnectionLost("gone"), lambda: NoRoute("nobody", ((0, 3),))])
@virtual_time
async def test_a_failed_point_is_retried_alone(error: Callable[[], Exception], title: str, at: int) -> None:
    script = Script(breaks={title: [at, 0]}, error=error)
    stream = answer_of(script)
    text, _ = await read(stream)
    assert text == JOINED
    assert stream.result.outline is not None
    point = next(p for p in stream.result.outline.points if p.title == title)
    assert point.attempts == (3 if at < len(POINTS[title]) + 1 else 1)
    assert point.text == POINTS[title]
    had = "".join(map(chr, point.prompt_token_ids)) + POINTS[title][:at]
    again = [(prompt, o) for prompt, o in script.asked if prompt == had]
    assert len(again) == 2 + (at == 0)
    assert again[-1][1].max_new_tokens == again[0][1].max_new_tokens == 100 - at


@virtual_time
async def test_a_point_that_fails_for_good_loses_no_other() -> None:
    script = Script(breaks={"Water": [2, 0, 0]})
    stream = answer_of(script)
    text, error = await read_to_error(stream)
    assert "gone" in str(error)
    assert text == stream.result.text == JOINED.replace("wet.", "w")
    assert stream.result.finish_reason is FinishReason.CANCELLED
    assert stream.result.outline is not None
    assert [bool(p.error) for p in stream.result.outline.points] == [False, True, False]
    assert script.running == 0


@virtual_time
async def test_an_outline_that_fails_raises_after_its_points() -> None:
    script = Script(breaks={"outline": [len(" Flour\n2. Water\n3")]})
    stream = answer_of(script)
    text, error = await read_to_error(stream)
    assert error is not None
    assert text == JOINED[: JOINED.index("\n\n**Fire")]
    stream = answer_of(Script(breaks={"outline": [3]}))
    with pytest.raises(NetworkError):
        await stream.read()


@pytest.mark.parametrize("after", [0, 1, 5, 25, 40])
@virtual_time
async def test_cancel_stops_all_points(after: int) -> None:
    script = Script(points={"Flour": "f" * 80, "Water": "w" * 80, "Fire": "x" * 80})
    stream = answer_of(script)
    text = ""
    if after:
        async for piece in stream:
            text += piece.text
            after -= 1
            if not after:
                break
    await stream.cancel()
    await stream.cancel()
    assert script.running == 0
    asked = len(script.asked)
    await asyncio.sleep(10)
    assert (script.running, len(script.asked)) == (0, asked)
    assert stream.result.text == text
    assert stream.result.finish_reason is FinishReason.CANCELLED


@virtual_time
async def test_a_cancelled_reader_stops_all_points() -> None:
    script = Script(points={"Flour": "f" * 80, "Water": "w" * 80, "Fire": "x" * 80})
    task = asyncio.create_task(answer_of(script).read())
    await asyncio.sleep(0.4)
    assert script.running == 3
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert script.running == 0


@pytest.mark.parametrize("slots", [1, 2])
@virtual_time
async def test_no_more_points_at_once_than_there_is_room_for(slots: int) -> None:
    script = Script(breaks={"Flour": [2]})
    assert (await read(answer_of(script, slots)))[0] == JOINED
    assert script.most <= slots + 1  # the outline has its own


@virtual_time
async def test_stop_strings_and_limits_hold_for_the_whole_answer() -> None:
    script = Script()
    stream = answer_of(script, stop=("wet",))
    text, _ = await read(stream)
    assert text == JOINED[: JOINED.index("wet")]
    assert stream.result.finish_reason is FinishReason.STOP
    assert script.running == 0
    assert all(o.stop == () for _, o in script.asked)
    script = Script(points=dict.fromkeys(POINTS, "a" * 200))
    stream = answer_of(script, max_new_tokens=300)
    await read(stream)
    assert [o.max_new_tokens for _, o in script.asked[1:]] == [50, 50, 50]
    assert stream.result.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("stride", [1, 4, 7])
@virtual_time
async def test_a_template_may_end_a_point(stride: int) -> None:
    template = Template(name="short", fits="it may", when=("explain",), stop=(", and", "whe"))
    stream = answer_of(Script(stride=stride), templates=(template,))
    assert (await read(stream))[0] == JOINED.replace(" wheat.", "").replace(", and it bakes.", "")
    assert stream.result.outline is not None
    assert [str(p.finish_reason) for p in stream.result.outline.points] == ["stop", "eos", "stop"]
    said = ["".join(map(chr, p.token_ids)) for p in stream.result.outline.points]
    assert said == [" ground from whe", " wet.\0", " hot, and"]  # up to the token that ends it, in steps of any size


@virtual_time
async def test_what_no_swarm_could_serve_is_refused_at_once() -> None:
    script = Script()

    def refuse(prompt: Sequence[int], options: GenerationOptions) -> Reply:
        raise ContextOverflow("too long")

    script.ask = refuse  # type: ignore[method-assign]
    with pytest.raises(ContextOverflow):
        answer_of(script)
