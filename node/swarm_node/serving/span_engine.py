"""The executor's `StepEngine` over a real span: steps -> one packed batch of tensors -> hidden rows or sampled tokens.

Owns the span, its KV cache and the call of the sampler. Has no access to peers or queues; the only module of the node
that computes.
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

MAX_NEG_LOGPROB = 1 << 14  # the bound of `messages.StepResult.medusa_neg_logprob_centinats`


class SpanEngine:
    """See `served_spans.SpanEngineApi`. All but what `prepare` returns belongs to the event loop."""

    def __init__(self, span: Span, cache: KVCacheManager, heads: MedusaHeads | None = None) -> None:
        """`heads`: Medusa heads of the tail, whose candidates go to the sessions that request them."""
        self._span = span
        self._medusa_heads = heads
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
            raise ContextOverflow(f"{max_tokens} tokens were requested and the model's context holds {context}")
        self.cache.open(_key(key), max_tokens)

    def fork(self, parent: int, key: int, max_tokens: int, length: int) -> None:
        context = self._span.config.context_length
        if not length <= max_tokens <= context:
            raise ContextOverflow(f"{max_tokens} tokens were requested and the model's context holds {context}")
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

    def prepare(self, steps: Sequence[ScheduledStep]) -> Compute:
        requests = []
        for scheduled in steps:
            step, session = scheduled.arrival.step, scheduled.session
            if session.tail and step.slots and session.sampling.repetition_penalty != 1.0:
                raise UnsupportedRequest(
                    "a repetition penalty counts the tokens before a row, and draft tokens are not sent to the tail"
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
        return partial(self._compute, steps, self.cache.schedule(requests))

    @torch.inference_mode()
    def _compute(self, steps: Sequence[ScheduledStep], plan: AttentionMetadata) -> Sequence[StepOutput | SwarmError]:
        part = steps[0].span  # one for all steps of a batch
        hidden = self._span.forward(self._input(steps), plan, self.cache, part.start, part.end)
        if steps[0].session.tail:
            return self._sample(steps, hidden, plan.positions)
        body = to_wire(hidden, self._span.dtype)
        outputs: list[StepOutput | SwarmError] = []
        row_bytes, at = self.rows.hidden_size * self.rows.element_bytes, 0
        for scheduled in steps:
            outputs.append(StepOutput(body[at : at + scheduled.rows * row_bytes]))
            at += scheduled.rows * row_bytes
        return outputs

    def _input(self, steps: Sequence[ScheduledStep]) -> torch.Tensor:
        """Rows of all steps, one after the other, `[rows, hidden]`."""
        if steps[0].session.first:
            return self._span.embed([token for scheduled in steps for token in scheduled.arrival.step.tokens])
        body = bytearray().join(scheduled.arrival.body for scheduled in steps)
        return from_wire(body, sum(scheduled.rows for scheduled in steps), self.rows.hidden_size, self._span.dtype)

    def _sample(
        self, steps: Sequence[ScheduledStep], hidden: torch.Tensor, positions: torch.Tensor
    ) -> list[StepOutput | SwarmError]:
        """For every step with `sample` set: a token after its last causal row and one after each of its tree rows.

        The token sampled from the row at position p belongs to position p + 1.
        `hidden [rows, hidden]`, `positions [rows]`.
        """
        rows: list[int] = []
        row_counts: list[tuple[HopSession, int]] = []  # and how many of `rows` are its own
        at = 0
        for scheduled in steps:
            step, end = scheduled.arrival.step, at + scheduled.rows
            if step.sample:
                first = at + max(step.causal_rows - 1, 0)
                rows.extend(range(first, end))
                row_counts.append((scheduled.session, end - first))
            at = end
        if not row_counts:
            return [StepOutput() for _ in steps]
        following = [position + 1 for position in positions[rows].tolist()]
        sampled = iter(
            self._medusa_candidates(
                hidden[rows], row_counts, _sample(self._span.logits(hidden[rows]), row_counts, following)
            )
        )
        return [next(sampled) if scheduled.arrival.step.sample else StepOutput() for scheduled in steps]

    def _medusa_candidates(
        self,
        hidden: torch.Tensor,
        row_counts: Sequence[tuple[HopSession, int]],
        sampled: Sequence[StepOutput | SwarmError],
    ) -> list[StepOutput | SwarmError]:
        """`sampled`, with the Medusa candidates of the sessions that requested them. `hidden [m, hidden]`."""
        width = max(session.num_medusa_candidates for session, _ in row_counts)
        if self._medusa_heads is None or not isinstance(self._span, LlamaSpan) or not width:
            return list(sampled)
        ids, logprobs = self._medusa_heads.propose(self._span.final_hidden(hidden), width)  # [heads, m, width]
        neg_logprobs = (logprobs * -100).round().clamp(0, MAX_NEG_LOGPROB).int()
        outputs: list[StepOutput | SwarmError] = []
        at = 0
        for (session, count), output in zip(row_counts, sampled, strict=True):
            part = slice(at, at + count), slice(0, session.num_medusa_candidates)
            at += count
            if isinstance(output, StepOutput) and session.num_medusa_candidates:
                token_ids, neg_logprob = (
                    tuple(values[:, *part].transpose(0, 1).flatten().tolist()) for values in (ids, neg_logprobs)
                )
                output = replace(
                    output,
                    num_medusa_heads=len(self._medusa_heads),
                    medusa_ids=token_ids,
                    medusa_neg_logprob_centinats=neg_logprob,
                )
            outputs.append(output)
        return outputs


def _sample(
    logits: torch.Tensor, row_counts: Sequence[tuple[HopSession, int]], positions: Sequence[int]
) -> list[StepOutput | SwarmError]:
    """`logits [m, vocab]`, of each session its count of rows -> its tokens for `positions [m]`.

    Logits that are not finite fail only the session whose rows they are.
    """
    owners = [session for session, count in row_counts for _ in range(count)]
    try:
        tokens = sample_rows(logits, [s.sampling for s in owners], positions, [s.penalty_tokens for s in owners])
    except (ModelError, InvalidRequest) as error:
        if len(row_counts) == 1:
            return [error]
        tokens = None
    outputs: list[StepOutput | SwarmError] = []
    at = 0
    for one in row_counts:
        part = slice(at, at + one[1])
        outputs += [StepOutput(tokens=tuple(tokens[part]))] if tokens else _sample(logits[part], [one], positions[part])
        at += one[1]
    return outputs


def _key(key: int) -> bytes:
    return key.to_bytes(8, "big")
