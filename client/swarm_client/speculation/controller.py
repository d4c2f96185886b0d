"""One generation's speculative decoding: requests drafts, measures how many are accepted, sets the policy.

Owns the clock of a generation's iterations. The draft tokens are the drafter's, how many to draft is decided by
`planner.speculation.controller`, and the draft tree is GenerationState's. A drafter that fails ends the speculation and
never the generation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from swarm.errors import DrafterFailed
from swarm.ewma import Ewma
from swarm.planner.costs.chain_costs import ChainCosts
from swarm.planner.costs.online_costs import Observation
from swarm.planner.generation.draft_tree import MedusaCandidates
from swarm.planner.generation.state_machine import (
    DrafterDisabled,
    DraftsProposed,
    GenerationState,
    RequestDrafts,
    SendStep,
    SpeculationPolicy,
    StepDone,
)
from swarm.planner.speculation.controller import MAX_DEPTH, Decision, SpeculationController
from swarm.planner.speculation.forecast import DrafterProfile, Strategy
from swarm.types import Chain, Hop, TappedRows, Taps
from swarm_client.speculation.drafters.base import NO_TAPS, CachedProposal, Candidate
from swarm_client.speculation.drafters.base import Drafter as DraftSource

logger = logging.getLogger(__name__)

EWMA_DECAY = 0.9  # of the draft model's times: the weight of all before the last one
MAX_CHAINS = 64  # whose contention factors are remembered


class AsyncDrafter(Protocol):
    """A drafter as a generation uses it: ThreadedDrafter, InlineDrafter, LateDrafter. Its calls raise DrafterFailed."""

    @property
    def drafter(self) -> DraftSource: ...

    @property
    def taps(self) -> Taps | None:
        """The hidden states that it reads, or will read: a session asks for them when it opens."""
        ...

    async def reset(self, prompt_ids: Sequence[int]) -> None: ...

    async def extend(
        self, tokens: Sequence[int], medusa: MedusaCandidates = (), taps: TappedRows = NO_TAPS
    ) -> None: ...

    async def propose_cached(self, paths: Sequence[Sequence[int]], width: int) -> CachedProposal: ...

    async def propose_many(self, paths: Sequence[Sequence[int]], width: int) -> list[list[Candidate]]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class DraftingStats:
    """Measured by all generations of a client. `level_ms`: EWMA of what a draft-model call takes."""

    _level_ms: Ewma = field(default_factory=lambda: Ewma(EWMA_DECAY, bias_correction=True))
    _contention: dict[tuple[Hop, ...], float] = field(default_factory=dict)

    @property
    def level_ms(self) -> float:
        """0 while nothing was measured."""
        return self._level_ms.value

    def record_call(self, ms: float) -> None:
        self._level_ms.update(ms)

    def contention(self, chain: Chain) -> float:
        """See OnlineChainCosts: whether hops share a machine does not change between generations."""
        return self._contention.get(chain.hops, 1.0)

    def record_contention(self, chain: Chain, contention: float) -> None:
        self._contention.pop(chain.hops, None)
        self._contention[chain.hops] = contention
        if len(self._contention) > MAX_CHAINS:
            self._contention.pop(next(iter(self._contention)))


@dataclass(slots=True)
class _InFlightStep:
    """A step without a result yet. `alone`: no other was in flight when it was sent; `overlapped`: one was since."""

    at: float
    rows: int
    alone: bool
    overlapped: bool


@dataclass(slots=True)
class ClientSpeculation:
    """`fixed_strategy`: the one that the user chose, None to choose the best one by what is measured."""

    generation: GenerationState
    drafter: AsyncDrafter
    costs_of: Callable[[Chain], ChainCosts]
    fixed_strategy: Strategy | None = None
    fixed: SpeculationPolicy | None = None  # for experiments: overrides what is measured
    clock: Callable[[], float] = time.perf_counter
    stats: DraftingStats = field(default_factory=DraftingStats)
    choice: str = ""  # which drafter was chosen and why, if the user left that to us
    decision: Decision | None = None
    failure: str = ""
    changes: list[str] = field(default_factory=list)
    _chain: Chain = field(default_factory=lambda: Chain(()))
    _controller: SpeculationController | None = None
    _in_flight: dict[int, _InFlightStep] = field(default_factory=dict)
    _tokens: int = 0  # known at the last result
    _accepted: int = 0
    _expected: float = 0.0
    _last: float = 0.0

    async def begin(self) -> None:
        """Start the drafter on the prompt."""
        self._tokens = len(self.generation.known)
        try:
            await self.drafter.reset(self.generation.known)
        except DrafterFailed as error:
            self._fail(error)

    def chain_ready(self, chain: Chain) -> None:
        """A chain is open; what was measured on the one before it does not apply to this one."""
        self._chain = chain
        self._controller = SpeculationController(
            self.costs_of(chain), self.fixed_strategy, contention=self.stats.contention(chain)
        )
        self._in_flight.clear()
        self._last = self.clock()
        self._choose()

    async def draft(self, action: RequestDrafts) -> DraftsProposed | DrafterDisabled:
        started = self.clock()
        try:
            if not action.use_model:
                cached = await self.drafter.propose_cached(action.paths, action.width)
                return DraftsProposed(tuple(map(tuple, cached.candidates)), tuple(cached.unassigned_mass))
            drafts = await self.drafter.propose_many(action.paths, action.width)
        except DrafterFailed as error:
            self._fail(error)
            return DrafterDisabled()
        unknown = not self.stats.level_ms
        self.stats.record_call((self.clock() - started) * 1e3)
        if unknown:
            self._choose()  # until now the cost of a draft-model call was unknown
        return DraftsProposed(tuple(map(tuple, drafts)))

    async def emitted(self, tokens: Sequence[int], medusa: MedusaCandidates, taps: TappedRows = NO_TAPS) -> None:
        """These tokens are committed now; `medusa`: candidates of the tail's Medusa heads for what follows; `taps`:
        hidden states of the text before the last of them."""
        if self.failure:
            return
        try:
            await self.drafter.extend(tokens, medusa, taps)
        except DrafterFailed as error:
            self._fail(error)

    def sent(self, step: SendStep) -> None:
        for other in self._in_flight.values():
            other.overlapped = True
        rows, alone = len(step.tokens) + len(step.rows), not self._in_flight
        self._in_flight[step.step] = _InFlightStep(self.clock(), rows, alone, overlapped=not alone)

    def on_discard(self) -> None:
        """No step in flight will have a result."""
        self._in_flight.clear()

    def on_result(self, result: StepDone) -> None:
        """Measure a result before the generation sees it, and choose how to go on."""
        sent = self._in_flight.pop(result.step, None)
        if sent is None or self._controller is None:
            return
        now, stats = self.clock(), self.generation.stats
        known = len(self.generation.known)
        self._controller.on_commit(
            Observation(
                sent.rows,
                result.trace,
                (now - sent.at) * 1e3 if sent.alone else None,
                sent.overlapped,
                result.active_sessions,
            ),
            tokens=known - self._tokens,
            accepted=stats.accepted - self._accepted,
            expected_accepted=stats.expected_accepted - self._expected,
            took_ms=(now - self._last) * 1e3,
        )
        self.stats.record_contention(self._chain, self._controller.contention)
        self._tokens, self._accepted, self._expected, self._last = known, stats.accepted, stats.expected_accepted, now
        self._choose()

    def close(self) -> None:
        """The generation is over."""
        self.drafter.close()

    @property
    def measured_costs(self) -> ChainCosts | None:
        """The chain's costs as measured by this generation; None before there is a chain."""
        return self._controller.costs if self._controller is not None else None

    def to_json(self) -> dict[str, Any]:
        """What `/stats` and `--json` show."""
        stats = self.generation.stats
        return {
            "strategy": str(self.decision.strategy) if self.decision else str(Strategy.SEQUENTIAL),
            "drafter": self.drafter.drafter.name,
            "choice": self.choice,
            "reason": self.failure or (self.decision.reason if self.decision else ""),
            "changes": list(self.changes),
            "dropped": list(self.drafter.drafter.failures),
            "steps": stats.steps,
            "rows": stats.rows,
            "hits": stats.accepted,
            "misses": stats.rejected,
            "discarded_steps": stats.discarded_steps,
            "tokens_per_step": round(len(self.generation.generated) / stats.steps, 3) if stats.steps else 0.0,
            "acceptance": [[round(p, 3) for p in row] for row in self.drafter.drafter.acceptance.table(4)],
        }

    def _choose(self) -> None:
        if self.failure or self._controller is None:
            return
        if self.fixed is not None:
            self.generation.policy = self.fixed
            return
        source = self.drafter.drafter
        drafter = DrafterProfile(
            source.acceptance.table(MAX_DEPTH), level_ms=self.stats.level_ms, model_hit_rate=source.model_hit_rate
        )
        decision = self._controller.decide(drafter)
        if self.decision is None or decision.strategy is not self.decision.strategy:
            self.changes.append(f"{len(self.generation.generated)}: {decision.strategy}")
            logger.info("from token %d on: %s", len(self.generation.generated), decision.reason)
        self.decision, self.generation.policy = decision, decision.policy

    def _fail(self, error: DrafterFailed) -> None:
        self.failure = str(error)
        logger.warning("going on without speculative decoding: %s", error)
        self.generation.policy = SpeculationPolicy()
