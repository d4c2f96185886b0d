"""The cheapest chains of one DAG for many clients: the rows that matter, found once and proven again for each.

Owns which rows a sweep may leave out. Knows only the integers of `routing_dp`.

Requests to one Dag differ in what the client's own links cost and in who is banned. Most rows are too far or too slow
for any of them, so from the second request on only a part of the rows is swept. That the others could not have helped
is proven afterwards: a chain through one of them costs at least its way in, the quickest node at every layer before it
hands over but one, that one on itself, and the best way on from there. If the proof fails, the request is answered by a
sweep over all rows, and the part grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from swarm.plan.routing_dp import NEVER, Dag, Flags, Ints, part, sweep
from swarm.plan.routing_walk import Path, Visit, walk

WORTH = 1 << 18  # relaxations of a whole sweep below which a part is not worth its proof
MARGIN = 32  # a part holds what comes within this share of the best chain
MOST_KEPT = 0.8  # of the rows; with more in it a part saves nothing


@dataclass(frozen=True, slots=True)
class Part:
    """`inside`: rows of the part, ascending; `outside`: the others; `out`: links from these to those, `[N - A, A]`."""

    inside: Ints
    outside: Ints
    dag: Dag
    out: Ints


class Finder:
    """Answers requests to one Dag; the answers are those of `walk(dag, sweep(dag, ...), ...)`."""

    def __init__(self, dag: Dag, worth: int = WORTH, guess: Flags | None = None) -> None:
        """`guess`: rows that are likely to matter, `[R]`; from a Dag much like this one."""
        self._dag = dag
        self._worthwhile = dag.work >= worth
        self._swept: tuple[Path, Ints, Ints, Ints] | None = None  # the last whole sweep, and what was asked
        self.part = self._part(guess) if guess is not None and self._worthwhile else None

    def cheapest(self, entries: Ints, exits: Ints, closed: Flags | None = None) -> Path | None:
        """The best chain without the rows that are `closed`; a node may come twice. None if there is no chain.

        `entries`, `exits`: cost before the first layer and after the last, `[R]`.
        """
        if self.part is not None:
            path = self._within(self.part, entries, exits, closed)
            if path is not None:
                return path
        dag = self._dag
        go = sweep(dag, exits, closed)
        path = walk(dag, go, entries, exits)
        if path is not None and self._worthwhile:
            again, self._swept = self._swept is not None or self.part is not None, (path, go, entries, exits)
            if again:
                self.part = self._part(self.close)
                self._worthwhile = self.part is not None
        return path

    @property
    def close(self) -> Flags:
        """The rows that came close in the last whole sweep, with those of the part before, `[R]`."""
        dag = self._dag
        close = np.zeros(dag.count, np.bool_)
        if self.part is not None:
            close[self.part.inside] = True
        if self._swept is not None:
            path, go, entries, exits = self._swept
            least = self._least(np.arange(dag.count), dag.rho, go, entries, exits)
            close |= least <= path.cost + path.cost // MARGIN
            close[[visit.row for visit in path.visits]] = True
        return close

    def _within(self, part: Part, entries: Ints, exits: Ints, closed: Flags | None) -> Path | None:
        """The best chain of a part, if no row outside it can be on one as good; else None."""
        rows = part.inside
        go = sweep(part.dag, exits[rows], None if closed is None else closed[rows])
        path = walk(part.dag, go, entries[rows], exits[rows])
        if path is None:
            return None
        bound = self._least(part.outside, part.out, go, entries, exits)
        good = bound <= path.cost
        if closed is not None:
            good &= ~closed[part.outside]
        if good.any():
            return None
        return Path(path.cost, path.owners, tuple(Visit(int(rows[v.row]), v.start, v.end) for v in path.visits))

    def _part(self, close: Flags) -> Part | None:
        """The part of the rows that are `close`; None if they are too many, or too few for a chain."""
        if close.mean() > MOST_KEPT or not self._dag.covered(~close):
            return None
        inside, outside = np.flatnonzero(close), np.flatnonzero(~close)
        return Part(inside, outside, self._dag.take(inside), part(self._dag.rho, outside, inside))

    def _least(self, rows: Ints, out: Ints, go: Ints, entries: Ints, exits: Ints) -> Ints:
        """A bound from below on chains in which one of `rows` hands over to a row of `go` for good, or ends.

        `out`: links from `rows` to those of `go`.
        """
        dag, fastest = self._dag, self._fastest
        last = np.where(dag.holds[-1], exits, NEVER)[rows] + fastest[-1]
        first = np.where(dag.holds[0], entries, NEVER)
        reached = np.minimum(np.minimum(first, first.min() + self._nearest_in) + self._slower, NEVER)[rows]
        onward = (go[1:-1] + fastest[1:-1, None]).min(axis=0, initial=NEVER)
        least: Ints = reached + np.minimum((out + onward).min(axis=1, initial=NEVER), last)
        return least

    @cached_property
    def _fastest(self) -> Ints:
        """Cost of the layers before each boundary if each is run by whoever is quickest, `[L + 1]`."""
        return np.concatenate([[0], self._dag.tau.min(axis=1).cumsum()])

    @cached_property
    def _slower(self) -> Ints:
        """What each row costs more than the quickest at the layer where that is least, `[R]`."""
        tau = self._dag.tau
        slower: Ints = np.where(self._dag.holds, tau - tau.min(axis=1)[:, None], NEVER).min(axis=0)
        return slower

    @cached_property
    def _nearest_in(self) -> Ints:
        """The cheapest link into each row, `[R]`."""
        nearest: Ints = self._dag.rho.min(axis=0, initial=NEVER)
        return nearest
