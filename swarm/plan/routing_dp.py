"""The layer DAG of Parallax phase 2 (§3.3) as integer arrays, and the dynamic program over it.

Owns the sweep, and how cost and hops are one number. Knows neither what a peer is nor where τ and ρ come from. How the
best chain is read back is `routing_walk`'s; the constraint that a chain visits nobody twice is `routing_search`'s.

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
NEVER = 1 << 61  # two of them, and the layers of a chain on top, still add without overflow
MAX_LAYERS = 1000
SPREAD = 1.6  # most rows of layers swept together, over the fewest of any of them
MOST_KEPT = 1 << 17  # links of one boundary that are kept from one sweep to the next


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
        self.stages = [self._stage(lo, hi) for lo, hi in _cuts(self.holds)]

    def _stage(self, lo: int, hi: int) -> Stage:
        holds = self.holds[lo:hi]
        rows = np.flatnonzero(holds[0] if hi - lo == 1 else holds.any(axis=0))
        tau = self.tau[lo:hi].take(rows, axis=1)
        even = tau.max(initial=0) < NEVER
        return Stage(lo, hi, rows, tau, tau[::-1].cumsum(axis=0)[::-1] if even else None)

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
        return Dag(self.owner[rows], self.tau.take(rows, axis=1), part(self.rho, rows, rows), enter, leave)

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
        """`rho` by (to, from): the least over `to` is found in two thirds of the time."""
        return np.ascontiguousarray(self.rho.T)

    def inside(self, stage: Stage) -> Ints:
        """Going on as another row inside a stage, or for nothing as the same, `[n, n]` by (to, from)."""
        if stage.inside is not None:
            return stage.inside
        inside = part(self._onto, stage.rows, stage.rows)
        np.fill_diagonal(inside, 0)
        if inside.size <= MOST_KEPT:
            stage.inside = inside
        return inside

    def onward(self, stage: Stage, after: Stage) -> Ints:
        """The same from a stage to the next, `[m, n]`."""
        if stage.onward is not None:
            return stage.onward
        onward = part(self._onto, after.rows, stage.rows)
        here, there = _shared(stage.rows, after.rows)
        onward[there, here] = 0
        if onward.size <= MOST_KEPT:
            stage.onward = onward
        return onward


def _cuts(holds: Flags) -> Iterator[tuple[int, int]]:
    """Layers with the same rows, or with nearly the same if those are few: links are read once a stage."""
    masks = [int.from_bytes(line.tobytes()) for line in np.packbits(holds, axis=1)]  # rows as the bits of one number
    lo, held, fewest = 0, masks[0], masks[0].bit_count()
    for layer, mask in enumerate(masks):
        union, fewer = held | mask, min(fewest, mask.bit_count())
        if mask != masks[layer - 1] and union.bit_count() > SPREAD * fewer:
            yield lo, layer
            lo, union, fewer = layer, mask, mask.bit_count()
        held, fewest = union, fewer
    yield lo, len(masks)


def part(matrix: Ints, rows: Ints, columns: Ints) -> Ints:
    """A copy of `matrix` between `rows` and `columns`."""
    between: Ints = matrix.take(rows, axis=0).take(columns, axis=1)  # half the time of matrix[rows[:, None], columns]
    return between


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
            base = _going_on(dag, dag.onward(stage, after), sums, entry, stage.hi, stage.rows, after.rows)
        block = (stage.tau if stage.rest is None else stage.rest) + base
        if barred is not None:
            np.maximum(block, barred, out=block)
        np.minimum(block, NEVER, out=block)
        doubt = _last_doubt(dag, stage, block, barred)
        if doubt:
            _fill(dag, stage, block, doubt, barred, sums)
        go[stage.lo : stage.hi, stage.rows] = block
        entry, after = block[0], stage
    return go


def _fill(dag: Dag, stage: Stage, block: Ints, doubt: int, barred: Ints | None, sums: Ints) -> None:
    """The layers of a stage before place `doubt`, one by one. `block`: `go` of the stage, `[hi - lo, n]`, changed."""
    tau = stage.tau if barred is None else np.maximum(stage.tau, barred)
    finite = stage.rest is not None and barred is None
    anywhere = dag.may_enter is None and dag.may_leave is None
    across, never = dag.inside(stage), np.full(stage.rows.size, NEVER)
    room = sums[: across.size].reshape(across.shape)
    for place in range(doubt - 1, -1, -1):
        before, following = block[place], block[place + 1]
        if anywhere:
            np.add(across, following[:, None], out=room)
            np.minimum.reduce(room, axis=0, out=before)
        else:
            before[:] = _going_on(dag, across, sums, following, stage.lo + place + 1, stage.rows, stage.rows)
        before += tau[place]
        if not finite:
            np.minimum(before, never, out=before)
    np.minimum(block, NEVER, out=block)


def _going_on(dag: Dag, across: Ints, sums: Ints, entry: Ints, boundary: int, rows: Ints, onto: Ints) -> Ints:
    """Least cost from `boundary` on for each of `rows` that runs the layer before it, `[n]`.

    `across`: `[m, n]`. `entry`: least cost of each of `onto` from there on, `[m]`. `sums`: room to work in.
    """
    sums = sums[: across.size].reshape(across.shape)
    entered = entry if dag.may_enter is None else np.where(dag.may_enter[boundary, onto], entry, NEVER)
    np.add(across, entered[:, None], out=sums)
    best: Ints = np.minimum.reduce(sums, axis=0)
    if dag.may_leave is not None:
        best[~dag.may_leave[boundary, rows]] = NEVER
    if dag.may_enter is not None or dag.may_leave is not None:  # staying is no switch
        here, there = (slice(None), slice(None)) if onto is rows else _shared(rows, onto)
        best[here] = np.minimum(best[here], entry[there])
    return best


def _shared(rows: Ints, others: Ints) -> tuple[Ints, Ints]:
    """The places in each of what is in both; both ascending."""
    place = np.minimum(np.searchsorted(others, rows), others.size - 1)
    here = np.flatnonzero(others[place] == rows)
    return here, place[here]


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
