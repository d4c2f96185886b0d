"""The executor's `StepEngine` over a real span: steps -> one packed batch of tensors -> hidden rows or sampled tokens.

Owns the span, its KV cache and the plan of a batch. Has no access to peers or queues; what a tail computes from the
last rows is in `tail_sampler`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from swarm.errors import ContextOverflow, SwarmError, UnsupportedRequest
from swarm.planner.scheduling.fair_shares import Share
from swarm.tap_messages import skipped_rows
from swarm.types import Grammar, LayerSpan, PeerId
from swarm_hop.drafting.tail_drafts import TailDrafts
from swarm_hop.serving.executor import Compute, ScheduledStep, StepOutput
from swarm_hop.serving.grammars import TailGrammars
from swarm_hop.serving.session import ActivationSpec
from swarm_hop.serving.tail_sampler import TailSampler
from swarm_hop.serving.token_history import StepTokens
from swarm_kernels.batch import AttentionMetadata
from swarm_kernels.calibration.split_watch import SplitWatch
from swarm_kernels.device.device import activation_dtype
from swarm_kernels.draft.medusa import MedusaHeads
from swarm_kernels.kvcache.cache import KVCacheManager, StepRequest
from swarm_kernels.kvcache.layer_transfer import LayerTransfer, LayerWriter
from swarm_kernels.runtime.hidden_codec import from_wire, to_wire
from swarm_kernels.runtime.span import Span
from swarm_kernels.runtime.taps import BatchTaps, StepTaps, TappedPart
from swarm_kernels.sampling.grammar import GrammarState, TokenMask


class SpanBatch:
    """See `SlicedCompute`: a few layers at a time, then what a tail makes of the last rows. Called in the compute
    thread."""

    def __init__(self, engine: SpanEngine, steps: Sequence[ScheduledStep], plan: AttentionMetadata) -> None:
        self._engine = engine
        self._steps = steps
        self._plan = plan
        self._span = steps[0].span  # one for all steps of a batch
        self._next = self._span.start
        self._hidden: torch.Tensor | None = None  # [rows, hidden], after the layers that have run
        self._taps = BatchTaps(_tapped_parts(steps))

    def run_layers(self, count: int) -> Sequence[StepOutput | SwarmError] | None:
        if self._hidden is None:
            self._hidden = self._engine.input(self._steps)
        if self._next < self._span.end:
            self._hidden = self._forward(self._hidden, min(self._next + count, self._span.end))
            if count < len(self._span) and (
                self._next < self._span.end or any(step.session.tail for step in self._steps)
            ):
                return None
        self._taps.collect(self._span.end, self._engine.states(self._hidden))
        outputs = self._engine.outputs(self._steps, self._hidden, self._plan)
        return [_with_taps(output, self._taps.of(step)) for step, output in enumerate(outputs)]

    def _forward(self, hidden: torch.Tensor, end: int) -> torch.Tensor:
        """On to layer `end`; `hidden`: what the next layer reads."""
        while self._next < end:
            self._taps.collect(self._next, self._engine.states(hidden))
            part = LayerSpan(self._next, self._taps.next_stop(self._next, end))
            hidden = self._engine.forward(hidden, self._plan, part)
            self._next = part.end
        return hidden

    def __call__(self) -> Sequence[StepOutput | SwarmError]:
        while (outputs := self.run_layers(len(self._span))) is None:
            """Until the last."""
        return outputs


class SpanEngine:
    """See `served_spans.SpanEngineApi`. All but what `prepare` returns belongs to the event loop."""

    def __init__(
        self,
        span: Span,
        cache: KVCacheManager,
        heads: MedusaHeads | None = None,
        grammars: TailGrammars | None = None,
        watch: SplitWatch | None = None,
        tail_drafts: TailDrafts | None = None,
    ) -> None:
        """`heads`: Medusa heads of the tail, whose candidates go to the sessions that request them. `grammars`: None
        for a span whose sessions cannot have one. `watch`: of the core groups that compute, if there are two.
        `tail_drafts`: of a drafter that this tail holds."""
        self._span = span
        self._grammars = grammars
        self._watch = watch
        self.tail_drafts = tail_drafts
        self._tail_sampler = TailSampler(span, heads)
        self.cache = cache
        self._transfer = LayerTransfer(cache, span.layers)
        self._deferred: dict[
            int, list[Callable[[], None]]
        ] = {}  # by session of a batch: what to do when it is finished
        config = span.config
        self.rows = ActivationSpec(config.rows, span.dtype.itemsize, config.vocab_size, config.context_length)

    @property
    def span(self) -> LayerSpan:
        return self._span.layers

    @property
    def loaded(self) -> Span:
        return self._span

    @property
    def capacity_tokens(self) -> int:
        return self.cache.capacity_tokens

    @property
    def session_capacity(self) -> int:
        return self.cache.session_capacity

    async def compile_grammar(self, grammar: Grammar, share: Share) -> GrammarState:
        if self._grammars is None:
            raise UnsupportedRequest("this node cannot use grammars")
        return await self._grammars.compile(grammar, share)

    async def grammar_masks(self, state: GrammarState, tokens: StepTokens, peer: PeerId) -> Sequence[TokenMask | None]:
        if self._grammars is None:
            raise UnsupportedRequest("this node cannot use grammars")
        return await self._grammars.masks(state, tokens, peer)

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
        self._unless_computing(key, partial(self.cache.freeze_prefix, _key(key), length))

    def shrink(self, key: int, max_tokens: int) -> None:
        self.cache.shrink(_key(key), max_tokens)

    def release(self, key: int) -> None:
        self._unless_computing(key, partial(self.cache.close, _key(key)))

    def prune(self, key: int, slots: Sequence[int]) -> None:
        self._unless_computing(key, partial(self.cache.prune, _key(key), slots))

    def rollback(self, key: int, length: int) -> None:
        self.cache.rollback(_key(key), length)

    def reusable(self, key: int, length: int, multiple: int) -> int:
        return self.cache.reusable(_key(key), length, multiple)

    def transfer_units(self, layer: int, tokens: int) -> int:
        return self._transfer.units(layer, tokens)

    def unit_bytes(self, layer: int) -> int:
        return self._transfer.unit_bytes(layer)

    def distinct_layers(self, layers: LayerSpan) -> Sequence[int]:
        return self._transfer.distinct(layers)

    def import_blocks(self, key: int, tokens: int) -> None:
        self.cache.import_blocks(_key(key), tokens)

    def reader(self, key: int, tokens: int) -> Callable[[int, int, int], bytes]:
        return self._transfer.reader(_key(key), tokens)

    def writer(self, key: int, tokens: int, layers: LayerSpan) -> LayerWriter:
        return self._transfer.writer(_key(key), tokens, layers)

    def prepare(self, steps: Sequence[ScheduledStep]) -> Compute:
        requests = []
        for scheduled in steps:
            step = scheduled.arrival.step
            requests.append(
                StepRequest(
                    _key(scheduled.session.key),
                    step.committed_before,
                    step.causal_rows,
                    step.parents,
                    step.slots,
                    step.commit_slots,
                )
            )
        plan = self.cache.schedule(requests)
        self._deferred.update({scheduled.session.key: [] for scheduled in steps})
        return SpanBatch(self, steps, plan)

    def min_layers(self, part: LayerSpan) -> int:
        return 1 if self._span.device.type == "cpu" else len(part)  # a GPU's are captured as one graph, and take 1 ms

    def finished(self, steps: Sequence[ScheduledStep]) -> None:
        for scheduled in steps:
            for action in self._deferred.pop(scheduled.session.key, ()):
                action()

    def _unless_computing(self, key: int, action: Callable[[], None]) -> None:
        """Do what frees blocks of a session: at once, or when the batch is finished that still writes to them."""
        if key in self._deferred:
            self._deferred[key].append(action)
        else:
            action()

    @torch.inference_mode()
    def forward(self, hidden: torch.Tensor, plan: AttentionMetadata, part: LayerSpan) -> torch.Tensor:
        compute = partial(self._span.forward, hidden, plan, self.cache, part.start, part.end)
        return self._watch.run(len(hidden), compute) if self._watch and part == self._span.layers else compute()

    def states(self, rows: torch.Tensor) -> torch.Tensor:
        """The hidden states of rows that may hold more."""
        return rows[:, : self.rows.layout.states]

    @torch.inference_mode()
    def outputs(
        self, steps: Sequence[ScheduledStep], hidden: torch.Tensor, plan: AttentionMetadata
    ) -> Sequence[StepOutput | SwarmError]:
        """What the rows after the last layer of the steps' part become."""
        if len({scheduled.session.tail for scheduled in steps}) == 1:
            return self._outputs(steps, hidden, plan.positions)
        outputs: list[StepOutput | SwarmError] = []
        at = 0
        for scheduled in steps:  # some of their clients hold the norm and the head themselves
            part = slice(at, at + scheduled.rows)
            outputs += self._outputs([scheduled], hidden[part], plan.positions[part])
            at += scheduled.rows
        return outputs

    def _outputs(
        self, steps: Sequence[ScheduledStep], hidden: torch.Tensor, positions: torch.Tensor
    ) -> Sequence[StepOutput | SwarmError]:
        """Of steps that are all sampled from, or none of them."""
        if steps[0].session.tail:
            return self._tail_sampler.outputs(steps, hidden, positions)
        body = to_wire(hidden, self._span.dtype)
        outputs: list[StepOutput | SwarmError] = []
        row_bytes, at = self.rows.row_bytes(steps[0].span.end), 0
        for scheduled in steps:
            outputs.append(StepOutput(body[at : at + scheduled.rows * row_bytes]))
            at += scheduled.rows * row_bytes
        return outputs

    @torch.inference_mode()
    def input(self, steps: Sequence[ScheduledStep]) -> torch.Tensor:
        """Rows of all steps, one after the other, `[rows, hidden]`."""
        first = {scheduled.session.first for scheduled in steps}
        if len(first) > 1:  # some of their clients hold the embedding themselves
            device = self._span.device
            dtype = activation_dtype(self._span.dtype, device)
            return torch.cat([self.input([scheduled]).to(device, dtype) for scheduled in steps])
        if steps[0].session.first:
            return self._span.embed([token for scheduled in steps for token in scheduled.arrival.step.tokens])
        body = bytearray().join(scheduled.arrival.body for scheduled in steps)
        width = self.rows.layout.width(steps[0].span.start)
        return from_wire(body, sum(scheduled.rows for scheduled in steps), width, self._span.dtype)


def _key(key: int) -> bytes:
    return key.to_bytes(8, "big")


def _tapped_parts(steps: Sequence[ScheduledStep]) -> list[TappedPart | None]:
    """For each step of a batch, which of its rows' hidden states its client is sent."""
    parts: list[TappedPart | None] = []
    at = 0
    for scheduled in steps:
        taps, step, end = scheduled.session.taps, scheduled.arrival.step, at + scheduled.rows
        if taps is None:
            parts.append(None)
        else:
            start = step.committed_before + len(step.commit_slots)
            skipped = skipped_rows(start, step.causal_rows, taps.first_position)
            parts.append(TappedPart(at + skipped, end, taps.layers, taps.bits))
        at = end
    return parts


def _with_taps(output: StepOutput | SwarmError, taps: StepTaps) -> StepOutput | SwarmError:
    return replace(output, taps=taps) if taps and isinstance(output, StepOutput) else output
