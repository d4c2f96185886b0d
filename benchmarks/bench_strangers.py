"""A thousand nodes, 30% of them hostile, for ten minutes of virtual time: what clients get with and without trust.

    python benchmarks/bench_strangers.py --seeds 2 3 4 5

Prints a table of each seed and the median and worst of all; `--json FILE` keeps the numbers.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from swarm.planner.cli.simulate import changed, runs, simulate_table

SCENARIO = Path(__file__).parent / "scenarios" / "hostile-1000.toml"


def run(job: tuple[str, int, dict[str, Any]]) -> tuple[str, int, dict[str, Any]]:
    case, seed, table = job
    return case, seed, simulate_table(table)["strangers"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[2, 3, 4, 5])
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a field of the scenario")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    table = tomllib.loads(SCENARIO.read_text(encoding="utf-8"))
    changes = {name: json.loads(value) for name, _, value in (text.partition("=") for text in given.set)}
    jobs = [
        (chosen["case"], seed, changed(each, {**changes, "seed": seed}))
        for seed in given.seeds
        for chosen, each in runs(table)
    ]
    results: list[tuple[str, int, dict[str, Any]]] = []
    with ProcessPoolExecutor(given.processes) as pool:
        for case, seed, found in pool.map(run, jobs):
            results.append((case, seed, found))
            print(f"seed {seed}, {case}: {found}", flush=True)
    print(report(results))
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def report(results: Sequence[tuple[str, int, dict[str, Any]]]) -> str:
    """A table by case: the share of right answers and the throughput against the first case of the same seed."""
    first = results[0][0]
    base = {seed: found["right_tokens_per_s"] for case, seed, found in results if case == first}
    lines = [
        "| case | requests | right | wrong | failed or stuck | right, median (worst) | tokens/s, median (worst) |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in dict.fromkeys(case for case, _, _ in results):
        of = [(seed, found) for name, seed, found in results if name == case]
        total = {key: sum(found[key] for _, found in of) for key in ("ended", "right", "wrong", "failed", "stuck")}
        shares = [found["right_share"] for _, found in of]
        rates = [found["right_tokens_per_s"] / base[seed] for seed, found in of]
        lines.append(
            f"| {case} | {total['ended']} | {total['right']} | {total['wrong']} | {total['failed'] + total['stuck']}"
            f" | {median(shares):.1%} ({min(shares):.1%}) | {median(rates):.0%} ({min(rates):.0%}) |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
