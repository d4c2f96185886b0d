"""/v1/completions, whole and streamed: plain prompts, continued."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from swarm_client import SwarmClient
from swarm_gateway.answering.run import RunningAnswer, complete
from swarm_gateway.chat.events import Finished, TextDelta, TokenUsage
from swarm_gateway.errors import ApiError
from swarm_gateway.http.body import read_json
from swarm_gateway.http.disconnect import unless_gone
from swarm_gateway.http.endpoint import json_response
from swarm_gateway.openai.answers import FINISH_REASONS, Completion, TextChoice, usage_of
from swarm_gateway.openai.errors import error_form
from swarm_gateway.openai.logprobs import TextLogprobsWriter, TokenTexts, joined
from swarm_gateway.openai.options import generation_options, grammar_of
from swarm_gateway.openai.requests import MAX_N, MAX_PROMPTS, CompletionRequest
from swarm_gateway.serving.gateway import Gateway, caller_of
from swarm_gateway.serving.served_model import ServedModel
from swarm_gateway.streaming.sse import DONE, EventStream, comment, data

MAX_PROMPT_LOGPROBS = 1 << 19  # log-probabilities of one request's prompts: each takes some 200 bytes here


@dataclass(frozen=True)
class TextCompletions:
    """The handler."""

    gateway: Gateway

    async def __call__(self, request: Request) -> Response:
        body = await read_json(request, CompletionRequest, self.gateway.config.max_body)
        model = self.gateway.model(body.model)
        writer = await unless_gone(request, self._begin(body, model, caller_of(request)))
        if body.stream:
            frames = writer.stream(body.includes_usage)
            return EventStream(frames, lambda error: data(error_form(error)), headers=writer.headers)
        return json_response(await unless_gone(request, writer.whole()))

    async def _begin(self, body: CompletionRequest, model: ServedModel, caller: str) -> _Writer:
        _check(body)
        options = {**generation_options(body, body.max_tokens), "grammar": grammar_of(body)}
        if body.max_tokens is None:
            options["max_new_tokens"] = 16  # OpenAI's default here
        if body.logprobs is not None:
            options["logprobs"] = body.logprobs
            if body.echo:
                options["prompt_logprobs"] = body.logprobs
        prompts = await asyncio.to_thread(_prompts, model.client, body)
        if options.get("prompt_logprobs") is not None:
            _check_logprobs(sum(map(len, prompts)), options["prompt_logprobs"])
        running = await complete(model, prompts, body.n or 1, options, caller)
        return _Writer(body, model, running)


def _check(body: CompletionRequest) -> None:
    """Raises ApiError, status 400."""
    if body.suffix:
        raise ApiError(400, "unsupported", "suffix is not supported: the model continues a prompt", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, "unsupported", "best_of is not supported; use n", param="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "invalid_request", "max_tokens of 0 needs `echo`", param="max_tokens")


def _check_logprobs(tokens: int, alternatives: int) -> None:
    """Raises ApiError, status 400."""
    if tokens * (1 + alternatives) > MAX_PROMPT_LOGPROBS:
        sentence = (
            f"{tokens} tokens of prompts with {alternatives} alternatives each are too many for `echo`; ask for less"
        )
        raise ApiError(400, "invalid_request", sentence, param="logprobs")


def _prompts(client: SwarmClient, body: CompletionRequest) -> list[list[int]]:
    """Raises ApiError and InvalidRequest."""
    given = body.prompt
    if isinstance(given, str):
        return [client.tokenizer.encode(given)]
    if not given:
        raise ApiError(400, "invalid_request", "the prompt is empty", param="prompt")
    kinds = {type(item) for item in given}
    if len(kinds) > 1:
        sentence = "prompt is a text, several texts, token ids, or several lists of them; not a mixture"
        raise ApiError(400, "invalid_request", sentence, param="prompt")
    if kinds == {int}:
        return [[item for item in given if isinstance(item, int)]]
    if len(given) > MAX_PROMPTS or len(given) * (body.n or 1) > MAX_PROMPTS * MAX_N // 4:
        raise ApiError(400, "invalid_request", f"at most {MAX_PROMPTS} prompts in one request", param="prompt")
    return [client.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in given if not isinstance(p, int)]


class _Writer:
    def __init__(self, body: CompletionRequest, model: ServedModel, running: RunningAnswer) -> None:
        self._body, self._running, self.headers = body, running, running.headers
        self._tokenizer = model.client.tokenizer
        self._model, self._created, self._id = model.name, int(time.time()), f"cmpl-{secrets.token_urlsafe(18)}"
        texts = TokenTexts(model.client, bool(body.return_tokens_as_token_ids))
        self._n = body.n or 1
        count = len(running.prompts) * self._n
        self._logprobs = [TextLogprobsWriter(texts) for _ in range(count)]
        self._begun = [False] * count
        self._usages: list[TokenUsage] = []

    async def whole(self) -> Completion:
        parts: list[list[TextChoice]] = [[] for _ in self._logprobs]
        async for part in self._parts():
            if part is not None:
                parts[part.index].append(part)
        choices = [_joined(index, of_one) for index, of_one in enumerate(parts)]
        return self._completion(choices, usage_of(self._usages, self._running.prompt_tokens))

    async def stream(self, with_usage: bool) -> AsyncGenerator[bytes, None]:
        usage = None if with_usage else msgspec.UNSET
        async for part in self._parts():
            yield comment("waiting for a chain of nodes") if part is None else data(self._completion([part], usage))
        if with_usage:
            yield data(self._completion([], usage_of(self._usages, self._running.prompt_tokens)))
        yield DONE

    async def _parts(self) -> AsyncGenerator[TextChoice | None, None]:
        """Parts of choices; None while there is no chain. Log-probabilities of a prompt are known at the end only, so
        that an echo with them comes as one part."""
        late = bool(self._body.echo and self._body.logprobs is not None)
        held: dict[int, list[TextDelta]] = {}
        ended: dict[int, Finished] = {}
        async with self._running as running:
            async for index, event in running:
                if self._body.echo and not late and not self._begun[index]:
                    self._begun[index] = True
                    yield TextChoice(index, self._echo(index))
                match event:
                    case TextDelta() if late:
                        held.setdefault(index, []).append(event)
                    case TextDelta() if self._body.max_tokens != 0:
                        yield self._text(index, event)
                    case Finished():
                        self._usages.append(event.usage)
                        ended[index] = event
                        for ready in self._ready(index, ended) if late else (index,):
                            if late:
                                for part in self._late(ready, held.pop(ready, []), ended[self._first_of(ready)]):
                                    yield part
                            yield TextChoice(ready, "", FINISH_REASONS[ended[ready].cause])
                    case TextDelta():
                        pass  # max_tokens of 0: one token had to be generated, and is not shown
                    case _:
                        yield None

    def _first_of(self, index: int) -> int:
        """The first choice of the same prompt, which alone has the prompt's log-probabilities."""
        return index // self._n * self._n

    def _ready(self, index: int, ended: Mapping[int, Finished]) -> list[int]:
        """The choices whose prompt's log-probabilities are known now that choice `index` has ended."""
        first = self._first_of(index)
        if index == first:
            return [choice for choice in range(first, first + self._n) if choice in ended]
        return [index] if first in ended else []

    def _late(self, index: int, texts: Sequence[TextDelta], end: Finished) -> list[TextChoice]:
        ids = self._running.prompts[index // self._n]
        logprobs = self._logprobs[index].prompt(ids, end.prompt_logprobs)
        parts = [TextChoice(index, self._echo(index), logprobs=logprobs)]
        return parts + ([self._text(index, delta) for delta in texts] if self._body.max_tokens != 0 else [])

    def _text(self, index: int, delta: TextDelta) -> TextChoice:
        wanted = self._body.logprobs is not None
        return TextChoice(index, delta.text, None, self._logprobs[index].tokens(delta.logprobs) if wanted else None)

    def _echo(self, index: int) -> str:
        return self._tokenizer.decode(self._running.prompts[index // self._n])

    def _completion(self, choices: list[TextChoice], usage: object) -> Completion:
        made = Completion(id=self._id, created=self._created, model=self._model, choices=choices)
        made.usage = usage  # type: ignore[assignment]
        return made


def _joined(index: int, parts: Sequence[TextChoice]) -> TextChoice:
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    reason = next((part.finish_reason for part in parts if part.finish_reason), None)
    return TextChoice(index, "".join(p.text for p in parts), reason, joined(logprobs) if logprobs else None)
