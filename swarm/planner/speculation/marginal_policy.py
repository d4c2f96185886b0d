"""How much to speculate now: every row, step and draft-model call must be worth its time.

Owns the rule: tokens come at some rate, so what takes t ms must bring rate * t tokens or else save t ms (the marginal
value theorem: Charnov, "Optimal foraging", 1976; for a ratio to be maximized, Dinkelbach 1967). Confident drafts thus
fill the chain with deep trees, as many steps in flight as it holds, and where the drafter is uncertain one row is sent
alone. Does not know tokens or how the rate was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarm.planner.costs.chain_costs import ChainCosts
from swarm.planner.generation.events import SpeculationPolicy
from swarm.planner.speculation.policy import MARGINAL, SEARCH


@dataclass(frozen=True, slots=True)
class SpeculationCosts:
    """What drafts cost and bring now.

    `level_ms`: a draft-model call; `model_hit_rate`: how often it proposes the target's token. `calibration`: accepted
    drafts over those that the drafter's probabilities predict. `contention`, `batch_sharing`: of `OnlineChainCosts`.
    `step_rows`: of the steps sent lately.
    """

    tokens_per_ms: float
    level_ms: float = 0.0
    model_hit_rate: float = 0.5
    calibration: float = 1.0
    contention: float = 1.0
    batch_sharing: float = 1.0
    step_rows: float = 1.0


def choose_policy(costs: ChainCosts, spec: SpeculationCosts) -> SpeculationPolicy:
    """The policy whose every part is worth its time.

    A row accepted with probability p brings p tokens and lengthens the round trip, for all sessions at the hops. A step
    of drafts only, sent now and not after the result of the steps in flight, saves that wait if the text reaches it,
    and delays the step after a miss if not; steps of other sessions fill the chain as well. A draft-model call
    lengthens the round trip unless the chain is busy anyway, where it only delays a result that comes meanwhile; and a
    step waits for no more calls than another step would take. Where more than `min_rows` rows double the hops' compute
    time a step has no more, or drafts of a few percent, each worth its row, would delay the steps behind them.
    """
    round_ms, bottleneck_ms, row_compute_ms = costs.iteration_ms(1), costs.bottleneck_ms(1), costs.compute_ms(1)
    row_ms = (costs.iteration_ms(MARGINAL.probe_rows) - round_ms) / (MARGINAL.probe_rows - 1) * spec.batch_sharing
    max_compute_ms = MARGINAL.max_compute_ratio * row_compute_ms
    rows = next((n for n in MARGINAL.row_limits if costs.compute_ms(n) <= max_compute_ms), MARGINAL.min_rows)
    calibration = min(MARGINAL.max_calibration, max(MARGINAL.min_calibration, spec.calibration))
    min_node_prob = spec.tokens_per_ms * row_ms / calibration

    saved_ms = max(0.0, round_ms - bottleneck_ms)
    contention_ms = (spec.contention - 1.0) * costs.compute_ms(spec.step_rows)
    extra_step_ms = costs.bottleneck_ms(spec.step_rows) * spec.batch_sharing + contention_ms
    delay_ms = extra_step_ms - bottleneck_ms / 2  # on average half of it is done when a miss is known
    min_path_prob = delay_ms / (delay_ms + saved_ms) if saved_ms > 0 else 2.0  # never: one hop and no links

    missed_ms = min(1.0, spec.batch_sharing - 1.0) * row_compute_ms  # a session that waits misses the shared batches
    call_ms = spec.level_ms * spec.batch_sharing + missed_ms
    min_mass = spec.tokens_per_ms * call_ms / max(MARGINAL.min_hit_rate, spec.model_hit_rate) if spec.level_ms else 0.0
    idle_ratio = min(1.0, spec.level_ms / (2 * round_ms) + spec.contention - 1.0)
    cheap_calls = min_path_prob >= 1.0 or spec.level_ms * MARGINAL.max_depth <= extra_step_ms
    max_calls = MARGINAL.max_depth if cheap_calls else max(1, round(extra_step_ms / spec.level_ms))

    share = (pipeline_depth(costs, spec.step_rows, contention_ms) + 1) / spec.batch_sharing
    return SpeculationPolicy(
        max_tree_rows=rows,
        max_depth_per_step=MARGINAL.max_depth,
        max_steps_in_flight=min(SEARCH.max_in_flight, max(1, round(share))),
        min_node_prob=min(1.0, min_node_prob),
        min_path_prob=min_path_prob,
        min_mass_blocking=min_mass,
        min_mass_idle=min_mass * idle_ratio,
        max_model_calls=max_calls,
    )


def pipeline_depth(costs: ChainCosts, rows: float = 1.0, contention_ms: float = 0.0) -> int:
    """How many steps of `rows` rows fit into the chain at once, one behind the other, at least 1.

    `contention_ms`: how much longer a step takes because of each other one, where hops share a machine.
    """
    between_ms = costs.bottleneck_ms(rows) + contention_ms
    if between_ms <= 0:
        return SEARCH.max_in_flight
    return max(1, min(SEARCH.max_in_flight, math.ceil(costs.iteration_ms(rows) / between_ms)))
