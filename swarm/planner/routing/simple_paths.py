"""Chains that visit no node twice (simple paths), which the dynamic program alone does not guarantee.

Owns the search on top of the relaxation. Works on the integer costs of `dag` only.

The layer DAG of Parallax lets a chain return to a node it has left. A node holds one span per session, so a chain for a
session must not; and stages of a pipeline that share a node do not overlap. Simple paths are found by branch and bound
over the relaxation: exact within its limits, and never worse than the best one met on the way.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from swarm.planner.routing.dag import INFINITE, Flags, Ints, LayerDag, relax_backward, relax_backward_capped
from swarm.planner.routing.policy import SEARCH
from swarm.planner.routing.traceback import Path, PathSegment, trace_back


def shortest_path(dag: LayerDag, entries: Ints, exits: Ints, closed: Flags | None = None) -> Path | None:
    """The best chain in the DAG without the rows that are `closed`, `[R]`; a node may come twice. None for no chain."""
    return trace_back(dag, relax_backward(dag, exits, closed), entries, exits)


def has_repeat(path: Path) -> bool:
    return len(set(path.owners)) < len(path.owners)


def best_simple_path(
    dag: LayerDag, entries: Ints, exits: Ints, cap: int = INFINITE, known: Path | None = None, first: Path | None = None
) -> Path | None:
    """The best chain that visits no owner twice; None if none was found.

    `cap`: most a hop may cost. `known`: such a chain found elsewhere. `first`: the result of `shortest_path`, if known.
    Best first: the cheapest chain of a subproblem bounds it from below, so the first one without a repeat is the best.
    A repeat splits the subproblem into ones that cannot contain it (`_branches`).
    """

    def solve(part: LayerDag) -> Path | None:
        if cap >= INFINITE:
            return shortest_path(part, entries, exits)
        return trace_back(part, relax_backward_capped(part, exits, cap), entries, exits, cap)

    tickets = itertools.count()
    root = first or solve(dag)
    heap = [(root.key, next(tickets), root, dag)] if root else []
    limit = SEARCH.max_subproblems if cap >= INFINITE else SEARCH.max_subproblems_capped
    for _ in range(max(2, min(limit, SEARCH.max_relaxations // dag.work))):
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


def _repeat(path: Path) -> tuple[PathSegment, PathSegment] | None:
    """The closest two segments of one owner."""
    last: dict[int, int] = {}
    closest: tuple[int, PathSegment, PathSegment] | None = None
    for i, owner in enumerate(path.owners):
        if owner in last and (closest is None or i - last[owner] < closest[0]):
            closest = (i - last[owner], path.visits[last[owner]], path.visits[i])
        last[owner] = i
    return closest and closest[1:]


def _branches(dag: LayerDag, one: PathSegment, two: PathSegment) -> Iterator[LayerDag]:
    """Subproblems that together contain every chain without repeats, and none of which contains these two segments.

    Two rows of one owner: one of them is removed. One row, left at b and entered again at c: a chain that visits it
    once does not run it from c on, or not before b, or runs it across both and so neither enters nor leaves it from b
    to c.
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
    yield LayerDag(dag.owner, dag.tau, dag.rho, may_enter, may_leave)


def _with_tau(dag: LayerDag, row: int, start: int, end: int) -> LayerDag:
    tau = dag.tau.copy()
    tau[start:end, row] = INFINITE
    return LayerDag(dag.owner, tau, dag.rho, dag.may_enter, dag.may_leave)


def _allowed(flags: Flags | None, dag: LayerDag) -> Flags:
    return np.ones((dag.num_layers + 1, dag.count), np.bool_) if flags is None else flags.copy()


def _merged(dag: LayerDag, path: Path, entries: Ints, exits: Ints, cap: int) -> Path | None:
    """`path` with every repeated row kept until its last use; None if that breaks the cap or rows differ."""
    visits: list[PathSegment] = []
    for visit in path.visits:
        again = next((i for i, v in enumerate(visits) if dag.owner[v.row] == dag.owner[visit.row]), None)
        if again is None:
            visits.append(visit)
            continue
        if visits[again].row != visit.row:
            return None
        visits[again:] = [PathSegment(visit.row, visits[again].start, visit.end)]
    return price(dag, visits, entries, exits, cap)


def price(dag: LayerDag, visits: Sequence[PathSegment], entries: Ints, exits: Ints, cap: int = INFINITE) -> Path | None:
    """The cost of given segments; None if one costs more than `cap`, or a link is missing."""
    runs = [int(dag.prefix_cost[v.end, v.row] - dag.prefix_cost[v.start, v.row]) for v in visits]
    links = [int(dag.rho[a.row, b.row]) for a, b in itertools.pairwise(visits)]
    cost = sum(runs) + sum(links) + int(entries[visits[0].row]) + int(exits[visits[-1].row])
    if max(runs) > cap or cost >= INFINITE:
        return None
    return Path(cost, tuple(int(dag.owner[v.row]) for v in visits), tuple(visits))
