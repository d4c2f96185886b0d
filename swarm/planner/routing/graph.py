"""The input of phase 2, nodes and links, as arrays: ms on the outside, the integer costs of `dag` inside.

Owns the arrays, what a missing ρ counts as, and the conversion from ms to ticks and back to a `Chain`. Knows neither
snapshots nor groups of nodes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from swarm.errors import NoRoute, UsageError
from swarm.planner.routing.bottleneck import best_pipeline
from swarm.planner.routing.dag import HOP_TIE_BREAK, INFINITE, MAX_LAYERS, TIME_UNIT, Ints, LayerDag
from swarm.planner.routing.nodes import Links, Objective, RouteNode, row_order
from swarm.planner.routing.simple_paths import best_simple_path, has_repeat, shortest_path
from swarm.planner.routing.traceback import Path
from swarm.types import Chain, Hop, missing_ranges

Floats = NDArray[np.float64]

TICKS_PER_MS = 1e6  # a tick is a nanosecond
MAX_TICKS = 1 << 38  # of all layers and links of one chain; edges to the client come on top


def link_matrix(ids: Sequence[str], link_ms: Links) -> Floats:
    """ρ between all pairs, ms, `[N, N]` by (from, to)."""
    rho = np.full((len(ids), len(ids)), np.nan)
    if isinstance(link_ms, Mapping):
        place = {peer: i for i, peer in enumerate(ids)}
        for peer, i in place.items():
            for other, ms in link_ms.get(peer, {}).items():
                if other in place:
                    rho[i, place[other]] = ms
        rho = np.where(np.isnan(rho), rho.T, rho)
        return np.where(np.isnan(rho), 0.0, rho)
    for i, a in enumerate(ids):
        for j, b in enumerate(ids):
            rho[i, j] = link_ms(a, b) if i != j else 0.0
    return rho


class LayerGraph:
    """Nodes that may be chained together, and what their layers and links cost.

    `ids`: node of each row, in row order (by first layer, last layer, id), `[R]`. `tau_ms`: `[L, R]`, infinite where a
    row does not hold the layer. `rho_ms`: `[R, R]`, infinite where there is no link.
    """

    def __init__(self, nodes: Sequence[RouteNode], num_layers: int, rho_ms: Floats) -> None:
        """`rho_ms`: in the order of `nodes`. Raises UsageError for what is not a time in ms."""
        if not 1 <= num_layers <= MAX_LAYERS:
            raise UsageError(f"a model of {num_layers} layers cannot be routed; 1 to {MAX_LAYERS} are possible")
        order = sorted(range(len(nodes)), key=lambda i: row_order(nodes[i]))
        self.nodes = [nodes[i] for i in order]
        self.ids = tuple(n.id for n in self.nodes)
        self.num_layers = num_layers
        self.rho_ms = rho_ms if order == list(range(len(nodes))) else rho_ms.take(order, axis=0).take(order, axis=1)
        self._check_links()
        layers, rows, times = self._times()
        self.tau_ms = np.full((num_layers, len(nodes)), np.inf)
        self.tau_ms[layers, rows] = times
        self.ticks_per_ms = TICKS_PER_MS / max(1.0, self._upper_bound_ms(times) * TICKS_PER_MS / MAX_TICKS)
        rank = {peer: i for i, peer in enumerate(sorted(set(self.ids)))}
        self.owner = np.array([rank[peer] for peer in self.ids], np.int64)
        tau = np.full(self.tau_ms.shape, INFINITE)
        tau[layers, rows] = self.ticks(times)
        rho = self.ticks(self.rho_ms, HOP_TIE_BREAK)
        np.fill_diagonal(rho, INFINITE)
        if len(rank) < len(self.ids):
            rho[self.owner[:, None] == self.owner] = INFINITE
        self.dag = LayerDag(self.owner, tau, rho)

    def _times(self) -> tuple[Ints, Ints, Floats]:
        """Layers, rows and τ in ms of all that is held, flat. Raises UsageError for an invalid span or τ."""
        taus = [node.taus(self.num_layers) for node in self.nodes]
        starts = np.array([node.start for node in self.nodes], np.int64)
        lengths = np.array([len(tau) for tau in taus], np.int64)
        times = np.fromiter(itertools.chain.from_iterable(taus), np.float64, int(lengths.sum()))
        rows = np.repeat(np.arange(len(taus)), lengths)
        layers = np.arange(len(times)) + np.repeat(starts - (lengths.cumsum() - lengths), lengths)
        wrong = ~((times >= 0) & (times < np.inf))
        if wrong.any():
            node = self.nodes[int(rows[wrong.argmax()])]
            raise UsageError(f"a layer of node {node.id} takes {node.layer_ms} ms; a time is a number from 0 up")
        return layers, rows, times

    def _check_links(self) -> None:
        if not self.rho_ms.min(initial=0.0) >= 0:  # NaN is not
            i, j = (int(k) for k in np.argwhere(~(self.rho_ms >= 0))[0])
            raise UsageError(f"the link {self.ids[i]} -> {self.ids[j]} takes {self.rho_ms[i, j]} ms; use 0 or more")

    def _upper_bound_ms(self, times: Floats) -> float:
        """No chain takes longer, edges to the client not counted."""
        rho = self.rho_ms.max(initial=0.0)
        if not rho < np.inf:
            rho = np.where(np.isfinite(self.rho_ms), self.rho_ms, 0.0).max(initial=0.0)
        return float(self.num_layers * (times.max(initial=0.0) + rho))

    def ticks(self, ms: Floats, hops: int = 0) -> Ints:
        """ms, and `hops` on top -> cost; INFINITE for infinite. To the nanosecond unless a chain could take minutes."""
        scaled = ms * self.ticks_per_ms
        np.minimum(scaled, MAX_TICKS, out=scaled)
        np.rint(scaled, out=scaled)
        scaled *= TIME_UNIT  # below 2^53: still whole
        if hops:
            scaled += hops
        cost: Ints = scaled.astype(np.int64)
        if not ms.max(initial=0.0) < np.inf:
            cost[np.isinf(ms)] = INFINITE
        return cost

    def best(
        self,
        objective: Objective = "latency",
        entry_ms: Floats | None = None,
        exit_ms: Floats | None = None,
        banned: Collection[str] = frozenset(),
        revisits: bool = False,
    ) -> Chain:
        """The best chain; `entry_ms`, `exit_ms`: ρ from and to the client, `[R]`. Raises NoRoute."""
        dag, rows = self.dag, np.arange(len(self.ids))
        closed = np.array([peer in banned for peer in self.ids], np.bool_) if banned else None
        if not dag.covered(closed):
            self.check_coverage(rows if closed is None else np.flatnonzero(~closed))
        entry_ms = np.zeros(len(self.ids)) if entry_ms is None else entry_ms
        exit_ms = np.zeros(len(self.ids)) if exit_ms is None else exit_ms
        entries, exits = self.ticks(entry_ms), self.ticks(exit_ms)
        path: Path | None = None
        if objective == "latency":
            path = shortest_path(dag, entries, exits, closed)
            if path is not None and (revisits or not has_repeat(path)):
                return self.chain(path, rows, objective, entry_ms, exit_ms)
        if closed is not None:
            rows = np.flatnonzero(~closed)
            dag, entries, exits, path = dag.take(rows), entries[rows], exits[rows], None
        if objective == "bottleneck":
            found = best_pipeline(dag, entries, exits)
            path = found[1] if found else None
        else:
            path = best_simple_path(dag, entries, exits, first=path)
        if path is None:
            raise NoRoute("every layer is held, but no links join the nodes that hold them into a chain")
        return self.chain(path, rows, objective, entry_ms, exit_ms)

    def check_coverage(self, rows: Ints) -> None:
        """Raises NoRoute with the layers that none of `rows` holds."""
        missing = missing_ranges(int(count) for count in self.dag.holds[:, rows].sum(axis=1))
        if missing:
            raise NoRoute(no_route_sentence(missing, self.num_layers), missing)

    def chain(self, path: Path, rows: Ints, objective: Objective, entry_ms: Floats, exit_ms: Floats) -> Chain:
        """A path over `rows` as a Chain, with its cost in ms."""
        visits = [(int(rows[v.row]), v.start, v.end) for v in path.visits]
        runs = [math.fsum(self.tau_ms[start:end, row]) for row, start, end in visits]
        hops = tuple(Hop(self.ids[row], start, end) for row, start, end in visits)
        if objective == "bottleneck":
            return Chain(hops, max(runs))
        links = [float(self.rho_ms[a[0], b[0]]) for a, b in itertools.pairwise(visits)]
        edges = (float(entry_ms[visits[0][0]]), float(exit_ms[visits[-1][0]]))
        return Chain(hops, math.fsum((*runs, *links, *edges)))


def no_route_sentence(missing: Sequence[tuple[int, int]], num_layers: int) -> str:
    """Which layers are not served, and what to do about it, for people."""
    if not missing:
        return "nobody serves this model yet; start a node with: swarm-node join"
    ranges = ", ".join(f"{a}:{b}" for a, b in missing)
    return f"no node serves layers {ranges} of {num_layers}; wait for one to join, or start one with: swarm-node join"
