"""How far to guess ahead, by what a moment of the chain is worth: every row, step and question must earn its time.

Owns the rule: an answer comes at some pace, so what takes t ms must bring pace * t tokens or else save t ms (the
marginal value theorem: Charnov, "Optimal foraging", 1976; for a ratio to be maximised, Dinkelbach 1967). Sure guesses
thus fill the chain with deep trees, as many steps in flight as it holds, and where nobody knows what comes next one row
goes out alone. Knows neither tokens nor how the pace was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarm.planner.costs.chain_costs import ChainCosts
from swarm.planner.generation.events import SpeculationPolicy
from swarm.planner.speculation.forecast import MAX_IN_FLIGHT

ROWS = (32, 24, 16, 12)  # tree nodes a step may have: the most with which hops take no more than
MAX_COMPUTE_RATIO = 2.0  # times what they take without, or else
LEAST_ROWS = 8
LEVELS = 16
PROBE_WIDTH = 9  # rows of a usual tree: what one of them costs is measured up to there
MIN_CALIBRATION, MAX_CALIBRATION = 0.2, 1.5


@dataclass(frozen=True, slots=True)
class SpeculationCosts:
    """What guesses cost and what they are worth now.

    `pace`: tokens/ms that come. `level_ms`: a thorough question to the drafter; `hits`: how often its answer holds the
    target's token. `trust`: right guesses over those that the drafter's odds promise. `crowding`, `company`: as
    `live_costs.OnlineChainCosts` has them.
    """

    tokens_per_ms: float
    level_ms: float = 0.0
    model_hit_rate: float = 0.5
    calibration: float = 1.0
    contention: float = 1.0
    batch_sharing: float = 1.0


def choose_policy(costs: ChainCosts, spec: SpeculationCosts) -> SpeculationPolicy:
    """The policy whose every part earns its time.

    A row right with probability p brings p tokens and lengthens the round, for everybody at the hops. A step of
    guesses alone, sent now and not when what is under way has come back, saves that wait if the text comes to it, and
    holds up the step after a miss if not; the steps of others fill the chain as well. A question lengthens the round
    unless the chain is busy anyway, where it only delays a result that comes meanwhile; and a step waits for no more
    of them than another step would cost. Where more than eight rows double what the hops compute a step has no more, or
    guesses of a few percent, each worth its row, would hold up the steps behind them.
    """
    round_ms, slowest = costs.iteration_ms(1), costs.bottleneck_ms(1)
    row_ms = (costs.iteration_ms(PROBE_WIDTH) - round_ms) / (PROBE_WIDTH - 1) * spec.batch_sharing
    rows = next((n for n in ROWS if costs.compute_ms(n) <= MAX_COMPUTE_RATIO * costs.compute_ms(1)), LEAST_ROWS)
    floor = spec.tokens_per_ms * row_ms / min(MAX_CALIBRATION, max(MIN_CALIBRATION, spec.calibration))
    saved = max(0.0, round_ms - slowest)
    another = slowest * spec.batch_sharing + (spec.contention - 1.0) * costs.compute_ms(1)  # what a further step takes
    held_up = another - slowest / 2  # on average half of it is done when a miss is known
    reach = held_up / (held_up + saved) if saved > 0 else 2.0  # never: a chain of one hop and no links
    apart = min(1.0, spec.batch_sharing - 1.0) * costs.compute_ms(
        1
    )  # who asks misses the batches that the others share
    ask = (
        spec.tokens_per_ms * (spec.level_ms * spec.batch_sharing + apart) / max(0.05, spec.model_hit_rate)
        if spec.level_ms
        else 0.0
    )
    idle = min(1.0, spec.level_ms / (2 * round_ms) + spec.contention - 1.0)
    room = (max(1, pipeline_depth(costs)) + 1) / spec.batch_sharing
    in_flight = min(MAX_IN_FLIGHT, max(1, round(room)))
    lone = reach >= 1.0 or spec.level_ms * LEVELS <= another
    thoughts = LEVELS if lone else max(1, round(another / spec.level_ms))
    return SpeculationPolicy(rows, LEVELS, in_flight, min(1.0, floor), reach, ask, ask * idle, thoughts)


def pipeline_depth(costs: ChainCosts) -> int:
    """How many plain steps fit into the chain one behind the other."""
    slowest = costs.bottleneck_ms(1)
    return min(MAX_IN_FLIGHT, math.ceil(costs.iteration_ms(1) / slowest)) if slowest > 0 else MAX_IN_FLIGHT
