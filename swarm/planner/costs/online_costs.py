"""A chain's costs as one generation meets them: the live map's to begin with, then what its own steps have taken.

Owns the memory of these measurements. Knows neither clocks nor what the costs are used for.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from swarm.ewma import Ewma
from swarm.planner.costs.chain_costs import ChainCosts, Stage
from swarm.types import CostCurve

EWMA_DECAY = 0.8  # what the measurements before the last one weigh together
FIT_DECAY = 0.9  # the same for how a hop's time grows with width, which takes steps of several widths to see
PRIOR_WEIGHT = 0.3  # steps that the live map's curve weighs as much as, at each end of the usual widths
PRIOR_LOG_WIDTHS = (0.0, 3.0)
CONTENTION_DECAY = 0.97  # crowding is forgotten so slowly with every step that had the chain to itself
LEAST_RATIO = 0.05


@dataclass(frozen=True, slots=True)
class Observation:
    """One settled step: `width` rows it had, `trace` of (queue ms, compute ms) a hop, `iteration_ms` from send to result.

    `iteration_ms` is None when others were under way as it was sent, whose time is in it too. `crowded`: others were under
    way at some time before it came back. `sessions`: how many the busiest hop decodes for, this one included.
    """

    width: int
    trace: tuple[tuple[float, float], ...]
    round_ms: float | None
    overlapped: bool = False
    active_sessions: int = 1


class OnlineChainCosts:
    """`observe` every settled step, `now()` is what the next one will cost by itself.

    `crowding`: how much longer hops compute while other steps of this generation are under way: above 1 where several
    hops share a machine. `company`: how many sessions pay for a row more, as they meet in the hops' batches; or, where
    they do not meet, a step's time at the hops over its computing, for others that wait there.
    """

    def __init__(self, predicted: ChainCosts, contention: float = 1.0) -> None:
        self._predicted = predicted
        self._fits = [_LogLinearFit() for _ in predicted.stages]
        self._queue_ms = [Ewma(EWMA_DECAY, 0.0) for _ in predicted.stages]
        self._links_ms = Ewma(EWMA_DECAY)  # all of a round's
        self._contention = Ewma(EWMA_DECAY, contention)
        self._sessions = Ewma(EWMA_DECAY)
        self._now: ChainCosts | None = None

    @property
    def contention(self) -> float:
        return self._contention.value

    @property
    def batch_sharing(self) -> float:
        queueing = sum(mean.value for mean in self._queue_ms)
        computing = self.now().compute_ms(1) - queueing
        return max(self._sessions.value, 1.0 + queueing / computing if computing > 0 else 1.0)

    def observe(self, seen: Observation) -> None:
        """A trace of another chain's length is passed over."""
        if len(seen.trace) != len(self._fits):
            return
        self._now = None
        computing = sum(compute for _, compute in seen.trace)
        self._sessions.update(seen.active_sessions)
        if seen.overlapped:
            alone = sum(
                self._curve(i).ms_at(seen.width) * stage.layers for i, stage in enumerate(self._predicted.stages)
            )
            if alone > 0:
                self._contention.value = max(1.0, self._contention.update(computing / alone))
        else:
            self._contention.value = 1.0 + (self._contention.value - 1.0) * CONTENTION_DECAY
            for i, ((queue, compute), stage) in enumerate(zip(seen.trace, self._predicted.stages, strict=True)):
                expected = stage.layers * stage.cost.ms_at(seen.width)
                if expected > 0:
                    self._fits[i].add(math.log2(max(1, seen.width)), compute / expected)
                self._queue_ms[i].update(queue)
        if seen.round_ms is not None:
            self._links_ms.update(max(0.0, seen.round_ms - sum(queue + compute for queue, compute in seen.trace)))

    def now(self) -> ChainCosts:
        if self._now is None:
            self._now = self._measured()
        return self._now

    def _measured(self) -> ChainCosts:
        costs = self._predicted
        stages = []
        for i, (stage, queue) in enumerate(zip(costs.stages, self._queue_ms, strict=True)):
            cost = self._curve(i)
            stages.append(Stage(stage.layers, cost.ms_at(1) + queue.value / stage.layers, cost))
        if not self._links_ms.samples:
            return replace(costs, stages=tuple(stages))
        total = sum(costs.link_ms)
        shares = [ms / total if total > 0 else 1 / len(costs.link_ms) for ms in costs.link_ms]
        return replace(costs, stages=tuple(stages), link_ms=tuple(self._links_ms.value * share for share in shares))

    def _curve(self, index: int) -> CostCurve:
        """The live map's curve, turned and raised to what was measured; more rows never take less."""
        told, fit = self._predicted.stages[index].cost, self._fits[index]
        ms = [cost * fit.at(math.log2(width)) for width, cost in zip(told.widths, told.ms, strict=True)]
        return CostCurve(told.widths, tuple(itertools.accumulate(ms, max)))


class _LogLinearFit:
    """Measured over predicted time as a straight line over the logarithm of the width, the last steps weighing most."""

    def __init__(self) -> None:
        self._weight = self._x = self._xx = self._y = self._xy = 0.0

    def add(self, x: float, ratio: float) -> None:
        seen = (1.0, x, x * x, ratio, x * ratio)
        sums = (self._weight, self._x, self._xx, self._y, self._xy)
        self._weight, self._x, self._xx, self._y, self._xy = (
            FIT_DECAY * total + term for total, term in zip(sums, seen, strict=True)
        )

    def at(self, x: float) -> float:
        weight, at, squares = self._weight, self._x, self._xx
        level = self._y / weight if weight else 1.0  # the prior is flat, at the height that was measured
        moment = self._xy
        for place in PRIOR_LOG_WIDTHS:
            weight, at, squares = weight + PRIOR_WEIGHT, at + PRIOR_WEIGHT * place, squares + PRIOR_WEIGHT * place**2
            moment += PRIOR_WEIGHT * place * level
        total = level * weight
        slope = (weight * moment - at * total) / (weight * squares - at * at)
        return max(LEAST_RATIO, (total - slope * at) / weight + slope * x)
