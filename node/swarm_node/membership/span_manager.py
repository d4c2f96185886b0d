"""Loads layers and moves from one span to another while sessions run: make before break wherever memory allows.

Owns the loaded spans, the compute thread they share and the order of a change. When a node moves is
decided by `swarm.planner.rebalancing.rebalancer`, which `maintenance` asks; how sessions end is in `serving.drain`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from swarm.config import Limits
from swarm.errors import NodeLeaving
from swarm.planner.rebalancing.migration import SpanMove
from swarm.planner.scheduling.layer_time import BatchStats, LayerTimeEstimator
from swarm.planner.scheduling.work_model import WorkModel
from swarm.types import ExpertShare, LayerSpan, NodeState
from swarm_hop.drafting.tail_drafts import TailDrafts
from swarm_hop.experts.expert_exchange import ExpertExchange
from swarm_hop.experts.expert_service import ExpertService
from swarm_hop.serving.compute_device import ThreadDevice
from swarm_hop.serving.drain import CoverageCheck, drain_sessions
from swarm_hop.serving.executor import Executor
from swarm_hop.serving.grammars import TailGrammars
from swarm_hop.serving.served_spans import ServedSpan
from swarm_hop.serving.session_server import SessionServer
from swarm_hop.serving.span_engine import SpanEngine
from swarm_kernels.calibration.cost_curve import measure_cost, verify_experts, verify_layer
from swarm_kernels.draft.medusa import MedusaHeads
from swarm_kernels.draft.tail import open_tail_drafter
from swarm_kernels.models.config import ModelConfig
from swarm_kernels.models.source import FetchProgress
from swarm_kernels.ops.base.split_experts import HeldExperts
from swarm_kernels.runtime.load import load_experts, load_span
from swarm_kernels.runtime.mixture_reader import ExpertSpan
from swarm_kernels.runtime.span import Progress
from swarm_kernels.tokenizer.tokenizer import load_tokenizer
from swarm_node.membership.hardware import Hardware, memory_for
from swarm_node.membership.lifecycle import Lifecycle
from swarm_node.membership.policy import MembershipPolicy
from swarm_node.membership.profiler import split_watch

logger = logging.getLogger(__name__)

T = TypeVar("T")


def attention_context(config: ModelConfig) -> float:
    """Tokens of context whose attention costs a row as many operations as the layer's matrices do."""
    queries, hidden = config.num_heads * config.head_dim, config.hidden_size
    matrices = hidden * (2 * queries + 2 * config.num_kv_heads * config.head_dim + 3 * config.intermediate_size)
    return matrices / (2.0 * queries)


class ExpertRoles(Protocol):
    """What computes experts for others, and asks others for theirs."""

    service: ExpertService
    exchange: ExpertExchange

    @property
    def waits_for(self) -> str: ...

    async def close(self) -> None: ...


class LoadCancelled(Exception):
    """Nobody waits for the layers any more."""


class SharedDevice:
    """The node's one compute thread, as one of several executors sees it."""

    def __init__(self, device: ThreadDevice) -> None:
        self._device = device

    def run(self, compute: Callable[[], T]) -> asyncio.Future[T]:
        return self._device.run(compute)

    def run_parts(self, part: Callable[[], T | None]) -> asyncio.Future[tuple[T, float]]:
        return self._device.run_parts(part)

    def close(self) -> None:
        """The thread is closed by its owner."""


class SpanManager:
    """The layers of this node. `engine`: of the newest span, None while there is none. `lifecycle`: changed here alone,
    but for `leaving`."""

    def __init__(
        self,
        hardware: Hardware,
        server: SessionServer,
        limits: Limits,
        on_progress: Callable[[float], None],
        policy: MembershipPolicy = MembershipPolicy(),
        on_fetched: FetchProgress = lambda done, total: None,
    ) -> None:
        """`on_progress(fraction)`: of the weights read so far; `on_fetched`: of those that have to come from a hub
        first. Both are called from other threads."""
        self.engine: SpanEngine | None = None
        self.lifecycle = Lifecycle()
        self.moves = 0
        self.compute_s = 0.0  # of all batches
        self._hardware = hardware
        self._server = server
        self._limits = limits
        self._on_progress = on_progress
        self._on_fetched = on_fetched
        self._policy = policy
        self.cost = hardware.calibration.cost
        self.experts: ExpertRoles | None = None  # for layers that are too big for a node; set before `load`
        self._expert_span: ExpertSpan | None = None
        self._layer_time = LayerTimeEstimator(self.cost)
        self._watch = split_watch(hardware.calibration)
        self._device = ThreadDevice()
        self._served_span: ServedSpan | None = None
        self._executors: dict[ServedSpan, Executor] = {}

    @property
    def layer_ms(self) -> float:
        """τ: the expected time of a layer for a token of one session more, milliseconds."""
        return self._layer_time.ms(self._server.sessions, time.monotonic())

    def claim(self, span: LayerSpan | None, share: ExpertShare | None = None) -> None:
        """Reserve these layers, or experts: our record shows them from now on. Raises OutOfMemory."""
        lifecycle = self.lifecycle
        if span is None and share is not None:
            self._hardware.memory.check_experts(self._hardware.budget, share)
        lifecycle.kv_tokens = 0 if span is None else self._kv_tokens(span, share)
        lifecycle.span, lifecycle.share, lifecycle.phase = span, share, NodeState.LOADING

    async def load(self) -> None:
        """Read what was claimed, and check one layer. Raises ModelError, OutOfMemory, UsageError."""
        lifecycle = self.lifecycle
        if lifecycle.span is not None:
            self.engine = await self._load(lifecycle.span, lifecycle.kv_tokens, share=lifecycle.share)
        else:
            assert lifecycle.share is not None  # `claim` comes first
            self._expert_span = await self._load_experts(lifecycle.share)

    async def measure(self) -> None:
        """Time the layers anew, with what other nodes compute of them. Raises NodeBusy if that is lost meanwhile."""
        assert self.engine is not None  # `load` comes first
        policy = self._policy
        measure = partial(
            measure_cost, self.engine.loaded, policy.led_widths, policy.led_context, policy.led_cost_budget_s
        )
        self.cost = await self._device.run(measure)
        self._layer_time = LayerTimeEstimator(self.cost)

    def serve(self) -> None:
        """Admit sessions on the layers that were loaded last, or leaders of the experts."""
        if self._expert_span is not None and self.experts is not None:
            self.experts.service.begin(self._expert_span, SharedDevice(self._device))
            self.lifecycle.phase = NodeState.SERVING
            return
        assert self.engine is not None  # `load` comes first
        work = WorkModel(self.cost, attention_context(self._hardware.source.config))
        executor = Executor(
            self.engine, SharedDevice(self._device), self._limits.batch_tokens, self._on_batch, work=work
        )
        self._served_span = self._server.begin(self.engine, executor)
        self._executors[self._served_span] = executor
        lifecycle = self.lifecycle
        lifecycle.span, lifecycle.phase = self.engine.span, NodeState.SERVING
        lifecycle.kv_tokens = self.engine.cache.capacity_tokens

    def _on_batch(self, stats: BatchStats) -> None:
        self._layer_time.observe(stats, time.monotonic())
        self.compute_s += stats.compute_ms / 1e3

    async def change(self, move: SpanMove, elsewhere: CoverageCheck, on_changed: Callable[[], None]) -> None:
        """Serve `move.new` instead of the present layers. `on_changed` is called when our record has changed.

        Raises OutOfMemory, with everything as it was, if the move depends on room for both spans and there is none.
        """
        if move.overlap:
            await self._make_before_break(move.new, elsewhere, on_changed)
        else:
            await self._break_before_make(move.new, elsewhere, on_changed)
        self.moves += 1

    async def _make_before_break(
        self, span: LayerSpan, elsewhere: CoverageCheck, on_changed: Callable[[], None]
    ) -> None:
        old = self._served_span
        assert old is not None  # only a node that serves moves
        self.engine = await self._load(span, self._kv_tokens(span), beside=self.engine)
        self.serve()
        on_changed()
        await asyncio.sleep(self._policy.route_staleness_s)
        await self._drain_and_end(old, elsewhere, grace_s=self._limits.drain_timeout_s)

    async def _break_before_make(
        self, span: LayerSpan, elsewhere: CoverageCheck, on_changed: Callable[[], None]
    ) -> None:
        assert self._served_span is not None  # as above
        self.claim(span)
        on_changed()
        await asyncio.sleep(self._policy.route_staleness_s)
        await self._drain_and_end(self._served_span, elsewhere)
        self.engine = self._served_span = None  # gives the memory back before the new weights need it
        await self.load()
        self.serve()
        on_changed()

    async def unload(self) -> None:
        """Free all memory. Call it when no session is left."""
        if self._served_span is not None:
            await self._end(self._served_span)
        if self.experts is not None:
            await self.experts.service.end()
        self.engine = self._served_span = self._expert_span = None
        lifecycle = self.lifecycle
        lifecycle.span, lifecycle.share, lifecycle.phase, lifecycle.kv_tokens = None, None, NodeState.JOINING, 0

    async def close(self) -> None:
        if self.experts is not None:
            await self.experts.close()
        for executor in self._executors.values():
            await executor.close()
        self._device.close()

    async def _drain_and_end(self, served_span: ServedSpan, elsewhere: CoverageCheck, grace_s: float = 0.0) -> None:
        served_span.open = False
        why = NodeLeaving("this node changes its layers")
        limit_s = grace_s + self._limits.drain_timeout_s
        await drain_sessions(self._server, why, elsewhere, served_span=served_span, grace_s=grace_s, within_s=limit_s)
        await self._end(served_span)

    async def _end(self, served_span: ServedSpan) -> None:
        await self._server.end(served_span)
        await self._executors.pop(served_span).close()

    def _kv_tokens(self, span: LayerSpan, share: ExpertShare | None = None) -> int:
        memory = self._hardware.memory
        most = self._limits.max_sessions * memory.context
        return memory.kv_tokens(self._hardware.budget, span, most, None if share is None else len(share.experts))

    async def _load(
        self, span: LayerSpan, kv_tokens: int, beside: SpanEngine | None = None, share: ExpertShare | None = None
    ) -> SpanEngine:
        hardware = self._hardware

        def load(progress: Progress, fetched: FetchProgress) -> SpanEngine:
            with memory_for(f"layers {span}"):
                like = beside.loaded if beside is not None else None
                held = None if share is None else HeldExperts(share.experts)
                loaded = load_span(
                    hardware.source, span, hardware.dtype, hardware.device, progress, like, fetched, held
                )
                verify_layer(loaded, hardware.source)
                if held is not None and self.experts is not None:
                    held.elsewhere.ask = self.experts.exchange.ask
                path = hardware.medusa_heads if span.end == hardware.num_layers else None
                heads = MedusaHeads.of(path, loaded, hardware.source) if path is not None else None
                grammars = TailGrammars(partial(load_tokenizer, hardware.source), loaded.config.vocab_size)
                drafts = self._tail_drafts() if span.end == hardware.num_layers and hardware.drafter else None
                return SpanEngine(loaded, loaded.new_cache(kv_tokens), heads, grammars, self._watch, drafts)

        return await self._in_thread(load)

    async def _load_experts(self, share: ExpertShare) -> ExpertSpan:
        hardware = self._hardware

        def load(progress: Progress, fetched: FetchProgress) -> ExpertSpan:
            with memory_for(str(share)):
                found = load_experts(hardware.source, share.layers, share.experts, hardware.dtype, progress, fetched)
                verify_experts(found, hardware.source)
                return found

        return await self._in_thread(load)

    async def _in_thread(self, load: Callable[[Progress, FetchProgress], T]) -> T:
        """Fetch and read weights in a thread of their own, which stops early when this is cancelled."""
        abandoned = threading.Event()

        def progress(fraction: float) -> None:
            if abandoned.is_set():
                raise LoadCancelled
            self._on_progress(fraction)

        def fetched(done: int, total: int) -> None:
            if abandoned.is_set():
                raise LoadCancelled
            self._on_fetched(done, total)

        try:
            return await asyncio.to_thread(load, progress, fetched)
        finally:
            abandoned.set()

    def _tail_drafts(self) -> TailDrafts:
        """Of the drafter that this node was given. Raises ModelError, DrafterFailed, OutOfMemory."""
        hardware = self._hardware
        drafts = TailDrafts(open_tail_drafter(hardware.drafter, hardware.source))
        offered = drafts.offered
        logger.info("drafts at the tail with %s '%s': %.1f ms a tree", offered.kind, offered.name, offered.tree_ms)
        return drafts
