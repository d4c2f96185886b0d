"""From no layers to some, and from those to others, while sessions run: make before break wherever memory allows.

Owns the loaded spans, the compute thread they share and the order of a change. Why a node changes its layers is
`upkeep`'s; what is left of sessions is `leaving`'s.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from swarm.config import Limits
from swarm.errors import NodeLeaving
from swarm.planner.rebalancing.migration import SpanMove
from swarm.planner.scheduling.layer_time import BatchStats
from swarm.types import LayerSpan, NodeState
from swarm_kernels.calibration.cost_curve import verify_layer
from swarm_kernels.draft.medusa import MedusaHeads
from swarm_kernels.runtime.load import load_span
from swarm_node.membership.hardware import Hardware, memory_for
from swarm_node.membership.lifecycle import Lifecycle
from swarm_node.serving.drain import CoverageCheck, drain_sessions
from swarm_node.serving.executor import Executor, ThreadDevice
from swarm_node.serving.served_spans import ServedSpan
from swarm_node.serving.session_server import SessionServer
from swarm_node.serving.span_engine import SpanEngine

T = TypeVar("T")

ROUTE_STALENESS_S = 1.5  # what clients route by may be so old: the layers we give up take sessions for so long


class Loading(Exception):
    """Loading was given up."""


class SharedDevice:
    """The node's one compute thread, as one of several executors sees it."""

    def __init__(self, device: ThreadDevice) -> None:
        self._device = device

    def run(self, compute: Callable[[], T]) -> asyncio.Future[T]:
        return self._device.run(compute)

    def close(self) -> None:
        """The thread lives on, for the others."""


class SpanManager:
    """The layers of this node. `engine`: of the newest span; None while there is none."""

    def __init__(
        self,
        machine: Hardware,
        service: SessionServer,
        standing: Lifecycle,
        limits: Limits,
        *,
        observe: Callable[[BatchStats], None],
        progress: Callable[[float], None],
    ) -> None:
        self.engine: SpanEngine | None = None
        self.moves = 0
        self._machine = machine
        self._service = service
        self._standing = standing
        self._limits = limits
        self._observe = observe
        self._progress = progress
        self._device = ThreadDevice()
        self._home: ServedSpan | None = None
        self._executors: dict[ServedSpan, Executor] = {}

    def claim(self, span: LayerSpan) -> None:
        """These are the layers we take: what others are told from now on. Raises OutOfMemory."""
        standing = self._standing
        standing.kv_tokens = self._kv_tokens(span)
        standing.span, standing.phase = span, NodeState.LOADING

    async def load(self) -> None:
        """Read the layers that were claimed, and check one. Raises ModelError, OutOfMemory."""
        assert self._standing.span is not None  # `claim` comes first
        self.engine = await self._load(self._standing.span, self._standing.kv_tokens)

    def serve(self) -> None:
        """Take sessions on the layers that were loaded last."""
        assert self.engine is not None  # `load` comes first
        executor = Executor(self.engine, SharedDevice(self._device), self._limits.batch_tokens, self._observe)
        self._home = self._service.begin(self.engine, executor)
        self._executors[self._home] = executor
        standing = self._standing
        standing.span, standing.phase = self.engine.span, NodeState.SERVING
        standing.kv_tokens = self.engine.cache.capacity_tokens

    async def change(self, move: SpanMove, elsewhere: CoverageCheck, published: Callable[[], None]) -> None:
        """Serve `move.new` instead of the present layers. `published` is told whenever our record has changed.

        Raises OutOfMemory, with everything as it was, if the move depends on room for both spans and there is none.
        """
        if move.overlap:
            await self._make_before_break(move.new, elsewhere, published)
        else:
            await self._break_before_make(move.new, elsewhere, published)
        self.moves += 1

    async def _make_before_break(
        self, span: LayerSpan, elsewhere: CoverageCheck, published: Callable[[], None]
    ) -> None:
        old = self._home
        assert old is not None  # only a node that serves is asked to move
        self.engine = await self._load(span, self._kv_tokens(span), beside=self.engine)
        self.serve()
        published()
        await asyncio.sleep(ROUTE_STALENESS_S)
        await self._give_up(old, elsewhere, grace_s=self._limits.drain_timeout_s)

    async def _break_before_make(
        self, span: LayerSpan, elsewhere: CoverageCheck, published: Callable[[], None]
    ) -> None:
        assert self._home is not None  # as above
        self.claim(span)
        published()
        await asyncio.sleep(ROUTE_STALENESS_S)
        await self._give_up(self._home, elsewhere)
        self.engine = self._home = None  # gives the memory back before the new weights need it
        await self.load()
        self.serve()
        published()

    async def rest(self) -> None:
        """Give all memory back. Call it when no session is left."""
        if self._home is not None:
            await self._end(self._home)
        self.engine = self._home = None
        standing = self._standing
        standing.span, standing.phase, standing.kv_tokens = None, NodeState.JOINING, 0

    async def close(self) -> None:
        for executor in self._executors.values():
            await executor.close()
        self._device.close()

    async def _give_up(self, home: ServedSpan, elsewhere: CoverageCheck, grace_s: float = 0.0) -> None:
        home.open = False
        why = NodeLeaving("this node changes its layers")
        limit_s = grace_s + self._limits.drain_timeout_s
        await drain_sessions(self._service, why, elsewhere, home=home, grace_s=grace_s, within_s=limit_s)
        await self._end(home)

    async def _end(self, home: ServedSpan) -> None:
        await self._service.end(home)
        await self._executors.pop(home).close()

    def _kv_tokens(self, span: LayerSpan) -> int:
        weights = self._machine.weights
        most = self._limits.max_sessions * weights.context
        return weights.kv_tokens(self._machine.budget, span, most)

    async def _load(self, span: LayerSpan, kv_tokens: int, beside: SpanEngine | None = None) -> SpanEngine:
        """Read weights in a thread of their own; whoever gives up on it does not wait for the rest of them."""
        machine = self._machine
        abandoned = threading.Event()

        def progress(share: float) -> None:
            if abandoned.is_set():
                raise Loading
            self._progress(share)

        def load() -> SpanEngine:
            with memory_for(f"layers {span}"):
                like = beside.loaded if beside is not None else None
                loaded = load_span(machine.source, span, machine.dtype, machine.device, progress, like)
                verify_layer(loaded, machine.source)
                path = machine.heads if span.end == machine.num_layers else None
                heads = MedusaHeads.of(path, loaded, machine.source) if path is not None else None
                return SpanEngine(loaded, loaded.new_cache(kv_tokens), heads)

        try:
            return await asyncio.to_thread(load)
        finally:
            abandoned.set()
