"""The static draft tree that settles most tokens for its width (Ghidorah §III-C, ARCA), and the acceptance it rests on.

Owns which candidates of which rank to verify: what a width is worth on average, before a round's own guesses are known
(`plan.tree` then sends the likeliest of them). Knows neither tokens nor what a width costs (`forecast`). A width
counts the rows verified in a step: the drafted nodes and the root's own row, so width 1 is plain decoding, as in the
paper's Table I.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from swarm.errors import UsageError
from swarm.plan.tree import ROOT

AcceptanceTable = Sequence[Sequence[float]]
"""`[depth][rank]`: how likely the drafter's rank-th guess so deep below the root is the target's token, given that the
guesses above it were. Rows sum to 1 at most."""

RankPath = tuple[int, ...]
"""A node of a shape: the ranks taken from the first level down to it."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A tree of ranks, parents before children: node i is guess `ranks[i]` after node `parents[i]` (or ROOT)."""

    parents: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        return len(self.parents) + 1

    @property
    def depth(self) -> int:
        return max((len(path) for path in self.paths()), default=0)

    def paths(self) -> tuple[RankPath, ...]:
        """Each node's ranks from the first level down, `[n]`."""
        paths: list[RankPath] = []
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            paths.append((*(() if parent == ROOT else paths[parent]), rank))
        return tuple(paths)

    @classmethod
    def of_paths(cls, paths: Sequence[RankPath]) -> TreeShape:
        """The shape of these nodes, shorter paths first. Raises UsageError if a node's parent is not among them."""
        ordered = sorted(set(paths), key=lambda path: (len(path), path))
        number: dict[RankPath, int] = {(): ROOT} | {path: i for i, path in enumerate(ordered)}
        try:
            parents = tuple(number[path[:-1]] for path in ordered)
        except KeyError:
            raise UsageError("a tree holds a node only together with its parent") from None
        return cls(parents, tuple(path[-1] for path in ordered))


def check_acceptance(acceptance: AcceptanceTable) -> None:
    """Raises UsageError for a table that holds no probabilities."""
    for depth, row in enumerate(acceptance):
        if not all(0 <= p <= 1 for p in row) or math.fsum(row) > 1 + 1e-9:
            raise UsageError(f"acceptance at depth {depth} must be probabilities that sum to 1 at most")


def best_shape(acceptance: AcceptanceTable, width: int, max_depth: int | None = None) -> TreeShape:
    """The tree of at most `width` rows that settles most tokens, if guesses succeed independently as `acceptance` says.

    Best first: the node whose whole path is likeliest is added next. The expected tokens are a sum over nodes, and no
    node is likelier than its parent, so this is not only ARCA's estimate but the optimum. Guesses that never succeed
    are left out. On ties the shallower node, then the lower ranks.
    """
    if width < 1:
        raise UsageError(f"a step verifies at least one row, not {width}")
    return TreeShape.of_paths([path for path, _ in islice(best_nodes(acceptance, max_depth), width - 1)])


def best_nodes(acceptance: AcceptanceTable, max_depth: int | None = None) -> Iterator[tuple[RankPath, float]]:
    """The nodes of the best trees, each with its chance: the best tree of width w is its first w - 1 nodes."""
    check_acceptance(acceptance)
    rows = acceptance[:max_depth] if max_depth is not None else acceptance
    frontier: list[tuple[float, int, RankPath]] = [(-1.0, 0, ())]
    while frontier:
        likelihood, depth, path = heapq.heappop(frontier)
        if path:
            yield path, -likelihood
        if depth < len(rows):
            for rank, p in enumerate(rows[depth]):
                if likelihood * p < 0:
                    heapq.heappush(frontier, (likelihood * p, depth + 1, (*path, rank)))


def expected_tokens(shape: TreeShape, acceptance: AcceptanceTable) -> float:
    """Tokens a round is expected to settle: the target's own and one for every node whose path is right (>= 1)."""
    return 1.0 + math.fsum(
        math.prod(acceptance[depth][rank] for depth, rank in enumerate(path)) for path in shape.paths()
    )


def measured_tokens(shape: TreeShape, traces: Sequence[Sequence[int | None]]) -> float:
    """Tokens a round would have settled on `traces`, on average (ARCA's "real acceptance length").

    A trace is one round of a calibration run: at each depth the rank of the guess that was right, None where none was.
    """
    if not traces:
        raise UsageError("acceptance cannot be measured without a trace")
    held = set(shape.paths())
    return 1.0 + sum(_matched(held, trace) for trace in traces) / len(traces)


def _matched(held: set[RankPath], trace: Sequence[int | None]) -> int:
    path: RankPath = ()
    for rank in trace:
        if rank is None or (*path, rank) not in held:
            break
        path = (*path, rank)
    return len(path)


def local_search(
    shape: TreeShape, score: Callable[[TreeShape], float], ranks: Sequence[int], max_moves: int = 64
) -> TreeShape:
    """Moves one leaf at a time to where `score` is higher, until no move helps: ARCA's search around the estimate.

    For scores that no table of independent guesses can express, such as `measured_tokens`, where a guess's chance
    depends on what was guessed above it. `ranks[d]` guesses are offered at depth d. Width is kept. The best move is
    taken each time, on ties the first, at most `max_moves` times.
    """
    best, best_score = shape, score(shape)
    for _ in range(max_moves):
        paths = set(best.paths())
        moved = [TreeShape.of_paths([*(paths - {leaf}), new]) for leaf, new in _moves(paths, ranks)]
        found = max(((score(other), -i) for i, other in enumerate(moved)), default=(best_score, 0))
        if found[0] <= best_score * (1 + 1e-12):
            break
        best, best_score = moved[-found[1]], found[0]
    return best


def _moves(paths: set[RankPath], ranks: Sequence[int]) -> list[tuple[RankPath, RankPath]]:
    """(leaf to take away, node to add whose parent stays), in order."""
    inner = {path[:-1] for path in paths}
    leaves = sorted(paths - inner)
    additions = sorted(
        (*parent, rank)
        for parent in {(), *paths}
        if len(parent) < len(ranks)
        for rank in range(ranks[len(parent)])
        if (*parent, rank) not in paths
    )
    return [(leaf, new) for leaf in leaves for new in additions if new[: len(leaf)] != leaf]
