"""Two searches on top of the sweep: a shortlist of nodes worth sweeping, and chains that visit nobody twice.

Owns what the dynamic program alone cannot promise. Knows only the integers of `routing_dp`.

The layer DAG of Parallax lets a chain come back to a node it has left. A session is kept by peer, so a chain to be used
must not; and a pipeline whose stages share a node is no pipeline. Such chains are found by branch and bound over the
sweep: exact while its budget lasts, and never worse than the best chain met on the way.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from swarm.plan.routing_dp import NEVER, Dag, Flags, Ints, Path, Visit, sweep, sweep_capped, walk

BUDGET = 1 << 27  # relaxations spent on finding a chain that visits nobody twice
MOST_ROUNDS = 400
MOST_ROUNDS_CAPPED = 32  # where sweeps are dearer and repeats tempting
SHORTLIST = 32
WORTH_A_SHORTLIST = 1 << 20  # relaxations of one sweep


@dataclass(frozen=True, slots=True)
class Floors:
    """The cheapest chain conceivable through each row, in ascending order; `rows` in the same order, both `[R]`."""

    cost: Ints
    rows: Ints

    def among(self, rows: Ints) -> Floors:
        """The same for the part of the Dag between `rows`, ascending: fewer rows only make chains dearer."""
        kept = np.isin(self.rows, rows)
        return Floors(self.cost[kept], np.searchsorted(rows, self.rows[kept]))


def floors(dag: Dag) -> Floors:
    """Lower bounds from one sweep each way with every link replaced by its end's cheapest, O(L R)."""
    out, into = dag.nearest, dag.rho.min(axis=0, initial=NEVER)
    ahead, behind = np.empty_like(dag.tau), np.empty_like(dag.tau)
    ahead[-1], behind[0] = dag.tau[-1], dag.tau[0]
    for layer in range(1, dag.num_layers):
        _relax(behind[layer - 1], into, out, dag.tau[layer], behind[layer])
        _relax(ahead[-layer], out, into, dag.tau[-layer - 1], ahead[-layer - 1])
    through = np.where(dag.holds, ahead + behind - dag.tau, NEVER).min(axis=0)
    order = np.argsort(through, kind="stable")
    return Floors(through[order], order)


def _relax(cost: Ints, own: Ints, other: Ints, tau: Ints, result: Ints) -> None:
    switched = np.maximum(own + cost.min(), (other + cost).min())
    np.minimum(np.minimum(cost, switched) + tau, NEVER, out=result)


def cheapest(dag: Dag, entries: Ints, exits: Ints, bounds: Floors | None = None) -> Path | None:
    """The best chain in the DAG; a node may come twice. None if there is no chain.

    With `bounds`, a shortlist is swept first; what it costs rules out every row whose floor is higher.
    """
    size = SHORTLIST
    while bounds is not None and 2 * size < dag.count:
        rows = np.sort(bounds.rows[:size])
        part = dag.take(rows)
        if not part.covered():
            size *= 2
            continue
        table = sweep(part, exits[rows])
        found = (entries[rows] + table.go[0]).min()
        edges = entries.min() + exits.min()
        needed = int(np.searchsorted(bounds.cost, found - edges, side="right"))
        if needed <= size:
            path = walk(part, table, entries[rows])
            return None if path is None else _renamed(path, rows)
        size = needed
    return walk(dag, sweep(dag, exits), entries)


def _renamed(path: Path, rows: Ints) -> Path:
    return Path(path.cost, path.owners, tuple(Visit(int(rows[v.row]), v.start, v.end) for v in path.visits))


def work(dag: Dag) -> int:
    """Relaxations in one full sweep, at least 1."""
    return 1 + int((dag.holds.sum(axis=1, dtype=np.int64) ** 2).sum())


def best_simple(
    dag: Dag, entries: Ints, exits: Ints, cap: int = NEVER, known: Path | None = None, first: Path | None = None
) -> Path | None:
    """The best chain that visits no owner twice; None if none was found.

    `cap`: most a visit may cost. `known`: such a chain found elsewhere. `first`: the answer of `cheapest`, if at hand.
    Best first: the cheapest chain of a subproblem bounds it from below, so the first one without a repeat is the best.
    A repeat splits the subproblem into ones that cannot contain it (`_branches`).
    """

    def solve(part: Dag) -> Path | None:
        return walk(part, sweep(part, exits) if cap >= NEVER else sweep_capped(part, exits, cap), entries, cap)

    tickets = itertools.count()
    root = first or solve(dag)
    heap = [(root.key, next(tickets), root, dag)] if root else []
    most_rounds = MOST_ROUNDS if cap >= NEVER else MOST_ROUNDS_CAPPED
    for _ in range(max(2, min(most_rounds, BUDGET // work(dag)))):
        if not heap or (known and heap[0][0] >= known.key):
            return known
        _, _, path, part = heapq.heappop(heap)
        clash = _repeat(path)
        if clash is None:
            return path
        merged = _merged(part, path, entries, exits, cap)
        if merged and (known is None or merged.key < known.key):
            known = merged
        for child in _branches(part, *clash):
            if found := solve(child):
                heapq.heappush(heap, (found.key, next(tickets), found, child))
    rest = [path for _, _, path, _ in heap if _repeat(path) is None]
    return min([*rest, *([known] if known else [])], key=lambda p: p.key, default=None)


def repeats(path: Path) -> bool:
    return len(set(path.owners)) < len(path.owners)


def _repeat(path: Path) -> tuple[Visit, Visit] | None:
    """The closest two visits of one owner."""
    last: dict[int, int] = {}
    closest: tuple[int, Visit, Visit] | None = None
    for i, owner in enumerate(path.owners):
        if owner in last and (closest is None or i - last[owner] < closest[0]):
            closest = (i - last[owner], path.visits[last[owner]], path.visits[i])
        last[owner] = i
    return closest and closest[1:]


def _branches(dag: Dag, one: Visit, two: Visit) -> Iterator[Dag]:
    """Subproblems that together hold every chain without repeats, and none of which holds these two visits.

    Two rows of one owner: one of them goes. One row, left at b and entered again at c: a chain that visits it once does
    not run it from c on, or not before b, or runs it across both and so neither enters nor leaves it from b to c.
    """
    if one.row != two.row:
        for visit in (one, two):
            yield _with_tau(dag, visit.row, 0, dag.num_layers)
        return
    row, left, back = one.row, one.end, two.start
    yield _with_tau(dag, row, back, dag.num_layers)
    yield _with_tau(dag, row, 0, left)
    may_enter = _allowed(dag.may_enter, dag)
    may_leave = _allowed(dag.may_leave, dag)
    may_enter[left : back + 1, row] = False
    may_leave[left : back + 1, row] = False
    yield Dag(dag.owner, dag.tau, dag.rho, may_enter, may_leave)


def _with_tau(dag: Dag, row: int, start: int, end: int) -> Dag:
    tau = dag.tau.copy()
    tau[start:end, row] = NEVER
    return Dag(dag.owner, tau, dag.rho, dag.may_enter, dag.may_leave)


def _allowed(flags: Flags | None, dag: Dag) -> Flags:
    return np.ones((dag.num_layers + 1, dag.count), np.bool_) if flags is None else flags.copy()


def _merged(dag: Dag, path: Path, entries: Ints, exits: Ints, cap: int) -> Path | None:
    """`path` with every repeated row staying instead of coming back; None if that breaks the cap or rows differ."""
    visits: list[Visit] = []
    for visit in path.visits:
        again = next((i for i, v in enumerate(visits) if dag.owner[v.row] == dag.owner[visit.row]), None)
        if again is None:
            visits.append(visit)
            continue
        if visits[again].row != visit.row:
            return None
        visits[again:] = [Visit(visit.row, visits[again].start, visit.end)]
    return price(dag, visits, entries, exits, cap)


def price(dag: Dag, visits: Sequence[Visit], entries: Ints, exits: Ints, cap: int = NEVER) -> Path | None:
    """The cost of given visits; None if a visit costs more than `cap`, or a link is missing."""
    runs = [int(dag.spent[v.end, v.row] - dag.spent[v.start, v.row]) for v in visits]
    links = [int(dag.rho[a.row, b.row]) for a, b in itertools.pairwise(visits)]
    cost = sum(runs) + sum(links) + int(entries[visits[0].row]) + int(exits[visits[-1].row])
    if max(runs) > cap or cost >= NEVER:
        return None
    return Path(cost, tuple(int(dag.owner[v.row]) for v in visits), tuple(visits))
