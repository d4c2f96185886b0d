"""The executor's Engine over a real span: steps -> one packed batch of tensors -> hidden rows or drawn tokens.

Owns the span, its cache and the last call of sampling. Knows neither peers nor queues; the only module of the node that
computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from swarm.errors import ContextOverflow, InvalidRequest, ModelError, SwarmError, UnsupportedRequest
from swarm.types import LayerSpan
from swarm_kernels.batch import BLOCK_SIZE, AttentionMetadata
from swarm_kernels.draft.medusa import MedusaHeads
from swarm_kernels.kvcache.cache import KVCacheManager, StepRequest
from swarm_kernels.runtime.hidden_codec import from_wire, to_wire
from swarm_kernels.runtime.llama_span import LlamaSpan
from swarm_kernels.runtime.sampling import sample_rows
from swarm_kernels.runtime.span import Span
from swarm_node.serving.executor import Compute, ScheduledStep, StepOutput
from swarm_node.serving.session import ActivationSpec, HopSession

MAX_DOUBT = 1 << 14  # as `messages.Result` says


class SpanEngine:
    """See `homes.SpanEngineApi`. All but what `prepare` returns belongs to the event loop."""

    def __init__(self, span: Span, cache: KVCacheManager, heads: MedusaHeads | None = None) -> None:
        """`heads`: of the tail, which answers with their guesses whoever asks for them."""
        self._span = span
        self._heads = heads
        self.cache = cache
        config = span.config
        self.rows = ActivationSpec(config.num_layers, config.hidden_size, span.dtype.itemsize, config.vocab_size)

    @property
    def span(self) -> LayerSpan:
        return self._span.layers

    @property
    def loaded(self) -> Span:
        return self._span

    @property
    def capacity_tokens(self) -> int:
        return self.cache.capacity_tokens

    def admit(self, key: int, max_tokens: int) -> None:
        context = self._span.config.context_length
        if not 1 <= max_tokens <= context:
            raise ContextOverflow(f"{max_tokens} tokens are asked for and the model's context holds {context}")
        self.cache.open(_key(key), max_tokens)

    def fork(self, parent: int, key: int, max_tokens: int, length: int) -> None:
        context = self._span.config.context_length
        if not length <= max_tokens <= context:
            raise ContextOverflow(f"{max_tokens} tokens are asked for and the model's context holds {context}")
        self.cache.fork(_key(parent), _key(key), max_tokens, length)

    def freeze_prefix(self, key: int, length: int) -> None:
        self.cache.freeze_prefix(_key(key), length)

    def release(self, key: int) -> None:
        self.cache.close(_key(key))

    def prune(self, key: int, slots: Sequence[int]) -> None:
        self.cache.prune(_key(key), slots)

    def rollback(self, key: int, length: int) -> None:
        self.cache.rollback(_key(key), length)

    @property
    def block_tokens(self) -> int:
        return BLOCK_SIZE

    @property
    def block_bytes(self) -> int:
        return BLOCK_SIZE * self.cache.shape.bytes_per_token_per_layer

    def import_blocks(self, key: int, tokens: int) -> None:
        self.cache.import_blocks(_key(key), tokens)

    def reader(self, key: int, tokens: int) -> Callable[[int, int, int], bytes]:
        block_ids, pool, base = self.cache.block_ids(_key(key), tokens), self.cache.pool, self.span.start

        def read(layer: int, first: int, count: int) -> bytes:
            part = block_ids[first : first + count]
            return pool.read(layer - base, part, min(tokens - first * BLOCK_SIZE, len(part) * BLOCK_SIZE))

        return read

    def writer(self, key: int, tokens: int) -> Callable[[int, int, bytes], None]:
        block_ids, pool, base = self.cache.block_ids(_key(key), tokens), self.cache.pool, self.span.start

        def write(layer: int, first: int, body: bytes) -> None:
            pool.write(layer - base, block_ids[first : first + len(body) // self.block_bytes], body)

        return write

    def prepare(self, works: Sequence[ScheduledStep]) -> Compute:
        requests = []
        for work in works:
            step, session = work.arrival.step, work.session
            if session.tail and step.slots and session.sampling.repetition_penalty != 1.0:
                raise UnsupportedRequest(
                    "a repetition penalty counts the tokens before a row, and drafts do not travel here"
                )
            requests.append(
                StepRequest(
                    _key(session.key),
                    step.committed_before,
                    step.causal_rows,
                    step.parents,
                    step.slots,
                    step.commit_slots,
                )
            )
        return partial(self._compute, works, self.cache.schedule(requests))

    @torch.inference_mode()
    def _compute(self, works: Sequence[ScheduledStep], plan: AttentionMetadata) -> Sequence[StepOutput | SwarmError]:
        part = works[0].span  # the same for all works of a batch
        hidden = self._span.forward(self._input(works), plan, self.cache, part.start, part.end)
        if works[0].session.tail:
            return self._sample(works, hidden, plan.positions)
        body = to_wire(hidden, self._span.dtype)
        outputs: list[StepOutput | SwarmError] = []
        row_bytes, at = self.rows.hidden_size * self.rows.element_bytes, 0
        for work in works:
            outputs.append(StepOutput(body[at : at + work.rows * row_bytes]))
            at += work.rows * row_bytes
        return outputs

    def _input(self, works: Sequence[ScheduledStep]) -> torch.Tensor:
        """Rows of all works, one after the other, `[rows, hidden]`."""
        if works[0].session.first:
            return self._span.embed([token for work in works for token in work.arrival.step.tokens])
        body = bytearray().join(work.arrival.body for work in works)
        return from_wire(body, sum(work.rows for work in works), self.rows.hidden_size, self._span.dtype)

    def _sample(
        self, works: Sequence[ScheduledStep], hidden: torch.Tensor, positions: torch.Tensor
    ) -> list[StepOutput | SwarmError]:
        """For every work that asks for it: a token after its last line row and one after each of its tree rows.

        The draw after the row at position p is that of position p + 1. `hidden [rows, hidden]`, `positions [rows]`.
        """
        rows: list[int] = []
        drawing: list[tuple[HopSession, int]] = []  # and how many of `rows` are its own
        at = 0
        for work in works:
            step, end = work.arrival.step, at + work.rows
            if step.sample:
                first = at + max(step.causal_rows - 1, 0)
                rows.extend(range(first, end))
                drawing.append((work.session, end - first))
            at = end
        if not drawing:
            return [StepOutput() for _ in works]
        following = [position + 1 for position in positions[rows].tolist()]
        drawn = iter(
            self._medusa_candidates(hidden[rows], drawing, _sample(self._span.logits(hidden[rows]), drawing, following))
        )
        return [next(drawn) if work.arrival.step.sample else StepOutput() for work in works]

    def _medusa_candidates(
        self, hidden: torch.Tensor, drawing: Sequence[tuple[HopSession, int]], drawn: Sequence[StepOutput | SwarmError]
    ) -> list[StepOutput | SwarmError]:
        """`drawn`, with the heads' guesses for those who asked. `hidden [m, hidden]`, as many of each as it draws."""
        width = max(session.num_medusa_candidates for session, _ in drawing)
        if self._heads is None or not isinstance(self._span, LlamaSpan) or not width:
            return list(drawn)
        ids, logprobs = self._heads.propose(self._span.final_hidden(hidden), width)  # [heads, m, width]
        doubts = (logprobs * -100).round().clamp(0, MAX_DOUBT).int()
        outputs: list[StepOutput | SwarmError] = []
        at = 0
        for (session, count), output in zip(drawing, drawn, strict=True):
            part = slice(at, at + count), slice(0, session.num_medusa_candidates)
            at += count
            if isinstance(output, StepOutput) and session.num_medusa_candidates:
                guessed, doubt = (
                    tuple(values[:, *part].transpose(0, 1).flatten().tolist()) for values in (ids, doubts)
                )
                output = replace(
                    output,
                    num_medusa_heads=len(self._heads),
                    medusa_ids=guessed,
                    medusa_neg_logprob_centinats=doubt,
                )
            outputs.append(output)
        return outputs


def _sample(
    logits: torch.Tensor, drawing: Sequence[tuple[HopSession, int]], positions: Sequence[int]
) -> list[StepOutput | SwarmError]:
    """`logits [m, vocab]`, of each session its count of rows -> its tokens for `positions [m]`.

    Broken numbers are the fault of one session's rows only.
    """
    owners = [session for session, count in drawing for _ in range(count)]
    try:
        tokens = sample_rows(logits, [s.sampling for s in owners], positions, [s.penalty_tokens for s in owners])
    except (ModelError, InvalidRequest) as error:
        if len(drawing) == 1:
            return [error]
        tokens = None
    outputs: list[StepOutput | SwarmError] = []
    at = 0
    for one in drawing:
        part = slice(at, at + one[1])
        outputs += [StepOutput(tokens=tuple(tokens[part]))] if tokens else _sample(logits[part], [one], positions[part])
        at += one[1]
    return outputs


def _key(key: int) -> bytes:
    return key.to_bytes(8, "big")
