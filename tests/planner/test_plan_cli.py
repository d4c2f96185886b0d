"""swarm-plan from outside: the documented examples, files and stdin, explanations, exit codes, and any input at all."""

from __future__ import annotations

import copy
import itertools
import json
import random
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from swarm.errors import SwarmError
from swarm.planner.cli.commands import COMMANDS
from swarm.planner.cli.main import app
from swarm.planner.cli.simulate import parse
from swarm.planner.schemas import MAX_BYTES

DOCS = Path(__file__).resolve().parents[2] / "docs" / "guide" / "planner.md"
TABLE = ["allocate", "balance", "route", "join-span", "rebalance", "partition", "prefill", "dispatch"]  # of the design


def documented() -> list[tuple[str, Any, Any]]:
    """(verb, request, answer) of every example in docs/guide/planner.md."""
    found = []
    for section in re.split(r"^## ", DOCS.read_text(encoding="utf-8"), flags=re.M)[1:]:
        verb = section.split("\n", 1)[0].strip()
        blocks = re.findall(r"```json\n(.*?)```", section, flags=re.S)
        found += [(verb, json.loads(a), json.loads(b)) for a, b in zip(blocks[::2], blocks[1::2], strict=True)]
    return found


EXAMPLES = documented()
VERB = {verb.name: verb for verb in COMMANDS}
RUNNER = CliRunner()


def plan(verb: str, request: Any, *flags: str) -> tuple[int, dict[str, Any]]:
    text = request if isinstance(request, str | bytes) else json.dumps(request)
    result = RUNNER.invoke(app, [verb, "-", *flags], input=text)
    return result.exit_code, json.loads(result.stdout)


def test_scenarios_that_the_docs_run_are_scenarios() -> None:
    root = DOCS.parents[2]
    commands = [
        line.split()
        for page in sorted((root / "docs").rglob("*.md"))
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith("swarm-plan simulate ") and "FILE" not in line
    ]
    assert len(commands) >= 2
    for _, verb, file, *flags in commands:
        assert verb == "simulate"
        assert flags in ([], ["--explain"]) or flags[::2] == ["--trace"]
        parse(tomllib.loads((root / file).read_text(encoding="utf-8")))


def test_every_verb_is_documented_with_an_example() -> None:
    assert {verb for verb, _, _ in EXAMPLES} == set(VERB)
    assert set(TABLE) <= set(VERB)


@pytest.mark.parametrize(
    ("verb", "request_", "answer"), EXAMPLES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_documented_examples(verb: str, request_: Any, answer: Any) -> None:
    code, got = plan(verb, request_)
    assert code == (2 if "error" in answer else 0)
    assert approximate(got) == approximate(answer)
    assert plan(verb, request_) == (code, got)


def approximate(value: Any) -> Any:
    """JSON with floats rounded to nine digits."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {key: approximate(item) for key, item in value.items()}
    return [approximate(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("verb", "request_", "answer"), EXAMPLES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_explanations_are_sentences_added_to_the_same_answer(verb: str, request_: Any, answer: Any) -> None:
    code, got = plan(verb, request_, "--explain")
    if code == 0:
        words = got.pop("explanation")
        assert words
        assert all(isinstance(sentence, str) and len(sentence) > 10 for sentence in words)
    assert approximate(got) == approximate(answer)


@pytest.mark.parametrize(
    ("verb", "text", "message"),
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
def test_a_bad_request_is_one_sentence_about_it(verb: str, text: str | bytes, message: str) -> None:
    code, got = plan(verb, text)
    assert code == 2
    assert got["error"] == "usage"
    assert message in got["message"]
    assert "\n" not in got["message"]
    assert "Traceback" not in got["message"]


def test_an_input_without_end_is_refused() -> None:
    code, got = plan("join-span", b" " * (MAX_BYTES + 10))
    assert code == 2
    assert "more than is read" in got["message"]


def test_ids_are_strings_or_numbers_and_the_lower_wins() -> None:
    def nodes(*ids: Any) -> dict[str, Any]:
        return {"work": 1, "memory": 0, "nodes": [{"id": i, "capacity": 1, "available_memory": 1} for i in ids]}

    assert plan("dispatch", nodes(10, 9, 100))[1]["node"] == 9
    assert plan("dispatch", nodes("10", "9", "100"))[1]["node"] == "10"
    assert "all strings or all whole numbers" in plan("dispatch", nodes(1, "a"))[1]["message"]
    assert "id 7 occurs 2 times" in plan("dispatch", nodes(7, 1, 7))[1]["message"]


def test_a_route_over_numbered_nodes() -> None:
    request = {
        "num_layers": 4,
        "nodes": [
            {"id": 10, "start": 0, "end": 2, "layer_ms": 1},
            {"id": 2, "start": 2, "end": 4, "layer_ms": [1, 2]},
            {"id": 3, "start": 2, "end": 4, "layer_ms": 1},
        ],
        "rtt_ms": {"10": {"2": 5, "3": 9, "77": 1, "9" * 5000: 1}, "3": {"2": 9}, "x": {}},
    }
    code, got = plan("route", request, "--explain")
    assert (code, got["cost_ms"]) == (0, 10.0)
    assert [hop["node"] for hop in got["chain"]] == [10, 2]
    assert "10 runs layers 0:2" in got["explanation"][0]


def test_a_time_budget_bounds_the_search_and_is_said() -> None:
    rng = random.Random(0)
    nodes = [{"id": f"n{i:03}", "layer_capacity": rng.randint(4, 40), "compute": rng.uniform(1, 5)} for i in range(120)]
    request = {"num_layers": 64, "alpha": 1, "compute_ms": 100, "hop_ms": 20, "nodes": nodes, "budget_ms": 0}
    code, got = plan("allocate", request, "--explain")
    assert code == 0
    assert not got["exact"]
    assert any("budget ran out" in sentence for sentence in got["explanation"])
    for replica in got["replicas"]:
        assert replica[0]["start"] == 0
        assert all(a["end"] == b["start"] for a, b in itertools.pairwise(replica))
        assert replica[-1]["end"] == 64


SCENARIO = """
name = "two machines"
seed = 3
workload = { requests = 3, rate_per_s = 1.0 }
[model]
name = "small"
layers = 8
hidden = 512
heads = 8
kv_heads = 8
head_dim = 64
intermediate = 1024
vocabulary = 1000
[[devices]]
name = "laptop"
count = 2
memory_gb = 4
bandwidth_gb_s = 50
tflops = 1
"""


def test_a_scenario_is_simulated_the_same_each_time(tmp_path: Path) -> None:
    traces = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    answers = [plan("simulate", SCENARIO, "--explain", "--trace", str(trace)) for trace in traces]
    assert answers[0] == answers[1]
    assert answers[0][0] == 0
    assert answers[0][1]["finished"] == 3
    assert answers[0][1]["explanation"][0].startswith("3 of 3 requests")
    assert traces[0].read_bytes() == traces[1].read_bytes()
    assert all(json.loads(line) for line in traces[0].read_text(encoding="utf-8").splitlines())
    assert plan("simulate", json.dumps(tomllib.loads(SCENARIO)))[1]["events"] == answers[0][1]["events"]


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("", "the input is empty"),
        ("name = ", "not TOML"),
        ("{]", "not JSON"),
        ("name = 1", "the scenario is not one: name: expected a string, got a whole number"),
        ('name = "x"', "the scenario is not one: model is missing"),
        (SCENARIO + "wheels = 4", "wheels"),
        (SCENARIO.replace("memory_gb = 4", "memory_gb = 0.05"), "hold"),
    ],
)
def test_what_is_no_scenario_is_refused(scenario: str, message: str) -> None:
    code, got = plan("simulate", scenario)
    assert code == 2
    assert message in got["message"]


def test_a_trace_that_cannot_be_written_is_refused() -> None:
    code, got = plan("simulate", SCENARIO, "--trace", "/no/such/folder/trace")
    assert (code, got["message"]) == (2, "cannot write /no/such/folder/trace: No such file or directory")


JUNK: list[Any] = [
    None, True, "", "x", "a", -1, 0, 0.5, 1, 7, 999, 10**30, 1e30, 1e-300, 1e300, [], {}, [1], [0, 0], {"a": 1}, [[]],
]  # fmt: skip


def mutate(value: Any, rng: random.Random) -> Any:
    """The same JSON with one part replaced, dropped, doubled or given to another key."""
    places: list[tuple[Any, Any]] = []

    def walk(part: Any) -> None:
        keys = list(part) if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ()
        for key in keys:
            places.append((part, key))
            walk(part[key])

    changed = copy.deepcopy(value)
    walk(changed)
    part, key = rng.choice(places)
    what = rng.random()
    if what < 0.75:
        part[key] = copy.deepcopy(rng.choice(JUNK))
    elif what < 0.85 and isinstance(part, list):
        part.append(copy.deepcopy(part[key]))
    elif what < 0.95:
        del part[key]
    else:
        other, name = rng.choice(places)
        part[key] = copy.deepcopy(other[name])
    return changed


def outcome(verb: str, request: Any) -> str:
    """ "answered", or the code of the error it was refused with."""
    try:
        answer = VERB[verb].run(json.dumps(request).encode())
    except SwarmError as error:
        return error.code if str(error) and "\n" not in str(error) else f"not one sentence: {error}"
    assert json.loads(json.dumps(answer.fields, allow_nan=False)) == answer.fields
    return "answered"


@pytest.mark.parametrize("verb", sorted(VERB))
def test_any_request_gets_an_answer_or_a_sentence(verb: str) -> None:
    """Requests that are nearly right: each is answered or refused, none ends in another exception."""
    rng = random.Random(verb)
    seeds = [request for name, request, _ in EXAMPLES if name == verb]
    outcomes: Counter[str] = Counter()
    for _ in range(1000):
        request = rng.choice(seeds)
        for _ in range(rng.randint(1, 3)):
            request = mutate(request, rng) if request else request
        outcomes[outcome(verb, request)] += 1
    assert set(outcomes) <= {"answered", "usage", "infeasible", "no_route"}
    assert outcomes["answered"] > 20
    assert outcomes["usage"] > 200


def command(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "swarm.planner.cli.main", *arguments],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_reads_files_and_stdin(tmp_path: Path) -> None:
    verb, request, answer = next(e for e in EXAMPLES if e[0] == "join-span")
    file = tmp_path / "request.json"
    file.write_text(json.dumps(request), encoding="utf-8")
    for run in (command(verb, str(file)), command(verb, "-", text=json.dumps(request))):
        assert (run.returncode, json.loads(run.stdout), run.stderr) == (0, answer, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense", "-"], "nonsense"),
        (["join-span"], "see swarm-plan --help"),
        (["join-span", "-", "--fast"], "--fast"),
        (["join-span", "no/such/file.json"], "cannot read no/such/file.json"),
        (["join-span", "."], "cannot read ."),
    ],
)
def test_a_wrong_command_line_is_one_sentence_too(arguments: list[str], message: str) -> None:
    run = command(*arguments)
    assert run.returncode == 2
    assert message in json.loads(run.stdout)["message"]
    assert "Traceback" not in run.stderr


def test_it_starts_without_what_it_does_not_need() -> None:
    heavy = ("torch", "hivemind", "transformers", "numpy", "asyncio")
    code = f"import swarm.planner.cli.main, sys; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
    overview = command().stdout
    assert all(verb.name in overview and verb.summary.split()[-1] in overview for verb in COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize("verb", [verb.name for verb in COMMANDS])
def test_help_names_every_field_of_a_request(verb: str) -> None:
    said = re.sub(r"\s+", " ", command(verb, "--help").stdout)
    request, _ = next((request, answer) for name, request, answer in EXAMPLES if name == verb)
    assert all(re.search(rf"\b{name}\b", said) for name in request)


@pytest.mark.parametrize(("old", "new"), [("join", "join-span"), ("place", "place-all")])
def test_old_verbs_still_work_and_are_hidden(old: str, new: str) -> None:
    request = next(request for name, request, _ in EXAMPLES if name == new)
    assert plan(old, request) == plan(new, request)
    shown = RUNNER.invoke(app, ["--help"]).stdout
    assert re.search(rf"^ *{new} ", shown, flags=re.M)
    assert not re.search(rf"^ *{old} ", shown, flags=re.M)


@pytest.mark.parametrize(("old", "new"), [("pipelined", "pipedec"), ("hybrid", "pipelined-tree")])
def test_old_strategies_are_still_taken_and_never_answered(old: str, new: str) -> None:
    request = next(request for name, request, _ in EXAMPLES if name == "speculate")
    code, answer = plan("speculate", {**request, "current": old})
    assert (code, answer) == plan("speculate", {**request, "current": new})
    assert {"pipedec", "pipelined-tree"} <= set(answer["forecasts"])
    assert not {"pipelined", "hybrid"} & set(answer["forecasts"])
