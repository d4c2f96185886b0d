"""The layer DAG of Parallax phase 2 (§3.3) as integer arrays, and the dynamic program over it.

Owns the sweep, the exact order of chains (cost, then hops, then ids) and how the best chain is read back. Knows neither
what a peer is nor where τ and ρ come from; the constraint that a chain visits nobody twice is `routing_search`'s.

A cost is one int64 that holds, from the top, layers whose keys and values must be rebuilt (repair only), time in ticks,
and the number of hops, so the order of chains is the order of integers: ties are exact, and the same on every machine.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

HOP = 1
TICK = 1 << 10  # up to 1,023 hops
LAYER = 1 << 50  # up to 2^40 ticks: 18 minutes in nanoseconds
NEVER = 1 << 61  # two of them still add without overflow
MAX_LAYERS = 1000
MOST_KEPT = 1 << 17  # links of one boundary that are kept from one sweep to the next


@dataclass(frozen=True, slots=True)
class Visit:
    """Layers `[start, end)` run by row `row` of a Dag."""

    row: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Path:
    """Visits that cover every layer in order, the owners in visiting order, and the cost."""

    cost: int
    owners: tuple[int, ...]
    visits: tuple[Visit, ...]

    @property
    def key(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """The order of chains: cost, then lower owners hop by hop, then longer first hops."""
        return self.cost, self.owners, tuple(-v.end for v in self.visits)


def _nobody() -> Ints:
    return np.zeros(0, np.int64)


@dataclass(slots=True)
class Stage:
    """Layers `[lo, hi)` that the same rows hold; n rows, m rows in the stage after.

    `tau`: `[hi - lo, n]`. `rest`: cost from a layer to the end of the stage, `[hi - lo, n]`. `stay_from`, `stay_to`:
    places in this stage and in the next of the rows that hold both.
    """

    lo: int
    hi: int
    rows: Ints
    tau: Ints
    rest: Ints
    stay_from: Ints = field(default_factory=_nobody)
    stay_to: Ints = field(default_factory=_nobody)
    inside: Ints | None = None  # kept by Dag.inside
    onward: Ints | None = None  # kept by Dag.onward


class Dag:
    """R rows (a node, or one way of using it) over L layers, ready to be swept.

    `owner`: rank of the row's node among all ids, `[R]`; ties go to the lower. `tau`: cost of a layer, NEVER where the
    row does not hold it, `[L, R]`. `rho`: cost of the link and of one more hop from row to column, NEVER where there is
    none and on the diagonal, `[R, R]`. `may_enter`, `may_leave`: where switching to or from a row is allowed,
    `[L + 1, R]` by boundary, None for everywhere.
    """

    def __init__(
        self, owner: Ints, tau: Ints, rho: Ints, may_enter: Flags | None = None, may_leave: Flags | None = None
    ) -> None:
        self.owner, self.tau, self.rho = owner, tau, rho
        self.may_enter, self.may_leave = may_enter, may_leave
        self.holds: Flags = tau < NEVER
        self.num_layers, self.count = tau.shape
        self.spent = np.zeros((self.num_layers + 1, self.count), np.int64)  # cost of the held layers before a boundary
        np.cumsum(np.where(self.holds, tau, 0), axis=0, out=self.spent[1:])
        self.work = 1 + int((self.holds.sum(axis=1, dtype=np.int64) ** 2).sum())  # relaxations of a sweep, at least 1
        self.stages = self._cut()
        # where the blocks of the stages, one after the other, belong in a flattened [L + 1, R]
        self.places = np.flatnonzero(self.holds)

    def _cut(self) -> list[Stage]:
        changes = np.flatnonzero((self.holds[1:] != self.holds[:-1]).any(axis=1)) + 1
        cuts = [0, *changes.tolist(), self.num_layers]
        stages: list[Stage] = []
        for lo, hi in itertools.pairwise(cuts):
            rows = np.flatnonzero(self.holds[lo])
            tau = self.tau[lo:hi].take(rows, axis=1)
            stages.append(Stage(lo, hi, rows, tau, tau[::-1].cumsum(axis=0)[::-1]))
        for stage, after in itertools.pairwise(stages):
            both = self.holds[stage.lo] & self.holds[after.lo]
            stage.stay_from = np.flatnonzero(both[stage.rows])
            stage.stay_to = np.flatnonzero(both[after.rows])
        return stages

    def covered(self) -> bool:
        return all(stage.rows.size for stage in self.stages)

    def take(self, rows: Ints) -> Dag:
        """The part of this Dag between the rows `rows`, ascending."""
        enter = None if self.may_enter is None else self.may_enter[:, rows]
        leave = None if self.may_leave is None else self.may_leave[:, rows]
        return Dag(self.owner[rows], self.tau.take(rows, axis=1), self.rho[rows[:, None], rows], enter, leave)

    @cached_property
    def nearest(self) -> Ints:
        """The cheapest link out of each row, `[R]`."""
        cheapest: Ints = self.rho.min(axis=1, initial=NEVER)
        return cheapest

    def inside(self, stage: Stage) -> Ints:
        """rho between the rows of a stage, `[n, n]`."""
        if stage.inside is None:
            inside = _part(self.rho, stage.rows, stage.rows)
            if inside.size > MOST_KEPT:
                return inside
            stage.inside = inside
        return stage.inside

    def onward(self, stage: Stage, after: Stage) -> Ints:
        """rho from the rows of a stage to those of the next, `[n, m]`."""
        if stage.onward is None:
            onward = _part(self.rho, stage.rows, after.rows)
            if onward.size > MOST_KEPT:
                return onward
            stage.onward = onward
        return stage.onward


def _part(rho: Ints, rows: Ints, columns: Ints) -> Ints:
    """The links from `rows` to `columns`; a view where both are consecutive."""
    if len(rows) == rows[-1] - rows[0] + 1 and len(columns) == columns[-1] - columns[0] + 1:
        return rho[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    part: Ints = rho[rows[:, None], columns]
    return part


@dataclass(frozen=True, slots=True)
class Table:
    """`go[b, r]`: least cost from boundary b on if row r runs layer b. `leave[b, r]`: if it hands over (or ends) at b.

    `leave` is NEVER where handing over is known not to pay.
    """

    go: Ints
    leave: Ints


def sweep(dag: Dag, exits: Ints) -> Table:
    """One backward pass, O(L R²) at worst; `exits`: cost after the last layer, `[R]`.

    A stage is filled in at once on the assumption that nobody switches inside it: the DP over stages. That is exact
    unless the cheapest link out of some row leads to something better than staying; from the last boundary where it
    might, the sweep goes on layer by layer.
    """
    table = Table(np.full((dag.num_layers + 1, dag.count), NEVER), np.full((dag.num_layers + 1, dag.count), NEVER))
    if not dag.covered():
        return table
    blocks: list[Ints] = []
    leaves: list[Ints] = []
    after: Stage | None = None
    for stage in reversed(dag.stages):
        # leave[i] belongs to boundary lo + 1 + i, [hi - lo, n]
        leave = np.full(stage.tau.shape, NEVER)
        base = leave[-1]
        if after is None:
            base[:] = exits[stage.rows]
        else:
            base = _between(dag, stage, after, blocks[-1][0], base)
        block = stage.rest + base
        np.minimum(block, NEVER, out=block)
        if len(block) > 1 and (last := _last_doubt(dag, stage, block)):
            _layer_by_layer(dag, stage, block, leave, last)
        blocks.append(block)
        leaves.append(leave)
        after = stage
    table.go.ravel()[dag.places] = np.concatenate([block.ravel() for block in reversed(blocks)])
    table.leave.ravel()[dag.places + dag.count] = np.concatenate([leave.ravel() for leave in reversed(leaves)])
    return table


def _between(dag: Dag, stage: Stage, after: Stage, entry: Ints, leave: Ints) -> Ints:
    """Fill `leave` at the end of `stage`; the better of leaving and, where the next stage has the row too, staying.

    `entry`: least cost of the next stage by its rows.
    """
    enterable = entry if dag.may_enter is None else np.where(dag.may_enter[stage.hi, after.rows], entry, NEVER)
    np.minimum.reduce(dag.onward(stage, after) + enterable, axis=1, out=leave)
    if dag.may_leave is not None:
        leave[~dag.may_leave[stage.hi, stage.rows]] = NEVER
    base = leave.copy()
    base[stage.stay_from] = np.minimum(base[stage.stay_from], entry[stage.stay_to])
    return base


def _last_doubt(dag: Dag, stage: Stage, block: Ints) -> int:
    """The last place inside a stage, `[1, hi - lo)`, where somebody might gain by switching; 0 for none."""
    inner = block[1:]
    tempted = inner.min(axis=1)[:, None] + dag.nearest[stage.rows] <= inner
    places = np.flatnonzero(tempted.any(axis=1))
    return 1 + int(places[-1]) if places.size else 0


def _layer_by_layer(dag: Dag, stage: Stage, block: Ints, leave: Ints, last: int) -> None:
    """Redo `block[:last]`, switching inside the stage allowed; `block[last]` is right."""
    inside = dag.inside(stage)
    sums = np.empty_like(inside)
    enter_ok = None if dag.may_enter is None else dag.may_enter[stage.lo : stage.hi, stage.rows]
    leave_ok = None if dag.may_leave is None else dag.may_leave[stage.lo : stage.hi, stage.rows]
    for place in range(last, 0, -1):
        stay, hand_over, before = block[place], leave[place - 1], block[place - 1]
        entry = stay if enter_ok is None else np.where(enter_ok[place], stay, NEVER)
        np.add(inside, entry, out=sums)
        np.minimum.reduce(sums, axis=1, out=hand_over)
        if leave_ok is not None:
            hand_over[~leave_ok[place]] = NEVER
        np.minimum(hand_over, stay, out=before)
        before += stage.tau[place - 1]
        np.minimum(before, NEVER, out=before)


def sweep_capped(dag: Dag, exits: Ints, cap: int) -> Table:
    """`sweep` where no visit may take longer than `cap`, O(L R² + L² R)."""
    table = Table(np.full((dag.num_layers + 1, dag.count), NEVER), np.full((dag.num_layers + 1, dag.count), NEVER))
    table.leave[-1] = np.where(dag.holds[-1], exits, NEVER)
    spent, holds = dag.spent, dag.holds
    for start in range(dag.num_layers - 1, -1, -1):
        boundary = start + 1
        if boundary < dag.num_layers:
            entry = table.go[boundary]
            if dag.may_enter is not None:
                entry = np.where(dag.may_enter[boundary], entry, NEVER)
            leave = (dag.rho + entry).min(axis=1)
            if dag.may_leave is not None:
                leave[~dag.may_leave[boundary]] = NEVER
            table.leave[boundary] = np.where(holds[start], leave, NEVER)
        run = spent[boundary:] - spent[start]
        total = np.where(run <= cap, run + table.leave[boundary:], NEVER).min(axis=0)
        table.go[start] = np.where(holds[start], np.minimum(total, NEVER), NEVER)
    return table


def walk(dag: Dag, table: Table, entries: Ints, cap: int = NEVER) -> Path | None:
    """The best chain in a table: least cost, then lowest owners hop by hop, then the longest first hops; None for none.

    `entries`: cost before the first layer, `[R]`. Equal chains may differ in where they switch, so each step keeps all
    layers at which the next node can be entered without losing anything.
    """
    start = entries + table.go[0]
    best = int(start.min(initial=NEVER))
    if best >= NEVER:
        return None
    row = _lowest_owner(dag, np.flatnonzero(start == best))
    rows, steps = [row], []  # steps[i]: entry layer of hop i -> the boundaries where it may end
    entered = [0]
    while True:
        ends = {b: _ends(dag, table, row, b, cap) for b in entered}
        steps.append(ends)
        boundaries = sorted({e for options in ends.values() for e in options})
        if boundaries[-1] == dag.num_layers:
            return _read(dag, best, rows, steps)
        following = {b: _successors(dag, table, row, b) for b in boundaries}
        row = _lowest_owner(dag, np.concatenate(list(following.values())))
        rows.append(row)
        entered = [b for b in boundaries if row in following[b]]


def _ends(dag: Dag, table: Table, row: int, start: int, cap: int) -> list[int]:
    run = dag.spent[start + 1 :, row] - dag.spent[start, row]
    good = (run + table.leave[start + 1 :, row] == table.go[start, row]) & (run <= cap)
    return [start + 1 + int(i) for i in np.flatnonzero(good)]


def _successors(dag: Dag, table: Table, row: int, boundary: int) -> Ints:
    good = dag.rho[row] + table.go[boundary] == table.leave[boundary, row]
    if dag.may_enter is not None:
        good &= dag.may_enter[boundary]
    return np.flatnonzero(good)


def _lowest_owner(dag: Dag, rows: Ints) -> int:
    return int(rows[np.argmin(dag.owner[rows])])


def _read(dag: Dag, cost: int, rows: list[int], steps: list[dict[int, list[int]]]) -> Path:
    """Of all ways to split the layers among `rows` at this cost, the one whose first hops are longest."""
    wanted = {dag.num_layers}
    for i in range(len(rows) - 1, -1, -1):
        steps[i] = {b: kept for b, ends in steps[i].items() if (kept := [e for e in ends if e in wanted])}
        wanted = set(steps[i])
    visits, start = [], 0
    for row, ends in zip(rows, steps, strict=True):
        visits.append(Visit(row, start, max(ends[start])))
        start = visits[-1].end
    return Path(cost, tuple(int(dag.owner[v.row]) for v in visits), tuple(visits))
