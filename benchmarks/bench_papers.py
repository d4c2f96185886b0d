"""The papers' comparisons in the simulator: runs the sweeps of `benchmarks/scenarios`, writes tables and plots.

    python benchmarks/bench_papers.py [NAME ...] [--out docs] [--jobs N]

The runs of a sweep are independent and use all cores. Writes `papers.md`, the plots beside
it, and all numbers as `papers/NAME.json`; a later call with some names keeps the others' numbers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tomllib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import papers_report

from swarm.planner.cli.simulate import runs, simulate_table

SCENARIOS = Path(__file__).parent / "scenarios"
NAMES = ("parallax", "hyperion", "jupiter", "churn-1000")


def run(chosen: dict[str, str], table: dict[str, Any]) -> dict[str, Any]:
    """One run: its settings and its result."""
    result = simulate_table(table)
    spans = [node["layers"] for node in result["nodes"].values()]
    busy = [node["busy"] for node in result["nodes"].values()]
    result["nodes"] = len(spans)
    result["busy_mean"] = math.fsum(busy) / len(busy)
    result["layers"] = spans if len(spans) <= 16 else []
    return {"chosen": chosen, "result": result}


def sweep(name: str, jobs: int) -> list[dict[str, Any]]:
    table = tomllib.loads((SCENARIOS / f"{name}.toml").read_text(encoding="utf-8"))
    combinations = list(runs(table))
    print(f"{name}: {len(combinations)} runs", file=sys.stderr)
    with ProcessPoolExecutor(jobs) as pool:
        return list(pool.map(run, *zip(*combinations, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], help="all of them if none is named")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "docs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    folder = options.out / "papers"
    folder.mkdir(parents=True, exist_ok=True)
    for name in options.names or NAMES:
        found = sweep(name, options.jobs)
        lines = ",\n".join(json.dumps(one, separators=(",", ":")) for one in found)
        (folder / f"{name}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    results = {n: json.loads(p.read_text("utf-8")) for n in NAMES if (p := folder / f"{n}.json").exists()}
    reported = tomllib.loads((SCENARIOS / "papers.toml").read_text(encoding="utf-8"))
    (options.out / "papers.md").write_text(papers_report.document(results, reported), encoding="utf-8")
    papers_report.plots(results, reported, folder)


if __name__ == "__main__":
    main()
