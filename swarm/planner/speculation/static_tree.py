"""The static draft tree with most expected tokens for its width (ARCA, Ghidorah §III-C), from acceptance rates.

Owns which candidates of which rank to verify: the expected value of a width, before a step's own drafts are known
(`generation.draft_tree` then sends the likeliest of them). Does not know tokens or what a width costs (`forecast`). A
width counts the rows verified in a step: the draft nodes and the root's row, so width 1 is plain decoding, as in the
paper's Table I.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from swarm.errors import UsageError
from swarm.planner.generation.draft_tree import ROOT

AcceptanceTable = Sequence[Sequence[float]]
"""`[depth][rank]`: the acceptance rate of the drafter's rank-th candidate at this depth below the root, given that the
drafts above it were accepted. Rows sum to 1 at most."""

RankPath = tuple[int, ...]
"""A node of a shape: the ranks taken from the first level down to it."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A tree of ranks, parents before children: node i is candidate `ranks[i]` after node `parents[i]` (or ROOT)."""

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
    """The tree of at most `width` rows with most expected tokens, if drafts succeed independently as in `acceptance`.

    Best first: the node whose whole path is likeliest is added next. The expected tokens are a sum over nodes, and no
    node is likelier than its parent, so this is not only ARCA's estimate but the optimum. Candidates that are
    never accepted are left out. On ties the shallower node, then the lower ranks.
    """
    if width < 1:
        raise UsageError(f"a step verifies at least one row, not {width}")
    return TreeShape.of_paths([path for path, _ in islice(best_nodes(acceptance, max_depth), width - 1)])


def best_nodes(acceptance: AcceptanceTable, max_depth: int | None = None) -> Iterator[tuple[RankPath, float]]:
    """The nodes of the best trees with their probabilities: the best tree of width w is the first w - 1 of them."""
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
    """Expected tokens a step: the target's own and one for every node whose path is accepted (>= 1)."""
    return 1.0 + math.fsum(
        math.prod(acceptance[depth][rank] for depth, rank in enumerate(path)) for path in shape.paths()
    )
