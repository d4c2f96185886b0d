"""Hetero-core model parallelism (Ghidorah, sections III-B and III-C): whether two groups of cores with a static column
split beat one pool of threads, by measurement.

Other load makes single measurements of equal cores differ by tens of per cent, and the best of several candidates is
the luckiest one. So candidates are screened first; the best is then measured anew, beside the pool in pairs, and must
win so many of them that chance is ruled out (a sign test). Owns the choice and its reason. `cpu_library.split_columns`
does the split.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from swarm_kernels.calibration.cost_curve import StepTimer
from swarm_kernels.device.core_groups import CoreGroups, find_core_groups
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.cpu import cpu_library
from swarm_kernels.runtime.span import Span

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ColumnSplitPolicy:
    """How splits are measured against one pool of threads."""

    slow_permilles: tuple[int, ...] = (125, 250, 375, 500)  # candidates: more find a better split, and take longer
    widths: tuple[int, ...] = (1, 16)  # rows of the timed batches: a token and a tree, weighted the same
    max_time_ratio: float = 0.97  # of the pool's time: a split that wins by less is not worth pinned threads
    context_tokens: int = 256  # of the timed session: more give attention a larger part of the time
    screening_pairs: int = 3  # of each candidate
    pairs: int = 16  # of the best one: with 3 lost the measurement ends
    chance: float = 0.01  # how often a split that wins every other pair may be chosen
    recheck_s: float = 600.0  # `split_watch`: from one trial in live steps to the next


@dataclass(frozen=True, slots=True)
class ColumnSplit:
    """`groups` to split by, or None for one pool of threads; `reason` in words."""

    groups: CoreGroups | None
    reason: str


def wins_needed(pairs: int, chance: float) -> int:
    """The least number of `pairs` coins to show heads that happens with a probability of at most `chance`;
    `pairs` + 1 if none does."""
    tail, wins = 0.0, pairs + 1
    while wins > 0:
        tail += math.comb(pairs, wins - 1) / 2**pairs
        if tail > chance:
            break
        wins -= 1
    return wins


class SignTest:
    """Whether a split wins more pairs of measurements than equal times would, pair after pair."""

    def __init__(self, policy: ColumnSplitPolicy) -> None:
        self._policy = policy
        self._needed = wins_needed(policy.pairs, policy.chance)
        self._ratios: list[float] = []
        self._won = 0

    def add(self, ratio: float) -> bool | None:
        """The next pair: the split's time over the pool's. -> whether the split pays, None if that is open yet."""
        self._ratios.append(ratio)
        self._won += ratio <= self._policy.max_time_ratio
        left = self._policy.pairs - len(self._ratios)
        if self._won + left < self._needed:
            return False
        return None if left else True

    def describe(self, groups: CoreGroups) -> str:
        share = f"{groups.slow_permille / 10:.1f}% of the columns on the latter"
        return (
            f"cores {_listed(groups.fast)} and {_listed(groups.slow)} with {share} took "
            f"{statistics.median(self._ratios):.2f} of the time of one pool of threads and were faster in {self._won} "
            f"of {len(self._ratios)} pairs"
        )


def decide(groups: CoreGroups, ratios: Iterator[float], policy: ColumnSplitPolicy) -> ColumnSplit:
    """Whether to split by `groups`. `ratios`: of its time to the pool's, pair after pair of fresh measurements; no more
    of them are taken than it needs."""
    test = SignTest(policy)
    while (pays := test.add(next(ratios))) is None:
        """The next pair."""
    return ColumnSplit(groups if pays else None, f"{test.describe(groups)}: {'' if pays else 'not '}divided")


def _listed(cores: Sequence[int]) -> str:
    return ",".join(map(str, cores))


def choose_division(span: Span, threads: int, policy: ColumnSplitPolicy = ColumnSplitPolicy()) -> ColumnSplit:
    """Time this span on one pool of `threads` threads and split, in turns, and apply the faster.

    Raises OutOfMemory.
    """
    return _choose(span, threads, policy, policy.slow_permilles)


def confirm_division(
    span: Span, threads: int, slow_permille: int, policy: ColumnSplitPolicy = ColumnSplitPolicy()
) -> ColumnSplit:
    """As `choose_division`, of the one split that was chosen earlier: it is given up if it no longer pays."""
    return _choose(span, threads, policy, (slow_permille,))


def _choose(span: Span, threads: int, policy: ColumnSplitPolicy, slow_permilles: Sequence[int]) -> ColumnSplit:
    groups = find_core_groups()
    if span.device.type != "cpu" or not span.config.has_fast_path or cpu_library.library() is None:
        return ColumnSplit(None, "only the compiled kernels of a CPU can be divided")
    if groups is None:
        return ColumnSplit(None, "there is only one core")
    timer = StepTimer(span, policy.context_tokens, max(policy.widths))

    def timed(permille: int) -> list[float]:
        apply(replace(groups, slow_permille=permille) if permille else None, threads)
        times = []
        for width in policy.widths:
            timer.ms(width)  # warm-up: new threads, and cold caches
            times.append(timer.ms(width))
        return times

    split = find_split(groups, timed, policy, slow_permilles)
    apply(split.groups, threads)
    logger.info("%s", split.reason)
    return split


def find_split(
    groups: CoreGroups, timed: Callable[[int], list[float]], policy: ColumnSplitPolicy, slow_permilles: Sequence[int]
) -> ColumnSplit:
    """The best of the candidates if it beats one pool. `timed`: the milliseconds of a batch of each of the policy's
    widths now, by the thousandths of the slow group; 0 for one pool."""
    medians = dict.fromkeys(slow_permilles, math.inf)
    if len(slow_permilles) > 1:
        for permille in slow_permilles:
            pairs = _ratios(timed, permille)
            medians[permille] = statistics.median(next(pairs) for _ in range(policy.screening_pairs))
    best = min(slow_permilles, key=lambda permille: (medians[permille], permille))
    return decide(replace(groups, slow_permille=best), _ratios(timed, best), policy)


def _ratios(timed: Callable[[int], list[float]], permille: int) -> Iterator[float]:
    """The split's time over the pool's, pair after pair. Who comes first takes turns: a load that grows or wanes favors
    either as often."""
    while True:
        for order in ((0, permille), (permille, 0)):
            times = {share: timed(share) for share in order}
            widths = zip(times[permille], times[0], strict=True)
            yield math.exp(statistics.mean(math.log(split / pool) for split, pool in widths))


def apply(groups: CoreGroups | None, threads: int) -> None:
    """Split columns between `groups`, or run one pool of `threads`."""
    if groups is None:
        dispatch.set_threads(threads)
    else:
        cpu_library.split_columns(groups)
