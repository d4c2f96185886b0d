"""Invalid requests to swarm-plan: each gets one sentence that names what is wrong."""

from __future__ import annotations

import pytest
from plan_cli import plan

from swarm.planner.schemas import MAX_BYTES


@pytest.mark.parametrize(
    ("command", "text", "message"),
    [
        ("join-span", "", "the input is empty"),
        ("join-span", "  \n", "the input is empty"),
        ("join-span", "{", "not JSON"),
        ("join-span", "[]", "expected an object, got a list"),
        ("join-span", "{}", "num_layers is missing"),
        ("join-span", b"\xff\xfe\x00", "not JSON"),
        ("dispatch", '{"work": 1, "memory": 1, "nodes": [{"id": "\xff"}]}'.encode("latin-1"), "not JSON"),
        ("route", '{"rtt_ms": {"a": ' + "[" * 100_000, "rtt_ms[...]: expected an object, got a list"),
        ("join-span", '{"num_layers": NaN}', "NaN and Infinity are not numbers"),
        ("join-span", '{"num_layers": -Infinity}', "NaN and Infinity are not numbers"),
        ("join-span", '{"num_layers": 1e999}', "num_layers: number out of range"),
        ("join-span", '{"num_layers": 99999999999999999999999}', "num_layers: expected a whole number <= 1000"),
        ("join-span", '{"num_layers": 2.5}', "num_layers: expected a whole number, got a number"),
        ("join-span", '{"num_layers": true}', "num_layers: expected a whole number, got true or false"),
        ("join-span", '{"num_layers": 2, "layer_capacity_tokens": [1], "capacity": 1}', "1 numbers for 2 layers"),
        ("join-span", '{"num_layers": 1, "layer_capacity_tokens": [-1], "capacity": 1}', "expected a number >= 0"),
        ("join-span", '{"num_layers": 1, "layer_capacity_tokens": [1], "capacity": 0}', "at least one"),
        ("join-span", '{"num_layers": 1, "layer_capacity_tokens": [1], "capacity": 1, "x": 1}', "x is no known field"),
        ("balance", '{"num_layers": 1, "nodes": [{"id": "a"}]}', "layer_capacity is missing in nodes[0]"),
        ("balance", '{"num_layers": 1, "nodes": [{"id": "a", "z": 1}]}', "z in nodes[0] is no known field"),
        (
            "balance",
            '{"num_layers": 1, "nodes": [{"id": "a", "layer_capacity": 1, "compute": 0}]}',
            "nodes[0].compute: expected a number >= 1e-09",
        ),
        ("balance", '{"num_layers": 1, "nodes": [{"id": "a", "layer_capacity": 1}]}', "compute is missing in nodes[0]"),
        (
            "balance",
            '{"num_layers": 1, "nodes": [{"id": "", "layer_capacity": 1, "compute": 1}]}',
            "nodes[0].id: expected a string of length >= 1",
        ),
        (
            "route",
            '{"num_layers": 1, "nodes": [{"id": 1, "start": 0, "end": 1001, "layer_ms": 1}], "rtt_ms": {}}',
            "nodes[0].end: expected a whole number <= 1000",
        ),
        (
            "route",
            '{"num_layers": 1, "nodes": [{"id": 1, "start": 0, "end": 1, "layer_ms": [1, -1]}], "rtt_ms": {}}',
            "nodes[0].layer_ms[1]: expected a number >= 0",
        ),
        (
            "route",
            '{"num_layers": 1, "nodes": [{"id": 1, "start": 0, "end": 1, "layer_ms": 1, "z": 0}], "rtt_ms": {}}',
            "z in nodes[0] is no known field",
        ),
        (
            "place-all",
            '{"num_layers": 1, "nodes": [{"id": 1, "state": "joining", "layer_capacity": 1, "cost": {"ms": [1]}}]}',
            "widths is missing in nodes[0].cost",
        ),
        (
            "place-all",
            '{"num_layers": 1, "nodes": [{"id": 1, "state": "joining", "layer_capacity": 1,'
            ' "cost": {"widths": [4097], "ms": [1]}}]}',
            "nodes[0].cost.widths[0]: expected a whole number <= 4096",
        ),
        (
            "place-all",
            '{"num_layers": 1, "nodes": [{"id": 1, "state": "joining", "layer_capacity": 1,'
            ' "cost": {"widths": [2, 1], "ms": [1, 1]}}]}',
            "nodes[0].cost needs rising widths",
        ),
        (
            "rebalance",
            '{"layers": [{"kv": 1, "compute": 1, "z": 1}], "total_kv": 1, "total_compute": 1, "alpha": 1,'
            ' "threshold": 1}',
            "z in layers[0] is no known field",
        ),
        (
            "rebalance",
            '{"layers": [], "total_kv": 1, "total_compute": 1, "alpha": 1.1, "threshold": 1}',
            "alpha: expected a number <= 1",
        ),
        (
            "prefill",
            '{"length": 9, "stages": 1, "min_chunk": 1, "cost": {"base_ms": 1, "per_token_ms": 1}}',
            "per_token_context_ms is missing in cost",
        ),
        (
            "prefill",
            '{"length": 9, "stages": 1, "min_chunk": 1, "cost": {"base_ms": 1, "per_token_ms": 1,'
            ' "per_token_context_ms": 0, "within_chunk": 0.6}}',
            "cost.within_chunk: expected a number <= 0.5",
        ),
        ("partition", '{"layers": [{"memory": 1, "z": 1}], "devices": []}', "z in layers[0] is no known field"),
        (
            "partition",
            '{"layers": [], "devices": [{"memory": 1, "flops_per_s": 0}]}',
            "devices[0].flops_per_s: expected a number >= 1e-09",
        ),
        (
            "partition",
            '{"layers": [{"memory": 1, "flops": 1}], "devices": [{"memory": 1, "flops_per_s": 1, "layer_ms": 1}]}',
            "devices[0] needs either",
        ),
        (
            "dispatch",
            '{"work": 1, "memory": 1, "nodes": [{"id": "a", "capacity": 1, "available_memory": 1, "queued": [-1]}]}',
            "nodes[0].queued[0]: expected a number >= 0",
        ),
        (
            "dispatch",
            '{"work": 1, "memory": 1, "nodes": [{"id": "a", "capacity": 1, "available_memory": 1, "z": 1}]}',
            "z in nodes[0] is no known field",
        ),
        (
            "speculate",
            '{"stages": [{"layers": 1, "layer_ms": 1}], "link_ms": [1, 1], "drafter": {"acceptance": []}}',
            "cost is missing in stages[0]",
        ),
        (
            "speculate",
            '{"stages": [], "link_ms": [1], "drafter": {"acceptance": [], "hits": 0.5}}',
            "hits in drafter is no known field",
        ),
        ("partition", '{"layers": [], "devices": []}', "at least one layer"),
        ("partition", '{"layers": [{"memory": 1}], "devices": [{"memory": 1}]}', "devices[0] needs either"),
        (
            "partition",
            '{"layers": [{"memory": 1}], "devices": [{"memory": 1, "flops_per_s": 1, "layer_ms": 1}]}',
            "layers[0] needs its flops",
        ),
        (
            "partition",
            '{"layers": [{"memory": 1}], "devices": [], "method": "x"}',
            "method: 'x' is none of jupiter, hypsplit",
        ),
        ("dispatch", '{"work": 1, "memory": 1, "nodes": [{"id": 1.5}]}', "nodes[0].id: expected a whole number or a"),
        (
            "route",
            '{"num_layers": 1, "nodes": [], "rtt_ms": {}, "objective": "speed"}',
            "objective: 'speed' is none of latency, bottleneck",
        ),
        ("speculate", '{"stages": [], "link_ms": [1], "drafter": {"acceptance": [[0.5]]}}', "at least one hop"),
        (
            "speculate",
            '{"stages": [], "link_ms": [], "drafter": {"acceptance": []}, "current": "x"}',
            "current: 'x' is none of sequential, tree, pipedec, pipelined-tree",
        ),
        ("speculate", '{"stages": [], "link_ms": [1], "drafter": {"acceptance": [[1.5]]}}', "expected a number <= 1"),
        (
            "speculate",
            '{"stages": [{"layers": 1, "layer_ms": 1, "cost": {"widths": [1], "ms": [1]}}], "link_ms": [1, 1],'
            ' "drafter": {"acceptance": [[0.5]], "doubtful": 0.1}}',
            "wrong at 0.5 of all positions, and uncertain at 0.1 only",
        ),
    ],
)
def test_a_bad_request_is_one_sentence_about_it(command: str, text: str | bytes, message: str) -> None:
    code, got = plan(command, text)
    assert code == 2
    assert got["error"] == "usage"
    assert message in got["message"]
    assert "\n" not in got["message"]
    assert "Traceback" not in got["message"]


def test_an_endless_input_is_refused() -> None:
    code, got = plan("join-span", b" " * (MAX_BYTES + 10))
    assert code == 2
    assert "more than is read" in got["message"]
