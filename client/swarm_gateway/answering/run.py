"""Runs one request in the swarm: prompt, turn in the queue, n generations, parsed events. Every API uses it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from types import TracebackType
from typing import Any, Self

from swarm.errors import NodeBusy
from swarm_client.api.results import GenerationStream
from swarm_gateway.answering.choice import ChoiceReader
from swarm_gateway.answering.figures import ChoiceFigures, RequestFigures
from swarm_gateway.answering.merge import merged
from swarm_gateway.answering.plain_text import PlainText
from swarm_gateway.answering.plan import plan_chat
from swarm_gateway.chat.events import AnswerEvent, ChatRequest, OutputParser, WaitingForChain
from swarm_gateway.serving.served_model import ServedModel

Indexed = tuple[int, AnswerEvent]
"""(choice, event)"""


class RunningAnswer:
    """`async with await answer(...) as running: async for choice, event in running`; leaving it ends the work on every
    hop. Iteration begins with the wait for a turn, and raises ApiError or SwarmError. Every choice ends with Finished.

    `prompt_tokens`: known from the start. `prompts`: their ids. `headers`: of a stream; by them its reader finds the
    first choice among the answers of `/swarm`.
    """

    def __init__(self, events: AsyncGenerator[Indexed, None], prompts: Sequence[Sequence[int]], answer_id: str) -> None:
        self.prompts = prompts
        self.headers = {"x-swarm-answer": answer_id}
        self.prompt_tokens = sum(map(len, prompts))
        self._events = events

    def __aiter__(self) -> AsyncGenerator[Indexed, None]:
        return self._events

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._events.aclose()


async def answer(model: ServedModel, request: ChatRequest, caller: str = "") -> RunningAnswer:
    """Begin to answer a chat. `caller`: for taking turns, see `caller_of`.

    Raises at once what can be known before anything is sent: ApiError (a full queue, a swarm out of reach),
    InvalidRequest, ContextOverflow.
    """
    client = model.client
    model.admission.check()
    plan = await asyncio.to_thread(plan_chat, client, request)
    return await _begin(model, [plan.prompt], request.n, plan.options, plan.make_parser, caller)


async def complete(
    model: ServedModel, prompts: Sequence[Sequence[int]], n: int, options: Mapping[str, Any], caller: str = ""
) -> RunningAnswer:
    """Continue plain prompts, each `n` times: choice `p * n + i` is number i of prompt p. Raises as `answer`."""
    model.admission.check()
    return await _begin(model, prompts, n, options, PlainText, caller)


async def _begin(
    model: ServedModel,
    prompts: Sequence[Sequence[int]],
    n: int,
    options: Mapping[str, Any],
    make_parser: Callable[[], OutputParser],
    caller: str,
) -> RunningAnswer:
    client, grammar = model.client, options.get("grammar")
    if grammar is not None:
        await client.check_grammar(grammar)  # now, while the answer can still have the status of an error
    wanted = options.get("max_new_tokens") or model.default_max_tokens
    settings: dict[str, Any] = {**options, "max_new_tokens": min(wanted, model.max_tokens)}
    eos = () if options.get("ignore_eos") else client.tokenizer.eos_token_ids

    def make_streams() -> list[GenerationStream]:
        return [stream for prompt in prompts for stream in client.fork_streams(prompt, n, **settings)]

    def make_reader() -> ChoiceReader:
        return ChoiceReader(make_parser(), eos)

    streams = make_streams()
    figures = RequestFigures(model, len(streams))
    return RunningAnswer(_run(model, streams, make_streams, make_reader, caller, figures), prompts, figures.ids[0])


async def _run(
    model: ServedModel,
    streams: Sequence[GenerationStream],
    make_streams: Callable[[], Sequence[GenerationStream]],
    make_reader: Callable[[], ChoiceReader],
    caller: str,
    figures: RequestFigures,
) -> AsyncGenerator[Indexed, None]:
    """Nodes that are full are tried again for as long as a request may wait for its turn."""
    async with model.admission.turn(caller):
        until = figures.clock() + model.admission.policy.timeout_s
        began = False
        while True:
            choices = [
                _choice(stream, make_reader(), figures.of_choice(number, stream))
                for number, stream in enumerate(streams)
            ]
            try:
                async with aclosing(merged(choices)) as events:
                    async for indexed in events:
                        began = began or not isinstance(indexed[1], WaitingForChain)
                        yield indexed
                return
            except NodeBusy as error:
                if began or figures.clock() + error.retry_after_s > until:
                    raise
                await asyncio.sleep(error.retry_after_s)
                streams = make_streams()


async def _choice(
    stream: GenerationStream, reader: ChoiceReader, figures: AbstractContextManager[ChoiceFigures]
) -> AsyncGenerator[AnswerEvent, None]:
    with figures as seen:
        async with stream:
            async for chunk in stream:
                seen.chunk(chunk)
                for event in reader.push(chunk):
                    yield event
        seen.finished(stream.result)
        for event in reader.finish(stream.result):
            yield event
