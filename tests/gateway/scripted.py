"""A gateway whose one model says what a test wrote down, served on 127.0.0.1. No swarm is behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from gateway_swarm import served

from swarm.config import GatewayConfig
from swarm.errors import ContextOverflow, SwarmError
from swarm.planner.generation.state_machine import FinishReason
from swarm.types import Chain, TokenLogprobs
from swarm_client.api.results import GenerationResult, GenerationStream, TextChunk
from swarm_gateway.answering.plan import AnswerPlan
from swarm_gateway.chat.events import ChatRequest, OutputEvent
from swarm_gateway.server.app import create_app
from swarm_gateway.serving.gateway import Gateway
from swarm_gateway.serving.served_model import ServedModel

MODEL = "scripted"
KEYS = ("first-key", "second-key")


@dataclass
class Script:
    """`events`: of each answer, one a token. `error`: raised after them. `hold`: waited for before the last event.

    `requests`, `settings`: what the gateway made of each request. `open_streams`: generations not ended yet;
    `ended`: one has.
    """

    events: Sequence[OutputEvent] = ()
    finish_reason: FinishReason = FinishReason.EOS
    stop_string: str | None = None
    error: SwarmError | None = None
    hold: asyncio.Event | None = None
    context_length: int = 1 << 20
    requests: list[ChatRequest] = field(default_factory=list)
    settings: list[dict[str, Any]] = field(default_factory=list)
    open_streams: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def plan(self, client: Any, request: ChatRequest) -> AnswerPlan:
        self.requests.append(request)
        words = [word for message in request.messages for word in str(message["content"]).split()]
        return AnswerPlan(list(range(len(words))), request.options, lambda: _ScriptedParser(self.events))


class _ScriptedParser:
    def __init__(self, events: Sequence[OutputEvent]) -> None:
        self._events = events

    def push(self, text: str) -> list[OutputEvent]:
        event = self._events[int(text)]
        return [event if not hasattr(event, "logprobs") else replace(event, logprobs=())]  # the gateway adds them

    def finish(self) -> list[OutputEvent]:
        return []


class _ScriptedStream(GenerationStream):
    def __init__(self, script: Script, prompt: Sequence[int]) -> None:
        self._script, self._prompt = script, prompt
        self._chunks = self._read()

    async def _read(self) -> AsyncGenerator[TextChunk, None]:
        script = self._script
        script.open_streams += 1
        try:
            for index, event in enumerate(script.events):
                if script.hold is not None and index == len(script.events) - 1:
                    await script.hold.wait()
                logprobs: tuple[TokenLogprobs, ...] = getattr(event, "logprobs", ())
                yield TextChunk(str(index), (index,), (), logprobs=logprobs)
            if script.error is not None:
                raise script.error
        finally:
            script.open_streams -= 1
            script.ended.set()

    async def cancel(self) -> None:
        await self._chunks.aclose()

    @property
    def chain(self) -> Chain | None:
        return None

    @property
    def result(self) -> GenerationResult:
        script = self._script
        return GenerationResult(
            text="",
            token_ids=tuple(range(len(script.events))),
            prompt_token_ids=tuple(self._prompt),
            finish_reason=script.finish_reason,
            tokens_per_second=1.0,
            time_to_first_token_s=0.1,
            chain=Chain(()),
            strategy="sequential",
            seed=1,
            explanation="",
            cached_prompt_tokens=min(2, len(self._prompt)),
            stop_string=script.stop_string,
        )


class _ScriptedClient:
    """Stands for a SwarmClient."""

    eos_token_ids = ()

    def __init__(self, script: Script) -> None:
        self._script = script
        self.tokenizer = self

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return f"<{ids[0]}>"

    async def check_grammar(self, grammar: Any) -> None:
        """Every one is good."""

    def fork_streams(self, prompt: Sequence[int], n: int, **settings: Any) -> list[_ScriptedStream]:
        self._script.settings.append(settings)
        if len(prompt) > self._script.context_length:
            raise ContextOverflow(f"the prompt has {len(prompt)} tokens; the model's context is shorter")
        return [_ScriptedStream(self._script, prompt) for _ in range(n)]


@asynccontextmanager
async def serving(script: Script, monkeypatch: pytest.MonkeyPatch, keys: Sequence[str] = KEYS) -> AsyncIterator[str]:
    """The address of a gateway that answers by the script."""
    monkeypatch.setattr("swarm_gateway.answering.run.plan_chat", script.plan)
    monkeypatch.setattr("swarm_gateway.anthropic.routes.plan_chat", script.plan)
    app = create_app(Gateway([ServedModel(MODEL, _ScriptedClient(script))], GatewayConfig(api_keys=tuple(keys))))
    async with served(app) as url:
        yield url
