"""The layer DAG of Parallax phase 2 (§3.3) as integer arrays, and the dynamic program over it.

Owns the sweep, the exact order of chains (cost, then hops, then ids) and how the best chain is read back. Knows neither
what a peer is nor where τ and ρ come from; the constraint that a chain visits nobody twice is `routing_search`'s.

A cost is one int64 that holds, from the top, layers whose keys and values must be rebuilt (repair only), time in ticks,
and the number of hops, so the order of chains is the order of integers: ties are exact, and the same on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
SPREAD = 1.2  # most rows of layers swept together, over the fewest of any of them
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


@dataclass(slots=True)
class Stage:
    """Layers `[lo, hi)` that are swept together; n rows that hold any of them, m rows in the stage after.

    `tau`: `[hi - lo, n]`. `rest`: cost from a layer to the end of the stage, `[hi - lo, n]`; None if not all rows hold
    all its layers. `inside`, `onward`: kept by Dag.inside and Dag.onward.
    """

    lo: int
    hi: int
    rows: Ints
    tau: Ints
    rest: Ints | None
    inside: Ints | None = None
    onward: Ints | None = None


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
        self.stages = self._cut()

    def _cut(self) -> list[Stage]:
        """Layers with the same rows, or with nearly the same if those are few: links are read once a stage."""
        changes = np.flatnonzero((self.holds[1:] != self.holds[:-1]).any(axis=1)) + 1
        stages: list[Stage] = []
        for lo, hi in _merged(self.holds, [0, *changes.tolist(), self.num_layers]):
            holds = self.holds[lo:hi]
            rows = np.flatnonzero(holds[0] if hi - lo == 1 else holds.any(axis=0))
            tau = self.tau[lo:hi].take(rows, axis=1)
            even = (tau < NEVER).all()
            stages.append(Stage(lo, hi, rows, tau, tau[::-1].cumsum(axis=0)[::-1] if even else None))
        return stages

    @cached_property
    def _complete(self) -> bool:
        return bool(self.holds.any(axis=1).all())

    def covered(self, closed: Flags | None = None) -> bool:
        """Whether every layer is held, by a row that is not `closed`, `[R]`."""
        if closed is None:
            return self._complete
        return bool((self.holds & ~closed).any(axis=1).all())

    def take(self, rows: Ints) -> Dag:
        """The part of this Dag between the rows `rows`, ascending."""
        enter = None if self.may_enter is None else self.may_enter[:, rows]
        leave = None if self.may_leave is None else self.may_leave[:, rows]
        return Dag(self.owner[rows], self.tau.take(rows, axis=1), self.rho[rows[:, None], rows], enter, leave)

    @cached_property
    def spent(self) -> Ints:
        """Cost of the held layers before a boundary, `[L + 1, R]`."""
        spent = np.zeros((self.num_layers + 1, self.count), np.int64)
        np.cumsum(np.where(self.holds, self.tau, 0), axis=0, out=spent[1:])
        return spent

    @cached_property
    def work(self) -> int:
        """Relaxations of a sweep, at least 1."""
        return 1 + int((self.holds.sum(axis=1, dtype=np.int64) ** 2).sum())

    @cached_property
    def nearest(self) -> Ints:
        """The cheapest link out of each row, `[R]`."""
        cheapest: Ints = self.rho.min(axis=1, initial=NEVER)
        return cheapest

    @cached_property
    def _onto(self) -> Ints:
        """Going on as another row, or for nothing as the same, `[R, R]` by (to, from)."""
        onto = self.rho.T.copy()
        np.fill_diagonal(onto, 0)
        return onto

    def inside(self, stage: Stage) -> Ints:
        """Going on inside a stage, `[n, n]` by (to, from)."""
        if stage.inside is not None:
            return stage.inside
        inside = _part(self._onto, stage.rows, stage.rows)
        if inside.size <= MOST_KEPT:
            stage.inside = inside
        return inside

    def onward(self, stage: Stage, after: Stage) -> Ints:
        """Going on from a stage to the next, `[m, n]` by (to, from)."""
        if stage.onward is not None:
            return stage.onward
        onward = _part(self._onto, after.rows, stage.rows)
        if onward.size <= MOST_KEPT:
            stage.onward = onward
        return onward


def _merged(holds: Flags, cuts: list[int]) -> Iterator[tuple[int, int]]:
    """The pieces between `cuts`, neighbours put together while that adds few rows to any of them."""
    lo, held, fewest = cuts[0], holds[cuts[0]], int(holds[cuts[0]].sum())
    for cut in cuts[1:-1]:
        union, fewer = held | holds[cut], min(fewest, int(holds[cut].sum()))
        if union.sum() > SPREAD * fewer:
            yield lo, cut
            lo, union, fewer = cut, holds[cut], int(holds[cut].sum())
        held, fewest = union, fewer
    yield lo, cuts[-1]


def _part(matrix: Ints, rows: Ints, columns: Ints) -> Ints:
    """`matrix` between `rows` and `columns`; a view where both are consecutive and many."""
    if rows.size * columns.size > MOST_KEPT and _consecutive(rows) and _consecutive(columns):
        return matrix[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    part: Ints = matrix[rows[:, None], columns]
    return part


def _consecutive(rows: Ints) -> bool:
    return len(rows) == int(rows[-1] - rows[0]) + 1


def sweep(dag: Dag, exits: Ints, closed: Flags | None = None) -> Ints:
    """`go[b, r]`: least cost from boundary b on if row r runs layer b, `[L + 1, R]`; NEVER where it cannot.

    One backward pass, O(L R²) at worst. `exits`: cost after the last layer, `[R]`. `closed`: rows to do without, `[R]`.
    A stage of rows that hold all of it is filled in at once on the assumption that nobody switches inside it: the DP
    over stages. That is exact unless the cheapest link out of some row leads to something better than staying; from the
    last boundary where it might, the sweep goes on layer by layer.
    """
    go = np.full((dag.num_layers + 1, dag.count), NEVER)
    if not dag.covered(closed):
        return go
    sums = np.empty(max(stage.rows.size for stage in dag.stages) ** 2, np.int64)
    entry: Ints = exits
    after: Stage | None = None
    for stage in reversed(dag.stages):
        barred = None if closed is None else np.where(closed[stage.rows], NEVER, 0)
        if after is None:
            base = exits[stage.rows]
        else:
            base = _going_on(dag, dag.onward(stage, after), sums, entry, stage.hi, after.rows, stage.rows)
        block = (stage.tau if stage.rest is None else stage.rest) + base
        np.minimum(block, NEVER, out=block)
        if barred is not None:
            np.maximum(block, barred, out=block)
        doubt = _last_doubt(dag, stage, block, barred)
        inside = dag.inside(stage) if doubt else sums
        for place in range(doubt, 0, -1):
            before = block[place - 1]
            base = _going_on(dag, inside, sums, block[place], stage.lo + place, stage.rows, stage.rows)
            np.add(base, stage.tau[place - 1], out=before)
            np.minimum(before, NEVER, out=before)
            if barred is not None:
                np.maximum(before, barred, out=before)
        go[stage.lo : stage.hi, stage.rows] = block
        entry, after = block[0], stage
    return go


def _going_on(dag: Dag, onto: Ints, sums: Ints, entry: Ints, boundary: int, rows: Ints, froms: Ints) -> Ints:
    """Least cost from `boundary` on for each of `froms` that runs the layer before it, `[n]`.

    `onto`: `[m, n]`. `entry`: least cost of each of `rows` from there on, `[m]`. `sums`: room to work in.
    """
    sums = sums[: onto.size].reshape(onto.shape)
    np.add(onto, entry[:, None], out=sums)
    if dag.may_enter is not None:
        sums[~dag.may_enter[boundary, rows]] = NEVER
    if dag.may_leave is not None:
        sums[:, ~dag.may_leave[boundary, froms]] = NEVER
    if dag.may_enter is not None or dag.may_leave is not None:
        here, there = np.nonzero(rows[:, None] == froms)
        sums[here, there] = entry[here]
    best: Ints = np.minimum.reduce(sums, axis=0)
    return best


def _last_doubt(dag: Dag, stage: Stage, block: Ints, barred: Ints | None) -> int:
    """The last place inside a stage, `[1, hi - lo)`, where somebody might gain by switching; 0 for none."""
    if stage.rest is None or len(block) == 1:
        return len(block) - 1
    inner = block[1:]
    tempted = inner.min(axis=1)[:, None] + dag.nearest[stage.rows] <= inner
    if barred is not None:
        tempted &= barred == 0
    places = np.flatnonzero(tempted.any(axis=1))
    return 1 + int(places[-1]) if places.size else 0


def sweep_capped(dag: Dag, exits: Ints, cap: int) -> Ints:
    """`sweep` where no visit may take longer than `cap`, O(L R² + L² R)."""
    go = np.full((dag.num_layers + 1, dag.count), NEVER)
    leave = go.copy()
    leave[-1] = np.where(dag.holds[-1], exits, NEVER)
    spent, holds = dag.spent, dag.holds
    for start in range(dag.num_layers - 1, -1, -1):
        boundary = start + 1
        if boundary < dag.num_layers:
            entry = go[boundary]
            if dag.may_enter is not None:
                entry = np.where(dag.may_enter[boundary], entry, NEVER)
            leave[boundary] = (dag.rho + entry).min(axis=1)
            if dag.may_leave is not None:
                leave[boundary, ~dag.may_leave[boundary]] = NEVER
            leave[boundary, ~holds[start]] = NEVER
        run = spent[boundary:] - spent[start]
        total = np.where(run <= cap, run + leave[boundary:], NEVER).min(axis=0)
        go[start] = np.where(holds[start], np.minimum(total, NEVER), NEVER)
    return go


def walk(dag: Dag, go: Ints, entries: Ints, exits: Ints, cap: int = NEVER) -> Path | None:
    """The best chain in a sweep: least cost, then lowest owners hop by hop, then the longest first hops; None for none.

    `entries`: cost before the first layer, `[R]`. Equal chains may differ in where they switch, so each step keeps all
    layers at which the next node can be entered without losing anything.
    """
    start = entries + go[0]
    best = int(start.min(initial=NEVER))
    if best >= NEVER:
        return None
    row = _lowest_owner(dag, np.flatnonzero(start == best))
    rows, steps = [row], []  # steps[i]: entry layer of hop i -> the boundaries where it may end
    entered = [0]
    while True:
        first = entered[0]
        leave = _leaving(dag, go, exits, row, first)
        ends = {b: _ends(dag, go, leave[b - first :], row, b, cap) for b in entered}
        steps.append(ends)
        boundaries = sorted({e for options in ends.values() for e in options})
        if boundaries[-1] == dag.num_layers:
            return _read(dag, best, rows, steps)
        following = {b: _successors(dag, go, row, b, leave[b - first - 1]) for b in boundaries}
        row = _lowest_owner(dag, np.concatenate(list(following.values())))
        rows.append(row)
        entered = [b for b in boundaries if row in following[b]]


def _leaving(dag: Dag, go: Ints, exits: Ints, row: int, start: int) -> Ints:
    """Least cost from each boundary after `start` on, as far as `row` goes, if it hands over (or ends) there."""
    held = dag.holds[start:, row]
    stop = dag.num_layers if held.all() else start + int(held.argmin())
    entry = go[start + 1 : stop + 1]
    if dag.may_enter is not None:
        entry = np.where(dag.may_enter[start + 1 : stop + 1], entry, NEVER)
    leave: Ints = (entry + dag.rho[row]).min(axis=1)
    if dag.may_leave is not None:
        leave[~dag.may_leave[start + 1 : stop + 1, row]] = NEVER
    if stop == dag.num_layers:
        leave[-1] = exits[row]
    return leave


def _ends(dag: Dag, go: Ints, leave: Ints, row: int, start: int, cap: int) -> list[int]:
    """Where a visit that begins at `start` may end. `leave`: from `start + 1` on."""
    run = dag.spent[start + 1 : start + 1 + len(leave), row] - dag.spent[start, row]
    good = run + leave == go[start, row]
    if cap < NEVER:
        good &= run <= cap
    return [start + 1 + int(i) for i in np.flatnonzero(good)]


def _successors(dag: Dag, go: Ints, row: int, boundary: int, leave: int) -> Ints:
    good = dag.rho[row] + go[boundary] == leave
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
