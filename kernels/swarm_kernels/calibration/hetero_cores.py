"""Hetero-core model parallelism (Ghidorah, sections III-B and III-C): whether two units of cores that divide each layer
beforehand beat one pool of threads, found by measuring both together.

Owns the choice and its reason. The division itself is `native.divide`'s.
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

SHARES = (125, 250, 375, 500)
"""Thousandths of the columns the narrow unit is tried with."""

WIDTHS = (1, 16)
"""Rows of the batches that are measured: a token and a tree, which count alike."""

MARGIN = 0.97
"""Of the pool's time, what units must not exceed: less is within the noise of a shared machine."""

_CONTEXT = 256
_ONE_POOL = 0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ColumnSplit:
    """`units` to divide by, or None for one pool of threads; `reason` in words."""

    groups: CoreGroups | None
    reason: str


def choose(units: CoreGroups, times: Mapping[int, Sequence[float]]) -> ColumnSplit:
    """The quicker of one pool and two units. `times`: by the narrow unit's thousandths, 0 for one pool of threads, the
    milliseconds of a batch of each width. Widths count by their ratio to the pool's."""
    pool = times[_ONE_POOL]
    ratios = {share: _ratio(ms, pool) for share, ms in times.items() if share != _ONE_POOL}
    best = min(ratios, key=lambda share: (ratios[share], share))
    named = f"cores {_listed(units.fast)} and {_listed(units.slow)} with {best / 10:.1f}% of the columns on the latter"
    took = f"take {ratios[best]:.2f} of the time of one pool of threads"
    if ratios[best] > MARGIN:
        return ColumnSplit(None, f"{named}, the best division, {took}: not divided")
    return ColumnSplit(replace(units, slow_permille=best), f"{named} {took}: divided")


def _ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Geometric mean over the widths."""
    return math.exp(statistics.mean(math.log(a / b) for a, b in zip(times, others, strict=True)))


def _listed(cores: Sequence[int]) -> str:
    return ",".join(map(str, cores))


def choose_division(span: Span, threads: int, budget_s: float = 1.0) -> ColumnSplit:
    """Measure this span with `threads` threads in one pool and divided, in turns, and leave the quicker set.

    Raises OutOfMemory.
    """
    units = find_core_groups()
    if span.device.type != "cpu" or not span.config.has_fast_path or cpu_library.library() is None:
        return ColumnSplit(None, "only the compiled kernels of a CPU can be divided")
    if units is None:
        return ColumnSplit(None, "there is but one core")
    stopwatch = StepTimer(span, _CONTEXT, max(WIDTHS))
    best: dict[int, list[float]] = {share: [math.inf] * len(WIDTHS) for share in (_ONE_POOL, *SHARES)}
    deadline, rounds = time.perf_counter() + budget_s, 0
    while rounds < 3 or time.perf_counter() < deadline:
        for share, times in best.items():
            apply(replace(units, slow_permille=share) if share else None, threads)
            for i, width in enumerate(WIDTHS):
                stopwatch.ms(width)  # threads are new, and caches another unit's
                times[i] = min(times[i], stopwatch.ms(width))
        rounds += 1
    division = choose(units, best)
    apply(division.groups, threads)
    logger.info("%s", division.reason)
    return division


def apply(units: CoreGroups | None, threads: int) -> None:
    """Divide by `units`, or run one pool of `threads`."""
    if units is None:
        dispatch.set_threads(threads)
    else:
        cpu_library.split_columns(units)
