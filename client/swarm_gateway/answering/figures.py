"""What one request adds to the gateway's figures, and to whoever watches the answers being written."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from swarm_client.api.results import GenerationResult, GenerationStream, TextChunk
from swarm_gateway.serving.served_model import ServedModel

_numbers = itertools.count(1)


class RequestFigures:
    """Made when the request came: the first token's time has the wait for a turn in it. `clock`: seconds, monotonic.

    `ids`: of the choices, for those who watch; they say nothing of the answer.
    """

    def __init__(self, model: ServedModel, choices: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.ids = [f"answer-{next(_numbers)}" for _ in range(choices)]
        self.model = model
        self.clock = clock
        self.came = clock()

    @contextmanager
    def of_choice(self, number: int, stream: GenerationStream) -> Iterator[ChoiceFigures]:
        choice = ChoiceFigures(self, self.ids[number], stream)
        observer = self.model.observer
        if observer is not None:
            observer.started(choice.id, self.model.name)
        try:
            yield choice
        finally:
            if observer is not None:
                observer.ended(choice.id)


class ChoiceFigures:
    """One generation."""

    def __init__(self, request: RequestFigures, choice_id: str, stream: GenerationStream) -> None:
        self.id = choice_id
        self._request = request
        self._stream = stream
        self._last: float | None = None

    def chunk(self, chunk: TextChunk) -> None:
        model, now = self._request.model, self._request.clock()
        if model.observer is not None:
            chain, tokens = self._stream.chain, len(chunk.token_ids)
            model.observer.progressed(self.id, chain=chain, tokens=tokens, waiting=chunk.waiting)
        if not chunk.token_ids:
            return
        metrics = model.metrics
        metrics.generated_tokens.labels(model.name).inc(len(chunk.token_ids))
        if self._last is None:
            metrics.first_token.labels(model.name).observe(now - self._request.came)
        else:
            metrics.between_tokens.labels(model.name).observe(now - self._last)
        self._last = now

    def finished(self, result: GenerationResult) -> None:
        name, metrics = self._request.model.name, self._request.model.metrics
        metrics.prompt_tokens.labels(name).inc(len(result.prompt_token_ids))
        metrics.cached_tokens.labels(name).inc(result.cached_prompt_tokens)
        metrics.repairs.labels(name).inc(len(result.repairs))
        metrics.chain_length.labels(name).set(len(result.chain))
        drafted = result.speculation or {}
        metrics.accepted_tokens.labels(name).inc(drafted.get("hits", 0))
        metrics.drafted_tokens.labels(name).inc(drafted.get("hits", 0) + drafted.get("misses", 0))
