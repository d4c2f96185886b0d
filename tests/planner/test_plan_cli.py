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
from plan_cli import COMMAND, DOCS, EXAMPLES, RUNNER, plan

from swarm.errors import SwarmError
from swarm.planner.cli.commands import COMMANDS
from swarm.planner.cli.main import app
from swarm.planner.cli.simulate import parse


def test_scenarios_that_the_docs_run_are_scenarios() -> None:
    root = DOCS.parents[2]
    commands = [
        line.split()
        for page in sorted((root / "docs").rglob("*.md"))
        for line in page.read_text(encoding="utf-8").splitlines()
        if line.startswith("swarm-plan simulate ") and "FILE" not in line
    ]
    assert len(commands) >= 2
    for _, command, file, *flags in commands:
        assert command == "simulate"
        assert flags in ([], ["--explain"]) or flags[::2] == ["--trace"]
        parse(tomllib.loads((root / file).read_text(encoding="utf-8")))


def test_every_command_is_documented_with_an_example() -> None:
    assert {command for command, _, _ in EXAMPLES} == set(COMMAND)
    assert {"allocate", "balance", "route", "join-span", "rebalance", "partition", "prefill", "dispatch"} <= set(
        COMMAND
    )


@pytest.mark.parametrize(
    ("command", "request_", "answer"), EXAMPLES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_documented_examples(command: str, request_: Any, answer: Any) -> None:
    code, got = plan(command, request_)
    assert code == (2 if "error" in answer else 0)
    assert approximate(got) == approximate(answer)
    assert plan(command, request_) == (code, got)


def approximate(value: Any) -> Any:
    """JSON with floats rounded to nine digits."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {key: approximate(item) for key, item in value.items()}
    return [approximate(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("command", "request_", "answer"), EXAMPLES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_explanations_are_sentences_added_to_the_same_result(command: str, request_: Any, answer: Any) -> None:
    code, got = plan(command, request_, "--explain")
    if code == 0:
        words = got.pop("explanation")
        assert words
        assert all(isinstance(sentence, str) and len(sentence) > 10 for sentence in words)
    assert approximate(got) == approximate(answer)


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


def test_a_time_budget_bounds_the_search_and_is_reported() -> None:
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
def test_an_invalid_scenario_is_refused(scenario: str, message: str) -> None:
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


def outcome(command: str, request: Any) -> str:
    """ "answered", or the code of the error it was refused with."""
    try:
        answer = COMMAND[command].run(json.dumps(request).encode())
    except SwarmError as error:
        return error.code if str(error) and "\n" not in str(error) else f"not one sentence: {error}"
    assert json.loads(json.dumps(answer.fields, allow_nan=False)) == answer.fields
    return "answered"


@pytest.mark.parametrize("command", sorted(COMMAND))
def test_any_request_gets_a_result_or_an_error_sentence(command: str) -> None:
    """Requests that are nearly right: each is answered or refused, none ends in another exception."""
    rng = random.Random(command)
    seeds = [request for name, request, _ in EXAMPLES if name == command]
    outcomes: Counter[str] = Counter()
    for _ in range(1000):
        request = rng.choice(seeds)
        for _ in range(rng.randint(1, 3)):
            request = mutate(request, rng) if request else request
        outcomes[outcome(command, request)] += 1
    assert set(outcomes) <= {"answered", "usage", "infeasible", "no_route"}
    assert outcomes["answered"] > 20
    assert outcomes["usage"] > 200


def run_process(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "swarm.planner.cli.main", *arguments],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_reads_files_and_stdin(tmp_path: Path) -> None:
    command, request, answer = next(e for e in EXAMPLES if e[0] == "join-span")
    file = tmp_path / "request.json"
    file.write_text(json.dumps(request), encoding="utf-8")
    for run in (run_process(command, str(file)), run_process(command, "-", text=json.dumps(request))):
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
    run = run_process(*arguments)
    assert run.returncode == 2
    assert message in json.loads(run.stdout)["message"]
    assert "Traceback" not in run.stderr


def test_it_starts_without_heavy_imports() -> None:
    heavy = ("torch", "hivemind", "transformers", "numpy", "asyncio")
    code = f"import swarm.planner.cli.main, sys; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
    overview = run_process().stdout
    assert all(command.name in overview and command.summary.split()[-1] in overview for command in COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_help_names_every_field_of_a_request(command: str) -> None:
    text = re.sub(r"\s+", " ", run_process(command, "--help").stdout)
    request, _ = next((request, answer) for name, request, answer in EXAMPLES if name == command)
    assert all(re.search(rf"\b{name}\b", text) for name in request)


@pytest.mark.parametrize(("old", "new"), [("join", "join-span"), ("place", "place-all")])
def test_old_commands_still_work_and_are_hidden(old: str, new: str) -> None:
    request = next(request for name, request, _ in EXAMPLES if name == new)
    assert plan(old, request) == plan(new, request)
    shown = RUNNER.invoke(app, ["--help"]).stdout
    assert re.search(rf"^ *{new} ", shown, flags=re.M)
    assert not re.search(rf"^ *{old} ", shown, flags=re.M)


@pytest.mark.parametrize(("old", "new"), [("pipelined", "pipedec"), ("hybrid", "pipelined-tree")])
def test_old_strategies_are_still_accepted_and_never_returned(old: str, new: str) -> None:
    request = next(request for name, request, _ in EXAMPLES if name == "speculate")
    code, answer = plan("speculate", {**request, "current": old})
    assert (code, answer) == plan("speculate", {**request, "current": new})
    assert {"pipedec", "pipelined-tree"} <= set(answer["forecasts"])
    assert not {"pipelined", "hybrid"} & set(answer["forecasts"])
