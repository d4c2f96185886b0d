"""`simulate`: a seeded swarm of hundreds of nodes in virtual time, run by the planner's own functions.

A scenario in, metrics out; an optional trace is the same for the same scenario byte for byte. Owns the choice of policy
and the start and end of a run. The parts are in `swarm.simulator`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarm.errors import UsageError
from swarm.simulator.baselines.edgeshard import EdgeShard
from swarm.simulator.baselines.gpipe import GPipe
from swarm.simulator.baselines.heft import Heft
from swarm.simulator.baselines.hexgen import HexGen
from swarm.simulator.baselines.petals import Petals
from swarm.simulator.baselines.round_robin import RoundRobin
from swarm.simulator.churn import Churn
from swarm.simulator.des_engine import DiscreteEventEngine, Trace
from swarm.simulator.metrics import outcomes, summary
from swarm.simulator.model.network import NetworkModel
from swarm.simulator.model.workload import requests
from swarm.simulator.policies.hyperion import Hyperion
from swarm.simulator.policies.jupiter import Jupiter
from swarm.simulator.policies.swarm import SwarmPolicy
from swarm.simulator.policies.trusting import TrustingPolicy
from swarm.simulator.policy import ServingPolicy
from swarm.simulator.scenario import Scenario, changed, parse, runs

__all__ = ["Scenario", "changed", "parse", "runs", "simulate", "simulate_table"]

POLICIES: Mapping[str, type[ServingPolicy]] = {
    "swarm": SwarmPolicy,
    "trusting": TrustingPolicy,
    "hyperion": Hyperion,
    "jupiter": Jupiter,
    "petals": Petals,
    "hexgen": HexGen,
    "edgeshard": EdgeShard,
    "gpipe": GPipe,
    "heft": Heft,
    "round_robin": RoundRobin,
}


def simulate(scenario: Scenario, trace: Trace | None = None) -> dict[str, Any]:
    """Run a scenario to its end -> its metrics; times in s.

    `trace` gets a line of JSON for each event. Raises Infeasible if the devices do not hold the model.
    """
    if scenario.policy.outline_tokens and scenario.churn.periods:
        raise UsageError("outlines are not followed through churn; set outline_tokens or periods to 0")
    network = NetworkModel(scenario.network, scenario.seed)
    engine = DiscreteEventEngine(scenario, POLICIES[scenario.policy.name](scenario, network), network, trace)
    churn = Churn(engine)
    churn.begin()
    asked = requests(scenario.workload, scenario.network.clients, scenario.seed)
    if scenario.workload.arrivals == "closed":
        engine.arrive_in_turn(asked)
    else:
        for request in asked:
            engine.clock.at(request.at, lambda request=request: engine.arrive(request))  # type: ignore[misc]
    events = engine.clock.run(scenario.until_s * 1e3)
    churn.close()
    return {
        "scenario": scenario.name,
        "policy": scenario.policy.title,
        "seed": scenario.seed,
        **strangers_summary(scenario, engine),
        **summary(engine.sessions, list(engine.nodes.values()), engine.clock.now, churn.gaps),
        "left": churn.left,
        "joined": churn.joined,
        "moved": churn.moved,
        "events": events,
        "virtual_s": round(engine.clock.now / 1e3, 6),
    }


def strangers_summary(scenario: Scenario, engine: DiscreteEventEngine) -> dict[str, Any]:
    """How requests ended among hostile nodes; {} where there are none."""
    if not scenario.hostile.share:
        return {}
    pauses = {str(kind): count for kind, count in sorted(engine.attacks.pauses.items())}
    return {"strangers": {**outcomes(engine.sessions, engine.clock.now), "pauses": pauses}}


def simulate_table(table: Mapping[str, Any], trace: Trace | None = None) -> dict[str, Any]:
    """`simulate` for a decoded TOML or JSON file. Raises UsageError for an invalid one."""
    return simulate(parse(table), trace)
