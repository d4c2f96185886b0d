"""A chain's costs, learned online: those predicted from the snapshot at first, then corrected by measured steps.

Owns the estimates of one generation. Does not know clocks or what the costs are used for.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from swarm.ewma import Ewma
from swarm.planner.costs.chain_costs import ChainCosts, Stage
from swarm.planner.costs.policy import POLICY, CostPolicy
from swarm.types import CostCurve


@dataclass(frozen=True, slots=True)
class Observation:
    """One completed step of `width` rows: `trace` has (queue ms, compute ms) of each hop, `round_ms` is send to result.

    `round_ms` is None if other steps were in flight when it was sent, whose time it includes. `overlapped`: others were
    in flight at some time before its result. `active_sessions`: how many the busiest hop decodes for, including this.
    """

    width: int
    trace: tuple[tuple[float, float], ...]
    round_ms: float | None
    overlapped: bool = False
    active_sessions: int = 1


class OnlineChainCosts:
    """`observe` every completed step; `now()` is the cost of the next one by itself.

    `contention`: how much longer hops compute while other steps of this generation are in flight: above 1 if several
    hops share a machine. `batch_sharing`: how many sessions an extra row delays, as they are batched together at the
    hops; or, if they are not, a step's time at the hops over its compute time, for the others in the queue.
    """

    def __init__(self, predicted: ChainCosts, contention: float = 1.0, policy: CostPolicy = POLICY) -> None:
        self._predicted = predicted
        self._policy = policy
        self._fits = [_LogLinearFit(policy) for _ in predicted.stages]
        self._queue_ms = [Ewma(policy.ewma_decay, 0.0) for _ in predicted.stages]
        self._links_ms = Ewma(policy.ewma_decay)  # of all links together
        self._contention = Ewma(policy.ewma_decay, contention)
        self._sessions = Ewma(policy.ewma_decay)
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
        """Traces of another length than the chain's are ignored."""
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
            self._contention.value = 1.0 + (self._contention.value - 1.0) * self._policy.contention_decay
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
        """The predicted curve times the fit; more rows never take less time."""
        curve, fit = self._predicted.stages[index].cost, self._fits[index]
        ms = [cost * fit.at(math.log2(width)) for width, cost in zip(curve.widths, curve.ms, strict=True)]
        return CostCurve(curve.widths, tuple(itertools.accumulate(ms, max)))


class _LogLinearFit:
    """Measured over predicted time, as a line over log2 of the width: exponentially weighted least squares."""

    def __init__(self, policy: CostPolicy) -> None:
        self._policy = policy
        self._weight = self._x = self._xx = self._y = self._xy = 0.0

    def add(self, x: float, ratio: float) -> None:
        seen = (1.0, x, x * x, ratio, x * ratio)
        sums = (self._weight, self._x, self._xx, self._y, self._xy)
        self._weight, self._x, self._xx, self._y, self._xy = (
            self._policy.fit_decay * total + term for total, term in zip(sums, seen, strict=True)
        )

    def at(self, x: float) -> float:
        weight, at, squares = self._weight, self._x, self._xx
        level = self._y / weight if weight else 1.0  # the prior is flat, at the measured mean
        moment, prior = self._xy, self._policy.prior_weight
        for place in self._policy.prior_log_widths:
            weight, at, squares = weight + prior, at + prior * place, squares + prior * place**2
            moment += prior * place * level
        total = level * weight
        slope = (weight * moment - at * total) / (weight * squares - at * at)
        return max(self._policy.min_ratio, (total - slope * at) / weight + slope * x)
