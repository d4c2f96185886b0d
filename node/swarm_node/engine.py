"""The executor's Engine over a real span: steps -> one packed batch of tensors -> hidden rows or drawn tokens.

Owns the span, its cache and the last call of sampling. Knows neither peers nor queues; the only module of the node that
computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from swarm.errors import ContextOverflow, InvalidRequest, ModelError, SwarmError, Unsupported
from swarm.types import LayerSpan
from swarm_kernels.batch import BatchPlan
from swarm_kernels.kv_cache import KVCache, RowsRequest
from swarm_kernels.sampling import sample_rows
from swarm_kernels.span import Span, from_wire, to_wire
from swarm_node.executor import Compute, Output, Work
from swarm_node.sessions import Rows, Session


class SpanEngine:
    """See `service.ServedEngine`. `admit`, `release`, `prune` and `prepare` belong to the event loop."""

    def __init__(self, span: Span, cache: KVCache) -> None:
        self._span = span
        self.cache = cache
        config = span.config
        self.rows = Rows(config.num_layers, config.hidden_size, span.dtype.itemsize, config.vocab_size)

    @property
    def span(self) -> LayerSpan:
        return self._span.layers

    def admit(self, key: int, max_tokens: int) -> None:
        context = self._span.config.context_length
        if not 1 <= max_tokens <= context:
            raise ContextOverflow(f"{max_tokens} tokens are asked for and the model's context holds {context}")
        self.cache.open(_key(key), max_tokens)

    def release(self, key: int) -> None:
        self.cache.close(_key(key))

    def prune(self, key: int, slots: Sequence[int]) -> None:
        self.cache.prune(_key(key), slots)

    def prepare(self, works: Sequence[Work]) -> Compute:
        requests = []
        for work in works:
            step, session = work.arrival.step, work.session
            if session.tail and step.slots:
                raise Unsupported("the tail cannot match a drafted tree: steps do not carry its tokens this far")
            requests.append(RowsRequest(_key(session.key), step.base, step.line, step.parents, step.slots, step.commit))
        return partial(self._compute, works, self.cache.plan(requests))

    @torch.inference_mode()
    def _compute(self, works: Sequence[Work], plan: BatchPlan) -> Sequence[Output | SwarmError]:
        part = works[0].span  # the same for all works of a batch
        hidden = self._span.forward(self._input(works), plan, self.cache, part.start, part.end)
        if works[0].session.tail:
            return self._draw(works, hidden)
        body = to_wire(hidden, self._span.dtype)
        outputs: list[Output | SwarmError] = []
        row_bytes, at = self.rows.hidden_size * self.rows.element_bytes, 0
        for work in works:
            outputs.append(Output(body[at : at + work.rows * row_bytes]))
            at += work.rows * row_bytes
        return outputs

    def _input(self, works: Sequence[Work]) -> torch.Tensor:
        """Rows of all works, one after the other, `[rows, hidden]`."""
        if works[0].session.first:
            return self._span.embed([token for work in works for token in work.arrival.step.tokens])
        body = bytearray().join(work.arrival.body for work in works)
        return from_wire(body, sum(work.rows for work in works), self.rows.hidden_size, self._span.dtype)

    def _draw(self, works: Sequence[Work], hidden: torch.Tensor) -> list[Output | SwarmError]:
        """Draw a token after the last row of every work that asks for one."""
        last, drawing, at = [], [], 0
        for work in works:
            at += work.rows
            if work.arrival.step.sample:
                last.append(at - 1)
                drawing.append(work.session)
        outputs: list[Output | SwarmError] = [Output() for _ in works]
        if drawing:
            drawn = iter(_sample(self._span.logits(hidden[last]), drawing))
            for i, work in enumerate(works):
                if work.arrival.step.sample:
                    outputs[i] = next(drawn)
        return outputs


def _sample(logits: torch.Tensor, sessions: Sequence[Session]) -> list[Output | SwarmError]:
    """`logits [m, vocab]` -> each session's next token. Broken numbers are the fault of one session's rows only."""
    try:
        tokens = sample_rows(
            logits, [s.sampling for s in sessions], [s.committed for s in sessions], [s.history for s in sessions]
        )
    except (ModelError, InvalidRequest) as error:
        if len(sessions) == 1:
            return [error]
        return [_sample(row[None], [session])[0] for row, session in zip(logits, sessions, strict=True)]
    return [Output(tokens=(token,)) for token in tokens]


def _key(key: int) -> bytes:
    return key.to_bytes(8, "big")
