"""Paired timing, and random batches to time: what the kernel benchmarks share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from swarm_kernels.batch import BLOCK_SIZE, AttentionMetadata

SPIN_DOWN_S = 0.02  # OpenMP's threads go on spinning for milliseconds after an operator of torch's
BURST_S = 0.05
NONE = torch.zeros(0, dtype=torch.int64)

Timed = Callable[[], float]
"""Does its work once and returns the milliseconds it took."""


def wall(work: Callable[[], object]) -> Timed:
    """`work` timed by this process's clock."""

    def run() -> float:
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1e3

    return run


@dataclass(frozen=True)
class Pairs:
    """The least milliseconds of each burst, by work: burst i of one work ran beside burst i of all others."""

    ms: dict[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.ms[name])

    def ratio(self, name: str, other: str) -> float:
        """Median over the rounds of `name`'s time over `other`'s in the same round."""
        return statistics.median(a / b for a, b in zip(self.ms[name], self.ms[other], strict=True))


def measure(seconds: float, works: dict[str, Timed]) -> Pairs:
    """Run all works in turn, in short bursts, about `seconds` each: a busy machine slows all of them."""
    ms: dict[str, list[float]] = {name: [] for name in works}
    end = time.perf_counter() + seconds * len(works)
    rounds = 0
    while rounds < 3 or time.perf_counter() < end:
        for name, work in works.items():
            time.sleep(SPIN_DOWN_S)
            work()
            best = float("inf")
            burst = time.perf_counter() + BURST_S
            while best == float("inf") or time.perf_counter() < burst:
                best = min(best, work())
            ms[name].append(best)
        rounds += 1
    return Pairs(ms)


def read_bandwidth(seconds: float = 1.0) -> float:
    """GB/s at which torch sums 256 MB with its threads: what this machine's memory gives."""
    memory = torch.ones(64 << 20)
    return memory.nbytes / 1e6 / min(measure(seconds, {"sum": wall(memory.sum)}).ms["sum"])


def binary_tree(rows: int) -> torch.Tensor:
    """`[rows, rows]` bool: node i hangs on node (i - 1) // 2; each sees its ancestors and itself."""
    sees = torch.eye(rows, dtype=torch.bool)
    for i in range(1, rows):
        sees[i] |= sees[(i - 1) // 2]
    return sees


def tree_plan(context: int, rows: int) -> tuple[AttentionMetadata, int]:
    """A binary tree of `rows` slots on `context` committed tokens of one session, and the pages that takes."""
    dense, sparse = -(-context // BLOCK_SIZE), -(-rows // BLOCK_SIZE)
    bits = torch.zeros(rows, -(-rows // 64) * 64, dtype=torch.int64)
    bits[:, :rows] = binary_tree(rows)
    weights = torch.tensor([1 << i if i < 63 else -(1 << 63) for i in range(64)])
    plan = AttentionMetadata(
        positions=context + torch.arange(rows),
        sequence_index=torch.zeros(rows, dtype=torch.int32),
        context_lens=torch.full((rows,), context, dtype=torch.int32),
        slot_mapping=dense * BLOCK_SIZE + torch.arange(rows),
        block_tables=torch.arange(dense, dtype=torch.int32)[None],
        tree_block_tables=dense + torch.arange(sparse, dtype=torch.int32)[None],
        tree_mask=(bits.view(rows, -1, 64) * weights).sum(-1),
        copy_from=NONE,
        copy_to=NONE,
        tree_positions=torch.full((1, sparse * BLOCK_SIZE), context, dtype=torch.int32),
    )
    return plan, dense + sparse


def in_turn(items: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Calls the next of `items` each time, round and round: together they are larger than the processor's caches."""

    def forever() -> Iterator[Callable[[], object]]:
        while True:
            yield from items

    calls = forever()
    return lambda: next(calls)()


def table(header: str, rows: list[str]) -> str:
    """A Markdown table; `header` and rows are cells between bars."""
    columns = header.count("|") + 1
    return "\n".join([f"| {header} |", "|" + "---|" * columns, *(f"| {row} |" for row in rows)])
