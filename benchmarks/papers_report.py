"""Tables and plots of `bench_papers`: what the simulator gave beside what the papers report. Runs nothing itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

Run = Mapping[str, Any]
Results = Mapping[str, Sequence[Run]]

HEAD = """# The papers' comparisons, in the simulator

Written by `make bench-papers`; do not edit. Settings and seeds: `benchmarks/scenarios`. How to read these numbers,
what was assumed, and why some differ from the papers': [benchmarks/simulator.md](benchmarks/simulator.md).
"""


def document(results: Results, papers: Mapping[str, Any]) -> str:
    """papers.md."""
    parts = [HEAD]
    for name, section in (("parallax", parallax), ("hyperion", hyperion), ("jupiter", jupiter), ("churn-1000", churn)):
        if results.get(name):
            parts.append(section(results[name], papers))
    return "\n".join(parts)


def parallax(runs: Sequence[Run], papers: Mapping[str, Any]) -> str:
    others = [p for p in _values(runs, "policy") if p != "swarm"]
    by = {_key(run): run["result"] for run in runs}
    rows = []
    for other in others:
        pairs = [(by[(policy, *rest)], by[("swarm", *rest)]) for policy, *rest in by if policy == other]
        gains = [ours["throughput_rps"] / theirs["throughput_rps"] for theirs, ours in pairs]
        mean = [theirs["latency_s"]["mean"] / ours["latency_s"]["mean"] for theirs, ours in pairs]
        tail = [theirs["latency_s"]["p99"] / ours["latency_s"]["p99"] for theirs, ours in pairs]
        rows.append([other, *(f"{_mean(g):.2f} ({min(g):.2f} - {max(g):.2f})" for g in (gains, mean, tail))])
    paper = papers["parallax"]
    claim = [
        "paper, against HexGen",
        f"{paper['throughput_ratio_mean']} (up to {paper['throughput_ratio_most']})",
        f"{paper['latency_ratio_mean']} (up to {paper['latency_ratio_most']})",
        "",
    ]
    ratios = _table(["baseline", "throughput x", "mean latency x", "p99 latency x"], [*rows, claim])
    names = ["policy", "weights", "trace", "requests/s offered", "served/s", "tokens/s", "mean s", "p99 s", "busy"]
    detail = []
    for run in runs:
        chosen, result = run["chosen"], run["result"]
        weights = {"2.0": "BF16", "1.0": "FP8"}[chosen["model.weight_bytes"]]
        numbers = (result["throughput_rps"], result["tokens_per_s"], *_latency(result), result["busy_mean"])
        detail.append([chosen["policy"], weights, chosen["trace"], chosen["workload.rate_per_s"], *_numbers(numbers)])
    return f"""
## Parallax: 5 RTX 5090, 2 RTX 4090, Qwen3-32B

How many times better our planner is, mean over both traces, both number formats and the rates 4 to 32 (least - most):

{ratios}

![throughput and latency](papers/parallax.svg)

{_table(names, detail)}
"""


def hyperion(runs: Sequence[Run], papers: Mapping[str, Any]) -> str:
    by = {_key(run): run["result"] for run in runs}
    most = max(_values(runs, "workload.requests"), key=int)
    rows = []
    for model in _values(runs, "model"):
        for reading in _values(runs, "serving.sessions_per_node"):
            for mbps in _values(runs, "network.bandwidth_mbps"):
                rest = (model, reading, mbps, most)
                ours = by[("hyperion", *rest)]["latency_s"]["mean"]
                cells = [model, _reading(reading), mbps, f"{by['hyperion', *rest[:-1], '1']['latency_s']['mean']:.1f}"]
                cells += [str(papers["hyperion"]["one_task_s"][model][mbps]), f"{ours:.1f}"]
                for other in _values(runs, "policy")[1:]:
                    theirs = by[(other, *rest)]["latency_s"]["mean"]
                    cells.append(f"{theirs:.1f} ({100 * (1 - ours / theirs):+.0f}%)")
                rows.append(cells)
    head = ["model", "queueing", "Mbps", "one task, s", "paper, one task", f"hyperion, {most} tasks"]
    paper = papers["hyperion"]
    layers = []
    for model in _values(runs, "model"):
        for policy in _values(runs, "policy"):
            spans = next(
                r["result"]["layers"] for r in runs if (r["chosen"]["policy"], r["chosen"]["model"]) == (policy, model)
            )
            counts = [_length(span) for span in dict.fromkeys(spans)]
            reported = paper["layers"][model] if policy == "hyperion" else ""
            layers.append([model, policy, "/".join(map(str, counts)), "/".join(map(str, reported))])
    return f"""
## Hyperion: three tiers of Jetsons

Mean latency of a task, s; in brackets how much lower Hyperion's is. The paper: up to
{100 * paper["lower_than_gpipe"]:.1f}% lower than GPipe and {100 * paper["lower_than_heft"]:.1f}% lower than HEFT.

{_table([*head, *_values(runs, "policy")[1:]], rows)}

Layers on Orin Nano / Orin NX / AGX Orin:

{_table(["model", "policy", "here", "paper"], layers)}

![latency against tasks](papers/hyperion.svg)
"""


def jupiter(runs: Sequence[Run], papers: Mapping[str, Any]) -> str:
    by = {_key(run): run["result"]["latency_s"]["mean"] for run in runs}
    rows = []
    for environment in _values(runs, "environment"):
        for model in _values(runs, "model"):
            for mbps in _values(runs, "network.bandwidth_mbps"):
                claims = papers["jupiter"][environment][model]
                cells = [environment, model, mbps]
                for policy in _values(runs, "policy"):
                    cells.append(f"{by[(policy, model, mbps, environment)]:.1f}")
                ratio = by["edgeshard", model, mbps, environment] / by["jupiter", model, mbps, environment]
                paper = claims["edgeshard"][mbps] / claims["jupiter"][mbps]
                cells += [str(claims[system][mbps]) for system in ("edgeshard", "jupiter")]
                cells += [f"{ratio:.2f}", f"{paper:.2f}"]
                rows.append(cells)
    head = ["env.", "model", "Mbps", *_values(runs, "policy")]
    return f"""
## Jupiter: environments A and B

Seconds from a request to the end of its answer, and how many times faster Jupiter is than EdgeShard.

{_table([*head, "paper: edgeshard", "paper: jupiter", "ratio", "paper: ratio"], rows)}

![latency](papers/jupiter.svg)
"""


def churn(runs: Sequence[Run], papers: Mapping[str, Any]) -> str:
    head = ["case", "left", "joined", "moved", "requests", "finished", "repaired", "repairs", "uncovered s"]
    rows = []
    for run in runs:
        result = run["result"]
        safe = result["covered"]
        cells = [run["chosen"]["case"], result["left"], result["joined"], result["moved"], result["requests"]]
        cells += [f"{100 * result['finished_share']:.1f}%", result["repaired_requests"], result["repairs"]]
        cells += [f"{result['uncovered_s']:.0f}", f"{safe['requests']}: {100 * safe['share']:.1f}%"]
        cells += [f"{result['latency_s']['p50']:.1f}", f"{result['latency_s']['p99']:.1f}"]
        rows.append([str(cell) for cell in cells])
    head += ["while every layer had a node: finished", "p50 s", "p99 s"]
    return f"""
## A thousand nodes, 30% of them leaving every minute for ten minutes

{_table(head, rows)}
"""


# Plots ---------------------------------------------------------------------------------------------------------------


def plots(results: Results, papers: Mapping[str, Any], folder: Path) -> None:
    """One SVG a paper; the same bytes for the same numbers."""
    mpl.use("svg")
    plt.rcParams.update(
        {"svg.hashsalt": "papers", "svg.fonttype": "none", "font.size": 8, "axes.grid": True, "grid.alpha": 0.3}
    )
    for name, draw in (("parallax", _plot_parallax), ("hyperion", _plot_hyperion), ("jupiter", _plot_jupiter)):
        if results.get(name):
            draw(results[name], papers)
            plt.tight_layout()
            plt.savefig(folder / f"{name}.svg", metadata={"Date": None})
            plt.close()


def _plot_parallax(runs: Sequence[Run], papers: Mapping[str, Any]) -> None:
    _, grid = plt.subplots(2, 4, figsize=(12, 5), sharex=True)
    cases = [(w, t) for w in _values(runs, "model.weight_bytes") for t in _values(runs, "trace")]
    for column, (weights, trace) in enumerate(cases):
        some = [r for r in runs if (r["chosen"]["model.weight_bytes"], r["chosen"]["trace"]) == (weights, trace)]
        grid[0][column].set_title(f"{'BF16' if weights == '2.0' else 'FP8'}, {trace}")
        _lines(grid[0][column], some, "workload.rate_per_s", lambda r: r["throughput_rps"])
        _lines(grid[1][column], some, "workload.rate_per_s", lambda r: r["latency_s"]["mean"])
        grid[1][column].set_xlabel("requests/s offered")
    grid[0][0].set_ylabel("requests/s served")
    grid[1][0].set_ylabel("mean latency, s")
    grid[0][0].legend(fontsize=6)


def _plot_hyperion(runs: Sequence[Run], papers: Mapping[str, Any]) -> None:
    readings = _values(runs, "serving.sessions_per_node")
    _, grid = plt.subplots(len(readings), 4, figsize=(12, 5), sharex=True, squeeze=False)
    cases = [(m, b) for m in _values(runs, "model") for b in _values(runs, "network.bandwidth_mbps")]
    for row, reading in enumerate(readings):
        for column, (model, mbps) in enumerate(cases):
            target = (model, mbps, reading)
            some = [
                r for r in runs if _pick(r, "model", "network.bandwidth_mbps", "serving.sessions_per_node") == target
            ]
            _lines(grid[row][column], some, "workload.requests", lambda r: r["latency_s"]["mean"])
            grid[row][column].set_title(f"{model}, {mbps} Mbps, {_reading(reading)}", fontsize=7)
            grid[-1][column].set_xlabel("tasks")
        grid[row][0].set_ylabel("mean latency, s")
    grid[0][0].legend(fontsize=6)


def _plot_jupiter(runs: Sequence[Run], papers: Mapping[str, Any]) -> None:
    cases = [(e, m) for e in _values(runs, "environment") for m in _values(runs, "model")]
    _, axes = plt.subplots(1, len(cases), figsize=(12, 3), squeeze=False)
    for axis, (environment, model) in zip(axes[0], cases, strict=True):
        some = [r for r in runs if _pick(r, "environment", "model") == (environment, model)]
        _lines(axis, some, "network.bandwidth_mbps", lambda r: r["latency_s"]["mean"])
        for system, style in (("edgeshard", "kx"), ("jupiter", "k+")):
            claims = papers["jupiter"][environment][model][system]
            axis.plot([int(b) for b in claims], list(claims.values()), style, label=f"paper: {system}")
        axis.set(title=f"{environment}, {model}", xlabel="Mbps", xscale="log")
    axes[0][0].set_ylabel("latency, s")
    axes[0][0].legend(fontsize=5)


def _lines(axis: Axes, runs: Sequence[Run], along: str, value: Callable[[Mapping[str, Any]], float]) -> None:
    for policy in _values(runs, "policy"):
        points = sorted(
            (float(r["chosen"][along]), value(r["result"])) for r in runs if r["chosen"]["policy"] == policy
        )
        axis.plot([x for x, _ in points], [y for _, y in points], marker=".", label=policy)


# Small parts ---------------------------------------------------------------------------------------------------------


def _values(runs: Iterable[Run], name: str) -> list[str]:
    """In the order of the sweep."""
    return list(dict.fromkeys(run["chosen"][name] for run in runs))


def _key(run: Run) -> tuple[str, ...]:
    return tuple(run["chosen"].values())


def _pick(run: Run, *names: str) -> tuple[str, ...]:
    return tuple(run["chosen"][name] for name in names)


def _reading(sessions_per_node: str) -> str:
    return "whole tasks" if sessions_per_node == "1" else "steps of all tasks"


def _latency(result: Mapping[str, Any]) -> tuple[float, float]:
    return result["latency_s"]["mean"], result["latency_s"]["p99"]


def _length(span: str) -> int:
    start, end = span.split(":")
    return int(end) - int(start)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _numbers(values: Iterable[float]) -> list[str]:
    return [f"{value:.3g}" for value in values]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
