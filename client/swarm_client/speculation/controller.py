"""One generation's guesses: asks the drafter, measures what became of the guesses, sets the policy.

Owns the clock of a generation's rounds. What to guess is the drafter's, how far `plan.tuning`'s, and what a guess means
`plan.session`'s. A drafter that fails ends the guessing and never the generation.
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
from swarm.types import Chain, Hop
from swarm_client.speculation.drafters.base import CachedProposal, Candidate
from swarm_client.speculation.drafters.base import Drafter as DraftSource

logger = logging.getLogger(__name__)

EWMA_DECAY = 0.9  # what the drafting times before the last one weigh together
CHAINS_KNOWN = 64


class AsyncDrafter(Protocol):
    """A drafter as a generation uses it (`drafters.runner`, `drafters.inline`). Its calls raise DrafterFailed."""

    drafter: DraftSource

    async def reset(self, prompt_ids: Sequence[int]) -> None: ...

    async def extend(self, tokens: Sequence[int], hints: MedusaCandidates = ()) -> None: ...

    async def propose_cached(self, paths: Sequence[Sequence[int]], width: int) -> CachedProposal: ...

    async def propose_many(self, paths: Sequence[Sequence[int]], width: int) -> list[list[Candidate]]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class DraftingStats:
    """What all generations of a client have learned. `level_ms`: what a thorough question to the drafter takes."""

    _level_ms: Ewma = field(default_factory=lambda: Ewma(EWMA_DECAY, bias_correction=True))
    _crowding: dict[tuple[Hop, ...], float] = field(default_factory=dict)

    @property
    def level_ms(self) -> float:
        """0 while nothing was measured."""
        return self._level_ms.value

    def asked(self, ms: float) -> None:
        self._level_ms.update(ms)

    def contention(self, chain: Chain) -> float:
        """See `plan.live_costs.OnlineChainCosts`: whether hops share a machine does not change with the next question."""
        return self._crowding.get(chain.hops, 1.0)

    def contention_of(self, chain: Chain, crowding: float) -> None:
        self._crowding.pop(chain.hops, None)
        self._crowding[chain.hops] = crowding
        if len(self._crowding) > CHAINS_KNOWN:
            self._crowding.pop(next(iter(self._crowding)))


@dataclass(slots=True)
class _InFlightStep:
    """A step without a result yet. `alone`: when it was sent, nothing else was; `crowded`: something was since then."""

    at: float
    rows: int
    alone: bool
    overlapped: bool


@dataclass(slots=True)
class ClientSpeculation:
    """`only`: the strategy the user asked for, None to choose the best one as it goes."""

    generation: GenerationState
    drafter: AsyncDrafter
    costs_of: Callable[[Chain], ChainCosts]
    fixed_strategy: Strategy | None = None
    fixed: SpeculationPolicy | None = None  # for experiments: this policy, whatever is measured
    clock: Callable[[], float] = time.perf_counter
    experience: DraftingStats = field(default_factory=DraftingStats)
    setting: Decision | None = None
    failure: str = ""
    changes: list[str] = field(default_factory=list)
    _chain: Chain = field(default_factory=lambda: Chain(()))
    _controller: SpeculationController | None = None
    _under_way: dict[int, _InFlightStep] = field(default_factory=dict)
    _tokens: int = 0  # known at the last result
    _hits: int = 0
    _expected: float = 0.0
    _last: float = 0.0

    async def begin(self) -> None:
        """Tell the drafter the prompt."""
        self._tokens = len(self.generation.known)
        try:
            await self.drafter.reset(self.generation.known)
        except DrafterFailed as error:
            self._fail(error)

    def chain_ready(self, chain: Chain) -> None:
        """A chain is open; what was measured on the one before it says nothing of this one."""
        self._chain = chain
        self._controller = SpeculationController(
            self.costs_of(chain), self.fixed_strategy, contention=self.experience.contention(chain)
        )
        self._under_way.clear()
        self._last = self.clock()
        self._choose()

    async def draft(self, action: RequestDrafts) -> DraftsProposed | DrafterDisabled:
        started = self.clock()
        try:
            if not action.use_model:
                seen = await self.drafter.propose_cached(action.paths, action.width)
                return DraftsProposed(tuple(map(tuple, seen.candidates)), tuple(seen.unassigned_mass))
            answer = await self.drafter.propose_many(action.paths, action.width)
        except DrafterFailed as error:
            self._fail(error)
            return DrafterDisabled()
        unknown = not self.experience.level_ms
        self.experience.asked((self.clock() - started) * 1e3)
        if unknown:
            self._choose()  # until now questions had no price
        return DraftsProposed(tuple(map(tuple, answer)))

    async def emitted(self, tokens: Sequence[int], hints: MedusaCandidates) -> None:
        """These tokens are certain now; `hints`: what the tail thinks comes next."""
        if self.failure:
            return
        try:
            await self.drafter.extend(tokens, hints)
        except DrafterFailed as error:
            self._fail(error)

    def sent(self, step: SendStep) -> None:
        for other in self._under_way.values():
            other.overlapped = True
        rows, alone = len(step.tokens) + len(step.rows), not self._under_way
        self._under_way[step.step] = _InFlightStep(self.clock(), rows, alone, overlapped=not alone)

    def on_discard(self) -> None:
        """What is under way counts no more."""
        self._under_way.clear()

    def on_result(self, result: StepDone) -> None:
        """Measure a result before the generation sees it, and choose how to go on."""
        sent = self._under_way.pop(result.step, None)
        if sent is None or self._controller is None:
            return
        now, tally = self.clock(), self.generation.stats
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
            accepted=tally.accepted - self._hits,
            expected_accepted=tally.expected_accepted - self._expected,
            took_ms=(now - self._last) * 1e3,
        )
        self.experience.contention_of(self._chain, self._controller.contention)
        self._tokens, self._hits, self._expected, self._last = known, tally.accepted, tally.expected_accepted, now
        self._choose()

    def close(self) -> None:
        """The generation is over."""
        self.drafter.close()

    @property
    def measured_costs(self) -> ChainCosts | None:
        """The chain's costs as this generation meets them; None before there is a chain."""
        return self._controller.costs if self._controller is not None else None

    def to_json(self) -> dict[str, Any]:
        """What `/stats` and `--json` show."""
        tally = self.generation.stats
        return {
            "strategy": str(self.setting.strategy) if self.setting else str(Strategy.SEQUENTIAL),
            "drafter": self.drafter.drafter.name,
            "reason": self.failure or (self.setting.reason if self.setting else ""),
            "changes": list(self.changes),
            "steps": tally.steps,
            "rows": tally.rows,
            "hits": tally.accepted,
            "misses": tally.rejected,
            "discarded_steps": tally.discarded_steps,
            "tokens_per_step": round(len(self.generation.generated) / tally.steps, 3) if tally.steps else 0.0,
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
            source.acceptance.table(MAX_DEPTH), level_ms=self.experience.level_ms, model_hit_rate=source.model_hit_rate
        )
        setting = self._controller.decide(drafter)
        if self.setting is None or setting.strategy is not self.setting.strategy:
            self.changes.append(f"{len(self.generation.generated)}: {setting.strategy}")
            logger.info("from token %d on: %s", len(self.generation.generated), setting.reason)
        self.setting, self.generation.policy = setting, setting.policy

    def _fail(self, error: DrafterFailed) -> None:
        self.failure = str(error)
        logger.warning("going on without guesses: %s", error)
        self.generation.policy = SpeculationPolicy()
