"""Phase 1 at scale: ms an allocation, and how much of it is proven.

    python benchmarks/bench_plan_allocation.py [--nodes 4 16 64 256 1024 4096] [--layers 64] [--pools 5] [--steps N]

Pools: `equal` nodes of 10 layers, `two kinds` (8, 20), `four kinds` (6, 10, 16, 32), and random memory, uniform over
2..20 and 4..40 layers. Everything is timed from PoolNodes to balanced spans, as the planner runs it. Columns:

    ms        of CPU time (what a free core takes: nothing here waits or runs in threads), best of twenty runs of each
              pool (five beyond 256 nodes), pools in turn: the median pool and the slowest
    steps     of work the default budget allows, unless --steps is given
    best      pools whose score is proven the best possible, of all pools
    k         values of k that replicas were found for, all pools together, and those not proven to need so many nodes
    gap       how much more the best allocation could score at most, worst pool
    proven    ms until s*(k) is proven for every k, same pools, up to --prove-up-to nodes
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence

from swarm.planner.placement.allocation import Allocation, Objective, allocate, default_steps
from swarm.planner.placement.water_filling import PoolNode
from swarm.planner.placement.work_budget import WorkBudget

KINDS: dict[str, Sequence[int]] = {
    "equal": [10],
    "two kinds": [8, 20],
    "four kinds": [6, 10, 16, 32],
    "random 2..20": range(2, 21),
    "random 4..40": range(4, 41),
}
PRICE = Objective(compute_ms=100.0, hop_ms=10.0)
RUNS, RUNS_OF_MANY = 20, 5
PUBLISHED = "Parallax reports 0.10 ms for 4 GPUs and 8.55 ms for 256"  # its paper, "Scheduling efficiency"


def sample_pool(kinds: Sequence[int], nodes: int, layers: int, seed: int) -> list[PoolNode]:
    """A pool that can hold the model at least once."""
    rng = random.Random(seed)
    while True:
        pool = [PoolNode(f"n{i:04}", rng.choice(kinds), 0.5 + rng.random()) for i in range(nodes)]
        if sum(node.layer_capacity for node in pool) >= layers or max(kinds) * nodes < layers:
            return pool


def timed(layers: int, pool: list[PoolNode], steps: int) -> tuple[float, Allocation]:
    """-> (ms, the plan)."""
    start = time.process_time()
    plan = allocate(layers, pool, PRICE, WorkBudget(steps))
    return (time.process_time() - start) * 1e3, plan


def report(kind: str, nodes: int, options: argparse.Namespace) -> None:
    if max(KINDS[kind]) * nodes < options.layers:
        print(f"{nodes:>6}  {kind:<13} cannot hold {options.layers} layers")
        return
    pools = [sample_pool(KINDS[kind], nodes, options.layers, seed) for seed in range(options.pools)]
    steps = options.steps or default_steps(nodes)
    rounds = [
        [timed(options.layers, pool, steps) for pool in pools] for _ in range(RUNS if nodes <= 256 else RUNS_OF_MANY)
    ]
    times = [min(ms for ms, _ in runs) for runs in zip(*rounds, strict=True)]
    plans = [plan for _, plan in rounds[0]]
    found = sum(len(plan.stages_by_k) for plan in plans)
    unproven = sum(1 for plan in plans for gap in plan.gap_by_k.values() if gap)
    proven = "-"
    if nodes <= options.prove_up_to:
        full = [timed(options.layers, pool, 10**7) for pool in pools]
        left = sum(1 for _, plan in full for gap in plan.gap_by_k.values() if gap)
        proven = f"{statistics.median(ms for ms, _ in full):.1f}" + (f" ({left} open)" if left else "")
    print(
        f"{nodes:>6}  {kind:<13} {statistics.median(times):>9.2f} {max(times):>9.2f} {steps:>8}"
        f" {sum(plan.exact for plan in plans):>4}/{len(plans)} {found:>6} {unproven:>6}"
        f" {max(plan.gap for plan in plans):>8.2%} {proven:>10}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 16, 64, 256, 1024, 4096])
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--pools", type=int, default=5)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--prove-up-to", type=int, default=256)
    options = parser.parse_args()
    header = ("nodes", "pool", "ms", "slowest", "steps", "best", "k", "open", "gap", "proven")
    print("{:>6}  {:<13} {:>9} {:>9} {:>8} {:>6} {:>6} {:>6} {:>8} {:>10}".format(*header))
    for nodes in options.nodes:
        for kind in KINDS:
            report(kind, nodes, options)
    print(PUBLISHED)


if __name__ == "__main__":
    main()
