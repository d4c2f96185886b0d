"""/v1/chat/completions, whole and streamed."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from swarm_gateway.answering.run import RunningAnswer, answer
from swarm_gateway.chat.events import (
    AnswerEvent,
    ChatRequest,
    Finished,
    ReasoningDelta,
    TextDelta,
    TokenUsage,
    ToolCallDelta,
)
from swarm_gateway.errors import ApiError
from swarm_gateway.http.body import read_json
from swarm_gateway.http.disconnect import unless_gone
from swarm_gateway.http.endpoint import json_response
from swarm_gateway.openai.answers import (
    FINISH_REASONS,
    AssistantMessage,
    CalledFunction,
    CalledTool,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    MessageDelta,
    usage_of,
)
from swarm_gateway.openai.errors import error_form
from swarm_gateway.openai.logprobs import TokenTexts
from swarm_gateway.openai.messages import chat_messages, tool_choice, tool_definitions
from swarm_gateway.openai.options import generation_options, grammar_of
from swarm_gateway.openai.requests import ChatCompletionRequest
from swarm_gateway.serving.gateway import Gateway, caller_of
from swarm_gateway.streaming.sse import DONE, EventStream, comment, data


@dataclass(frozen=True)
class ChatCompletions:
    """The handler."""

    gateway: Gateway

    async def __call__(self, request: Request) -> Response:
        body = await read_json(request, ChatCompletionRequest, self.gateway.config.max_body)
        model = self.gateway.model(body.model)
        running = await unless_gone(request, answer(model, chat_request(body, model.name), caller_of(request)))
        texts = TokenTexts(model.client, bool(body.return_tokens_as_token_ids))
        writer = _Writer(model.name, texts, running)
        if body.stream:
            frames = writer.stream(body.includes_usage)
            return EventStream(frames, lambda error: data(error_form(error)), headers=running.headers)
        return json_response(await unless_gone(request, writer.whole()))


def chat_request(body: ChatCompletionRequest, model: str) -> ChatRequest:
    """Raises ApiError, status 400."""
    if body.functions:
        sentence = "functions is no longer supported; give them as `tools`"
        raise ApiError(400, "unsupported", sentence, param="functions")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "invalid_request", "top_logprobs needs `logprobs: true`", param="top_logprobs")
    options = generation_options(body, body.max_completion_tokens or body.max_tokens)
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    template = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        template.setdefault("reasoning_effort", body.reasoning_effort)
    return ChatRequest(
        model,
        chat_messages(body.messages),
        tool_definitions(body.tools),
        tool_choice(body),
        body.parallel_tool_calls is not False,
        grammar_of(body),
        body.n or 1,
        options,
        template,
    )


@dataclass
class _Choice:
    """What came of one choice so far."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, CalledTool] = field(default_factory=dict)
    logprobs: ChatLogprobs | None = None
    finish_reason: str = "stop"

    def add(self, event: AnswerEvent, texts: TokenTexts) -> None:
        match event:
            case TextDelta():
                self.text.append(event.text)
                found = texts.chat(event.logprobs)
                if found and self.logprobs:
                    self.logprobs.content += found.content
                self.logprobs = self.logprobs or found
            case ReasoningDelta():
                self.reasoning.append(event.text)
            case ToolCallDelta():
                call = self.calls.setdefault(event.index, CalledTool(CalledFunction(arguments=""), type="function"))
                call.id, call.function.name = call.id or event.id, call.function.name or event.name
                call.function.arguments = (call.function.arguments or "") + event.arguments
            case Finished():
                self.finish_reason = FINISH_REASONS[event.cause]

    def message(self) -> AssistantMessage:
        text = "".join(self.text)
        calls = [self.calls[index] for index in sorted(self.calls)]
        return AssistantMessage(
            text if text or not calls else None,
            tool_calls=calls or None,
            reasoning_content="".join(self.reasoning) or None,
        )


class _Writer:
    def __init__(self, model: str, texts: TokenTexts, running: RunningAnswer) -> None:
        self._texts = texts
        self._running = running
        self._usages: list[TokenUsage] = []
        self._model, self._created, self._id = model, int(time.time()), f"chatcmpl-{secrets.token_urlsafe(18)}"

    async def whole(self) -> ChatCompletion:
        choices: dict[int, _Choice] = defaultdict(_Choice)
        async with self._running as running:
            async for index, event in running:
                choices[index].add(event, self._texts)
                if isinstance(event, Finished):
                    self._usages.append(event.usage)
        made = [ChatChoice(i, c.message(), c.finish_reason, c.logprobs) for i, c in sorted(choices.items())]
        usage = usage_of(self._usages, self._running.prompt_tokens)
        return ChatCompletion(id=self._id, created=self._created, model=self._model, choices=made, usage=usage)

    async def stream(self, with_usage: bool) -> AsyncGenerator[bytes, None]:
        begun: set[int] = set()
        usage = None if with_usage else msgspec.UNSET
        async with self._running as running:
            async for index, event in running:
                delta = self._delta(index, event)
                if delta is None:
                    yield comment("waiting for a chain of nodes")
                    continue
                if index not in begun:
                    begun.add(index)
                    first = ChatDelta(index, MessageDelta(role="assistant", content=""))
                    yield data(self._chunk([first], usage))
                yield data(self._chunk([delta], usage))
        if with_usage:
            yield data(self._chunk([], usage_of(self._usages, self._running.prompt_tokens)))
        yield DONE

    def _chunk(self, choices: list[ChatDelta], usage: object) -> ChatChunk:
        made = ChatChunk(id=self._id, created=self._created, model=self._model, choices=choices)
        made.usage = usage  # type: ignore[assignment]
        return made

    def _delta(self, index: int, event: AnswerEvent) -> ChatDelta | None:
        match event:
            case TextDelta():
                return ChatDelta(index, MessageDelta(content=event.text), logprobs=self._texts.chat(event.logprobs))
            case ReasoningDelta():
                return ChatDelta(index, MessageDelta(reasoning_content=event.text))
            case ToolCallDelta():
                function = CalledFunction(event.name, event.arguments)
                call = CalledTool(function, event.id, "function" if event.id else "", event.index)
                return ChatDelta(index, MessageDelta(tool_calls=[call]))
            case Finished():
                self._usages.append(event.usage)
                return ChatDelta(index, MessageDelta(), FINISH_REASONS[event.cause])
        return None
