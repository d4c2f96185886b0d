"""The layer DAG of Parallax phase 2 (§3.3) as integer arrays, and the dynamic program over it.

Owns the backward relaxation, and how cost and hops are packed into one number. Knows neither peers nor where τ and ρ
come from. `traceback` reads the best chain out of a relaxation; `simple_paths` adds that no node is visited twice.

A cost is one int64 that holds, from the top bits, layers whose KV must be rebuilt (repair only), time in ticks,
and the number of hops, so the order of chains is the order of integers: ties are exact, and the same on every machine.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

try:
    from swarm.planner.routing import _relax
except ImportError:  # installed where there is no C compiler
    compiled = None
else:
    compiled = _relax.sweep

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

HOP_TIE_BREAK = 1
TIME_UNIT = 1 << 10  # up to 1,023 hops
REBUILD_PENALTY = 1 << 50  # up to 2^40 ticks: 18 minutes in nanoseconds
INFINITE = 1 << 61  # two of them, and the layers of a chain on top, still add without overflow; so in _relax.c
MAX_LAYERS = 1000


class LayerDag:
    """R rows (a node, or one way of using it) over L layers.

    `owner`: rank of the row's node among all ids, `[R]`; ties go to the lower. `tau`: cost of a layer, INFINITE where
    the row does not hold it, `[L, R]`. `rho`: cost of the link and of one more hop from row to column, INFINITE where
    there is none and on the diagonal, `[R, R]`. `may_enter`, `may_leave`: where switching to or from a row is allowed,
    `[L + 1, R]` by boundary, None for everywhere.
    """

    def __init__(
        self, owner: Ints, tau: Ints, rho: Ints, may_enter: Flags | None = None, may_leave: Flags | None = None
    ) -> None:
        self.owner, self.tau, self.rho = owner, np.ascontiguousarray(tau), np.ascontiguousarray(rho)
        self.may_enter, self.may_leave = may_enter, may_leave
        self.holds: Flags = tau < INFINITE
        self.num_layers, self.count = tau.shape

    @cached_property
    def _complete(self) -> bool:
        return bool(self.holds.any(axis=1).all())

    def covered(self, closed: Flags | None = None) -> bool:
        """Whether every layer is held, by a row that is not `closed`, `[R]`."""
        if closed is None:
            return self._complete
        return bool((self.holds & ~closed).any(axis=1).all())

    def take(self, rows: Ints) -> LayerDag:
        """The subgraph of the rows `rows`, ascending."""
        enter = None if self.may_enter is None else self.may_enter.take(rows, axis=1)
        leave = None if self.may_leave is None else self.may_leave.take(rows, axis=1)
        rho = self.rho.take(rows, axis=0).take(rows, axis=1)
        return LayerDag(self.owner[rows], self.tau.take(rows, axis=1), rho, enter, leave)

    @cached_property
    def prefix_cost(self) -> Ints:
        """Cost of the held layers before a boundary, `[L + 1, R]`."""
        spent = np.zeros((self.num_layers + 1, self.count), np.int64)
        np.cumsum(np.where(self.holds, self.tau, 0), axis=0, out=spent[1:])
        return spent

    @cached_property
    def work(self) -> int:
        """Relaxations of one backward pass, at least 1."""
        return 1 + int((self.holds.sum(axis=1, dtype=np.int64) ** 2).sum())


def relax_backward(dag: LayerDag, exits: Ints, closed: Flags | None = None) -> Ints:
    """`go[b, r]`: least cost from boundary b on if row r runs layer b, `[L + 1, R]`; INFINITE if it cannot.

    One backward pass, O(L R²). `exits`: cost after the last layer, `[R]`. `closed`: excluded rows, `[R]`.
    """
    tau = dag.tau if closed is None else np.where(closed, INFINITE, dag.tau)
    if compiled is None:
        return relax_backward_plain(dag, tau, exits)
    go = np.empty((dag.num_layers + 1, dag.count), np.int64)
    compiled(dag.num_layers, dag.count, tau, dag.rho, exits, dag.may_enter, dag.may_leave, go)
    return go


def relax_backward_plain(dag: LayerDag, tau: Ints, exits: Ints) -> Ints:
    """`relax_backward` in numpy; `_relax.c` gives the same numbers. `tau` replaces that of `dag`."""
    go = np.full((dag.num_layers + 1, dag.count), INFINITE)
    for layer in range(dag.num_layers - 1, -1, -1):
        rows, boundary = np.flatnonzero(tau[layer] < INFINITE), layer + 1
        if boundary == dag.num_layers:
            best = exits[rows]
        else:
            entry = go[boundary] if dag.may_enter is None else np.where(dag.may_enter[boundary], go[boundary], INFINITE)
            onto = np.flatnonzero(entry < INFINITE)
            switch = (dag.rho.take(rows, axis=0).take(onto, axis=1) + entry[onto]).min(axis=1, initial=INFINITE)
            if dag.may_leave is not None:
                switch[~dag.may_leave[boundary, rows]] = INFINITE
            best = np.minimum(switch, go[boundary, rows])
        go[layer, rows] = np.minimum(best + tau[layer, rows], INFINITE)
    return go


def relax_backward_capped(dag: LayerDag, exits: Ints, cap: int) -> Ints:
    """`relax_backward` where no hop may take longer than `cap`, O(L R² + L² R)."""
    go = np.full((dag.num_layers + 1, dag.count), INFINITE)
    leave = go.copy()
    leave[-1] = np.where(dag.holds[-1], exits, INFINITE)
    spent, holds = dag.prefix_cost, dag.holds
    for start in range(dag.num_layers - 1, -1, -1):
        boundary = start + 1
        if boundary < dag.num_layers:
            entry = go[boundary]
            if dag.may_enter is not None:
                entry = np.where(dag.may_enter[boundary], entry, INFINITE)
            leave[boundary] = (dag.rho + entry).min(axis=1)
            if dag.may_leave is not None:
                leave[boundary, ~dag.may_leave[boundary]] = INFINITE
            leave[boundary, ~holds[start]] = INFINITE
        run = spent[boundary:] - spent[start]
        total = np.where(run <= cap, run + leave[boundary:], INFINITE).min(axis=0)
        go[start] = np.where(holds[start], np.minimum(total, INFINITE), INFINITE)
    return go
