"""A small simulated swarm with hostile nodes: clients that measure get right answers."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.errors import UsageError
from swarm.planner.cli.simulate import changed, simulate_table
from swarm.simulator.metrics import outcomes
from swarm.simulator.model.hostile import Behaviour, HostileSpec, address, behaviours
from swarm.simulator.model.session import SimPhase, SimSession
from swarm.simulator.model.workload import SimRequest

TABLE: dict[str, Any] = {
    "name": "hostile-60",
    "seed": 1,
    "until_s": 300.0,
    "model": {
        "name": "toy",
        "layers": 16,
        "hidden": 2048,
        "heads": 16,
        "kv_heads": 4,
        "head_dim": 128,
        "intermediate": 8192,
        "vocabulary": 32000,
        "weight_bytes": 1.0,
    },
    "devices": [{"name": "pc", "count": 60, "memory_gb": 1.2, "bandwidth_gb_s": 60, "tflops": 3}],
    "network": {"kind": "plane", "latency_ms": 40.0, "bandwidth_mbps": 100, "clients": 2},
    "workload": {"requests": 40, "arrivals": "closed", "prompt": {"median": 32}, "output": {"median": 40}},
    "hostile": {"share": 0.3},
    "serving": {"kv_reserve_tokens": 8192, "most_repairs": 32},
    "policy": {"name": "trusting"},
}


def outcome(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = simulate_table(changed(TABLE, {k.replace("__", "."): v for k, v in changes.items()}))
    return found["strangers"]


def test_clients_that_measure_get_right_answers_and_the_same_ones_each_time() -> None:
    with_trust = outcome()
    assert with_trust == outcome()
    assert with_trust["right"] == with_trust["ended"] > 18
    without = outcome(policy__name="swarm", hostile__audit_rate=0.0)
    assert without["right"] < with_trust["right"]


@pytest.mark.parametrize("kind", ["black hole", "liar", "sybil"])
def test_each_kind_that_only_delays(kind: str) -> None:
    found = outcome(hostile__kinds=[kind])
    assert found["right"] == found["ended"] > 18


def test_a_long_answer_that_goes_on_well_is_not_stuck_and_one_that_does_not_is() -> None:
    def session(took_ms: float, produced: int, done: bool) -> SimSession:
        made = SimSession(0, SimRequest(0, 0.0, 8, 100, "c"), 8, 100, produced=produced)
        made.phase, made.done_ms = (SimPhase.DONE, took_ms) if done else (SimPhase.RUNNING, None)
        return made

    usual = [session(100.0 * tokens, tokens, True) for tokens in range(10, 110)]
    long, stuck = session(20e3, 210, False), session(20e3, 5, False)
    assert outcomes([*usual, long], 20e3)["stuck"] == 0
    assert outcomes([*usual, stuck], 20e3)["stuck"] == 1


def test_who_is_hostile_is_drawn_from_the_seed_and_sybils_share_a_block() -> None:
    names = [f"n{i}" for i in range(100)]
    drawn = behaviours(HostileSpec(share=0.3), names, 1)
    assert len(drawn) == 30
    assert drawn == behaviours(HostileSpec(share=0.3), names, 1)
    assert drawn != behaviours(HostileSpec(share=0.3), names, 2)
    sybils = [name for name, what in drawn.items() if what is Behaviour.SYBIL]
    assert {".".join(address(name, Behaviour.SYBIL, 1).split("/")[2].split(".")[:2]) for name in sybils} == {"45.66"}


def test_a_wrong_share_is_refused() -> None:
    with pytest.raises(UsageError):
        outcome(hostile__share=1.5)
