"""Hetero-core model parallelism (Ghidorah, sections III-B and III-C): whether two groups of cores with a static column
split beat one pool of threads, by measurement.

Owns the choice and its reason. `cpu_library.split_columns` does the split.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from swarm_kernels.calibration.cost_curve import StepTimer
from swarm_kernels.device.core_groups import CoreGroups, find_core_groups
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.cpu import cpu_library
from swarm_kernels.runtime.span import Span

_ONE_POOL = 0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ColumnSplitPolicy:
    """How splits are measured against one pool of threads."""

    slow_permilles: tuple[int, ...] = (125, 250, 375, 500)  # candidates: more find a better split, and take longer
    widths: tuple[int, ...] = (1, 16)  # rows of the timed batches: a token and a tree, weighted the same
    max_time_ratio: float = 0.97  # of the pool's time: a split must win by more than a shared machine's noise
    context_tokens: int = 256  # of the timed session: more give attention a larger part of the time


@dataclass(frozen=True, slots=True)
class ColumnSplit:
    """`groups` to split by, or None for one pool of threads; `reason` in words."""

    groups: CoreGroups | None
    reason: str


def choose(groups: CoreGroups, times: Mapping[int, Sequence[float]], max_time_ratio: float) -> ColumnSplit:
    """The faster of one pool and two groups. `times`: the milliseconds of a batch of each width, by the thousandths of
    the slow group, 0 for one pool of threads. Widths are averaged by their ratio to the pool's."""
    pool = times[_ONE_POOL]
    ratios = {permille: _ratio(ms, pool) for permille, ms in times.items() if permille != _ONE_POOL}
    best = min(ratios, key=lambda permille: (ratios[permille], permille))
    named = (
        f"cores {_listed(groups.fast)} and {_listed(groups.slow)} with {best / 10:.1f}% of the columns on the latter"
    )
    took = f"take {ratios[best]:.2f} of the time of one pool of threads"
    if ratios[best] > max_time_ratio:
        return ColumnSplit(None, f"{named}, the best split, {took}: not divided")
    return ColumnSplit(replace(groups, slow_permille=best), f"{named} {took}: divided")


def _ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Geometric mean over the widths."""
    return math.exp(statistics.mean(math.log(a / b) for a, b in zip(times, others, strict=True)))


def _listed(cores: Sequence[int]) -> str:
    return ",".join(map(str, cores))


def choose_division(
    span: Span, threads: int, budget_s: float = 1.0, policy: ColumnSplitPolicy = ColumnSplitPolicy()
) -> ColumnSplit:
    """Time this span on one pool of `threads` threads and split, in turns, and apply the faster.

    Raises OutOfMemory.
    """
    groups = find_core_groups()
    if span.device.type != "cpu" or not span.config.has_fast_path or cpu_library.library() is None:
        return ColumnSplit(None, "only the compiled kernels of a CPU can be divided")
    if groups is None:
        return ColumnSplit(None, "there is only one core")
    timer = StepTimer(span, policy.context_tokens, max(policy.widths))
    candidates = (_ONE_POOL, *policy.slow_permilles)
    best = {permille: [math.inf] * len(policy.widths) for permille in candidates}
    deadline, rounds = time.perf_counter() + budget_s, 0
    while rounds < 3 or time.perf_counter() < deadline:
        for permille, times in best.items():
            apply(replace(groups, slow_permille=permille) if permille else None, threads)
            for i, width in enumerate(policy.widths):
                timer.ms(width)  # warm-up: new threads, and cold caches
                times[i] = min(times[i], timer.ms(width))
        rounds += 1
    split = choose(groups, best, policy.max_time_ratio)
    apply(split.groups, threads)
    logger.info("%s", split.reason)
    return split


def apply(groups: CoreGroups | None, threads: int) -> None:
    """Split columns between `groups`, or run one pool of `threads`."""
    if groups is None:
        dispatch.set_threads(threads)
    else:
        cpu_library.split_columns(groups)
