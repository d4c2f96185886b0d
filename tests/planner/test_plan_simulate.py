"""The simulator: the same seed is the same run, its times add up, and every policy serves all requests."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from swarm.errors import Infeasible, UsageError
from swarm.planner.cli.simulate import POLICIES, changed, parse, runs, simulate, simulate_table
from swarm.simulator.churn import Churn
from swarm.simulator.des_engine import DiscreteEventEngine
from swarm.simulator.model.network import NetworkModel
from swarm.simulator.model.session import SimPhase, SimSession
from swarm.simulator.model.workload import SimRequest
from swarm.simulator.policies.swarm import SwarmPolicy
from swarm.types import Hop

MODEL = {
    "name": "tiny",
    "layers": 12,
    "hidden": 1024,
    "heads": 16,
    "kv_heads": 4,
    "head_dim": 64,
    "intermediate": 4096,
    "vocabulary": 32000,
}
LAYER_GB = 2 * (1024 * 64 * (2 * 16 + 2 * 4) + 3 * 1024 * 4096) / 1e9


def device(name: str, count: int = 1, **fields: Any) -> dict[str, Any]:
    return {
        "name": name,
        "count": count,
        "memory_gb": 0.45,
        "memory_share": 1.0,
        "bandwidth_gb_s": 100.0,
        "tflops": 10.0,
        **fields,
    }


def table(**changes: Any) -> dict[str, Any]:
    base = {
        "name": "test",
        "seed": 3,
        "model": MODEL,
        "devices": [device("fast", 3, bandwidth_gb_s=200.0, tier=2), device("slow", 4, memory_gb=0.35, tier=1)],
        "network": {"latency_ms": 5.0, "client_ms": 2.0},
        "workload": {
            "requests": 20,
            "rate_per_s": 4.0,
            "prompt": {"median": 60, "sigma": 0.5, "most": 200},
            "output": {"median": 20, "sigma": 0.5, "most": 60},
        },
        "serving": {"kv_reserve_tokens": 1024, "route_timeout_ms": 1e9},
    }
    return changed(base, changes)


def traced(scenario: dict[str, Any]) -> tuple[dict[str, Any], str]:
    lines: list[str] = []
    result = simulate_table(scenario, lines.append)
    return result, "\n".join(lines)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_serves_all_requests_and_the_same_seed_is_the_same_run(policy: str) -> None:
    one, trace = traced(table(policy={"name": policy}))
    assert one["finished"] == one["requests"] == 20, one["failures"]
    assert one["throughput_rps"] > 0
    assert 0 < one["latency_s"]["p50"] <= one["latency_s"]["p99"] <= one["latency_s"]["p100"]
    assert all(0 <= node["busy"] <= 1 for node in one["nodes"].values())
    again, same = traced(table(policy={"name": policy}))
    assert again == one
    assert same.encode() == trace.encode()


def test_another_seed_is_another_run() -> None:
    assert traced(table())[1] != traced(table(seed=4))[1]


def test_a_trace_is_lines_of_json_in_order() -> None:
    events = [json.loads(line) for line in traced(table())[1].splitlines()]
    times = [event["t"] for event in events]
    assert times == sorted(times)
    kinds = [event["event"] for event in events]
    assert kinds.count("arrive") == kinds.count("done") == 20


def test_a_lone_request_takes_the_roofline_time() -> None:
    """One node, the whole model: every token moves all weights, the head's too, and crosses the line to the client."""
    scenario = table(
        devices=[device("one", memory_gb=2.0)],
        workload={"requests": 1, "prompt": {"median": 1, "sigma": 0.0}, "output": {"median": 11, "sigma": 0.0}},
    )
    result = simulate_table(scenario)
    head_gb = 2 * 1024 * 32000 / 1e9
    moved_ms = (12 * LAYER_GB + head_gb) / 100.0 * 1e3
    assert result["per_token_s"]["mean"] == pytest.approx((moved_ms + 2 * 2.0) / 1e3, rel=0.01)
    assert result["nodes"]["n0000-one"]["layers"] == "0:12"


def test_batches_form_under_load() -> None:
    slow = table(workload={"rate_per_s": 0.01})
    fast = table(workload={"arrivals": "at_once"})
    rows = [max(n["rows_per_batch"] for n in simulate_table(t)["nodes"].values()) for t in (slow, fast)]
    assert rows[1] > rows[0]
    alone = simulate_table(changed(fast, {"policy.sessions_per_batch": 1}))
    assert alone["throughput_rps"] < simulate_table(fast)["throughput_rps"]


def test_kv_memory_bounds_what_is_open() -> None:
    crowded = table(workload={"arrivals": "at_once", "requests": 60}, serving={"kv_reserve_tokens": 64})
    result = simulate_table(crowded)
    assert result["finished"] == 60
    assert all(node["kv_peak"] <= 1.0 for node in result["nodes"].values())


def test_a_measured_cost_curve_takes_the_place_of_the_roofline() -> None:
    measured = {"bandwidth_gb_s": 0.0, "tflops": 0.0, "widths": [1, 8, 64], "layer_ms": [2.0, 4.0, 20.0]}
    scenario = table(
        devices=[device("measured", memory_gb=2.0, **measured)],
        workload={"requests": 1, "prompt": {"median": 1, "sigma": 0.0}, "output": {"median": 11, "sigma": 0.0}},
    )
    head_ms = 2.0 * 2 * 1024 * 32000 / 1e9 / LAYER_GB
    assert simulate_table(scenario)["per_token_s"]["mean"] == pytest.approx((12 * 2.0 + head_ms + 4.0) / 1e3, abs=1e-6)


def test_a_trace_of_requests_is_replayed() -> None:
    requested = [{"at_s": 5.0, "prompt": 10, "output": 3}, {"at_s": 1.0, "prompt": 20, "output": 4}]
    events = [json.loads(line) for line in traced(table(workload={"trace": requested}))[1].splitlines()]
    arrivals = [(e["t"], e["prompt"], e["output"]) for e in events if e["event"] == "arrive"]
    assert arrivals == [(1000.0, 20, 4), (5000.0, 10, 3)]


def test_a_slower_uplink_takes_longer() -> None:
    fast, slow = (
        simulate_table(table(network={"bandwidth_mbps": mbps}))["first_token_s"]["mean"] for mbps in (1000, 10)
    )
    assert slow > fast


def test_drafts_and_outlines_shorten_answers() -> None:
    def latency(**policy: Any) -> float:
        result = simulate_table(table(workload={"rate_per_s": 0.05}, policy={"name": "jupiter", **policy}))
        assert result["finished"] == 20
        return float(result["latency_s"]["mean"])

    plain = latency()
    drafts = latency(draft_tokens=3, acceptance=[0.8, 0.7, 0.6])
    both = latency(draft_tokens=3, acceptance=[0.8, 0.7, 0.6], outline_tokens=5, points=3)
    assert both < drafts < plain


def test_hexgen_finds_the_best_grouping() -> None:
    """Two equal machines that each hold the model are two pipelines; halved memory makes them one."""
    whole = simulate_table(table(devices=[device("big", 2, memory_gb=2.0)], policy={"name": "hexgen"}))
    assert [n["layers"] for n in whole["nodes"].values()] == ["0:12", "0:12"]
    halves = simulate_table(table(devices=[device("half", 2, memory_gb=0.5)], policy={"name": "hexgen"}))
    assert sorted(n["layers"] for n in halves["nodes"].values()) == ["0:6", "6:12"]


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(Infeasible):
        simulate_table(table(devices=[device("small", memory_gb=0.2)]))
    with pytest.raises(UsageError, match="devices"):
        parse({"name": "x", "model": MODEL, "workload": {}})
    with pytest.raises(UsageError, match="rate"):
        simulate_table(table(workload={"rate_per_s": -1}))
    with pytest.raises(UsageError, match="nonsense"):
        simulate_table(table(nonsense=1))
    with pytest.raises(UsageError, match="names no field"):
        changed(table(), {"devices.9.count": 1})


@pytest.mark.parametrize("policy", POLICIES)
def test_machines_that_cannot_serve_are_refused_whoever_plans(policy: str) -> None:
    for machines in (device("tiny", 4, memory_gb=0.001), device("small", 1, memory_gb=0.2)):
        with pytest.raises(Infeasible):
            simulate_table(table(devices=[machines], policy={"name": policy}))
    with pytest.raises(UsageError, match="at least one device"):
        simulate_table(table(devices=[device("none", 0)], policy={"name": policy}))
    measured = {"name": "m", "memory_gb": 1.0, "widths": [1, 8], "layer_ms": [0.0, 1.0]}
    with pytest.raises(UsageError, match="more than 0 ms"):
        simulate_table(table(devices=[measured], policy={"name": policy}))


def test_sweeps_name_every_combination() -> None:
    swept = {
        **table(),
        "sweep": {
            "policy": [{"name": "swarm"}, {"name": "petals", "label": "P"}],
            "workload.rate_per_s": [1, 2],
            "@net": [{"label": "far", "network.latency_ms": 50}],
        },
    }
    found = list(runs(swept))
    assert [chosen for chosen, _ in found] == [
        {"policy": policy, "workload.rate_per_s": rate, "net": "far"} for policy in ("swarm", "P") for rate in "12"
    ]
    scenario = parse(found[-1][1])
    assert scenario.network.latency_ms == 50
    assert scenario.policy.name == "petals"
    assert scenario.workload.rate_per_s == 2


CHURN = {"leave_share": 0.3, "period_s": 20, "periods": 4, "replace": True, "measure_s": 1, "load_mb_per_s": 100}
SWARM_OF_200 = {
    "devices": [device("fast", 80, bandwidth_gb_s=40.0), device("slow", 120, memory_gb=0.25, bandwidth_gb_s=20.0)],
    "network": {"kind": "plane", "latency_ms": 40.0, "clients": 4},
    "workload": {"requests": 60, "rate_per_s": 1.0, "output": {"median": 60, "most": 150}},
    "churn": CHURN,
    "serving": {"detect_ms": 500, "dial_timeout_ms": 1000, "route_timeout_ms": 5000},
}


@pytest.mark.slow
def test_a_swarm_that_loses_a_third_of_its_nodes_a_period_finishes_its_requests() -> None:
    result, trace = traced(table(**SWARM_OF_200))
    assert result["left"] > 150
    assert result["repairs"] > 0
    assert result["covered"]["share"] >= 0.99
    assert traced(table(**SWARM_OF_200))[1].encode() == trace.encode()


@pytest.mark.slow
def test_petals_survives_churn_too() -> None:
    result = simulate_table(table(**SWARM_OF_200, policy={"name": "petals"}))
    assert result["repairs"] > 0
    assert result["covered"]["share"] >= 0.95


def test_a_shrinking_swarm_is_rebalanced() -> None:
    """Nobody joins: sooner or later a layer is without a node, and those left move over."""
    lonely = table(
        **SWARM_OF_200 | {"devices": [device("fast", 30, memory_gb=0.35)], "churn": {**CHURN, "replace": False}}
    )
    result = simulate_table(lonely)
    assert result["joined"] == 0
    assert result["covered"]["share"] >= 0.99
    assert result["moved"] > 0 or result["uncovered_s"] == 0


@pytest.mark.parametrize(("token_between", "ends_ms"), [(False, 10_000), (True, 18_000)])
def test_repairs_that_fail_one_after_the_other_share_a_deadline(token_between: bool, ends_ms: float) -> None:
    """Everybody is gone; the session is broken again after 8 s, with or without a result before that."""
    scenario = parse(table(serving={"repair_timeout_ms": 10_000, "dial_timeout_ms": 300}))
    network = NetworkModel(scenario.network, scenario.seed)
    engine = DiscreteEventEngine(scenario, SwarmPolicy(scenario, network), network)
    Churn(engine).begin()
    for node in engine.nodes.values():
        node.died = 0.0
    request = SimRequest(number=0, at=0.0, prompt=5, output=5, client="client0")
    session = SimSession(0, request, 5, 5, hops=[Hop(min(engine.nodes), 0, 12)], held=5, repairs=1)
    engine.sessions.append(session)
    engine.open_requests = 1

    def broken() -> None:
        session.phase = SimPhase.RUNNING
        if token_between:
            session.broken_since = None  # as a result does
        engine.chains.connect(session)

    for at in (0.0, 8_000.0):
        engine.clock.at(at, broken)
    engine.clock.run(60_000.0)
    assert session.failure == "no route"
    assert session.done_ms == pytest.approx(ends_ms, abs=1_000)


def test_a_session_resumes_with_every_token() -> None:
    """After repairs, a request has produced just its output tokens, and its replays carried what the chain had held."""
    scenario = parse(table(**SWARM_OF_200))
    lines: list[str] = []
    simulate(scenario, lines.append)
    events = [json.loads(line) for line in lines]
    lost = {e["s"] for e in events if e["event"] == "lost"}
    replayed = {e["s"]: e["tokens"] for e in events if e["event"] == "replayed"}
    done = {e["s"]: e["steps"] for e in events if e["event"] == "done"}
    requested = {e["s"]: e for e in events if e["event"] == "arrive"}
    assert lost & set(replayed) & set(done)
    for session, tokens in replayed.items():
        assert tokens <= requested[session]["prompt"] + requested[session]["output"]
    for session, steps in done.items():
        chunks = math.ceil(requested[session]["prompt"] / 256)
        assert steps >= requested[session]["output"] - 1 + chunks
