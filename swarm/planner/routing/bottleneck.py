"""The bottleneck objective: the chain of different nodes whose slowest hop is fastest.

Owns the search for the smallest possible bottleneck. Works on the integer costs of `dag` only.

With many steps in flight a chain yields one result per time of its slowest stage, whatever its links take, so the
objective is the largest time of one hop. A node may be one stage only, a constraint that a dynamic program over layers
cannot express. But where all nodes are linked, giving each hop as many layers as a cap allows never hurts, so whether a
cap can be met is a search over orders of nodes.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

import numpy as np

from swarm.planner.routing.dag import INFINITE, Ints, LayerDag, relax_backward_capped
from swarm.planner.routing.policy import SEARCH
from swarm.planner.routing.simple_paths import best_simple_path, price
from swarm.planner.routing.traceback import Path, PathSegment, trace_back


def best_pipeline(dag: LayerDag, entries: Ints, exits: Ints) -> tuple[int, Path] | None:
    """The smallest bottleneck and, among the chains that meet it, the cheapest; None if there is no chain.

    `dag` has one row per node, in the order of their first layers. Exact within the limits of `PathSearchPolicy`.
    """
    cap, visits = _Stages(dag).least_cap()
    known = price(dag, visits, entries, exits, cap) if visits else None
    if known is None:  # where links are missing the search may stop before it has any cover
        known = best_simple_path(dag, entries, exits)
        if known is None:
            return None
        cap = max(int(dag.prefix_cost[v.end, v.row] - dag.prefix_cost[v.start, v.row]) for v in known.visits)
    forward = LayerDag(dag.owner, dag.tau, np.where(np.tri(dag.count, dtype=np.bool_), INFINITE, dag.rho))
    # Chains that visit rows in ascending order never repeat a node.
    in_order = trace_back(forward, relax_backward_capped(forward, exits, cap), entries, exits, cap)
    known = min((p for p in (known, in_order) if p), key=lambda p: p.key)
    return cap, best_simple_path(dag, entries, exits, cap, known) or known


class _Stages:
    """Which caps on the slowest hop can be met by a cover of all layers with different, linked rows."""

    def __init__(self, dag: LayerDag) -> None:
        self.num_layers, self.count = dag.num_layers, dag.count
        self.ends = (dag.num_layers - dag.holds[::-1].argmax(axis=0)).tolist()
        self.lengths: Ints = dag.holds.sum(axis=0)
        self.fastest: Ints = np.maximum(dag.tau.min(axis=0, initial=INFINITE), 1)
        self.spent: list[list[int]] = dag.prefix_cost.T.tolist()
        self.least = int(dag.tau.min(axis=1).max()) if dag.count else INFINITE
        off_diagonal = ~np.eye(dag.count, dtype=np.bool_)
        self.linked = None if (dag.rho[off_diagonal] < INFINITE).all() else (dag.rho < INFINITE)
        twins: dict[bytes, int] = {}  # interchangeable rows; with missing links every row is of its own kind
        self.kind = [
            twins.setdefault(dag.tau[:, r].tobytes() if self.linked is None else bytes(str(r), "ascii"), r)
            for r in range(dag.count)
        ]
        # Rows that hold a layer, the soonest to end first: they may be of no use for later layers.
        self.at = [
            sorted(np.flatnonzero(holds).tolist(), key=lambda r: (self.ends[r], dag.tau[layer, r], r))
            for layer, holds in enumerate(dag.holds)
        ]
        self.expansions = SEARCH.max_expansions

    def least_cap(self) -> tuple[int, list[PathSegment] | None]:
        """The least cap that was found to be possible, and a cover that meets it; None if there is no cover at all."""
        best = self._cover(INFINITE)
        if best is None:
            return INFINITE, None
        high, low = self._slowest(best), self.least - 1
        for _ in range(SEARCH.max_bisections):
            middle = (low + high) // 2
            if low >= middle:
                break
            found = self._cover(middle)
            if found is None:
                low = middle
            else:
                best, high = found, self._slowest(found)
        while high > self.least and (found := self._cover(high - 1)):
            best, high = found, self._slowest(found)
        return high, best

    def _slowest(self, visits: list[PathSegment]) -> int:
        return max(self.spent[v.row][v.end] - self.spent[v.row][v.start] for v in visits)

    def _cover(self, cap: int) -> list[PathSegment] | None:
        """Depth first, each row with as many layers as the cap allows; None if impossible or out of budget."""
        room = np.minimum(self.lengths, cap // self.fastest)  # most layers a row can take, wherever it starts
        left = int(room.sum())
        budget = min(self.expansions, SEARCH.max_expansions_per_cap if cap < INFINITE else SEARCH.max_expansions)
        reached: dict[tuple[int, ...], int] = {}
        visits: list[PathSegment] = []
        choices = [self._choices(0, visits, cap)]
        while choices:
            visit = next(choices[-1], None)
            if visit is None:
                choices.pop()
                if visits:
                    left += int(room[visits.pop().row])
                continue
            visits.append(visit)
            if visit.end == self.num_layers:
                return visits
            left -= int(room[visit.row])
            budget -= 1
            self.expansions -= 1
            if budget < 0:
                return None
            if left < self.num_layers - visit.end or self._known(reached, visits):
                left += int(room[visits.pop().row])
                continue
            choices.append(self._choices(visit.end, visits, cap))
        return None

    def _choices(self, start: int, visits: list[PathSegment], cap: int) -> Iterator[PathSegment]:
        """Segments from `start`, one for each kind of row not used yet; shorter ones too where links are missing."""
        used = {v.row for v in visits}
        reachable = self.linked[visits[-1].row] if self.linked is not None and visits else None
        tried: set[int] = set()
        for row in self.at[start]:
            if row in used or self.kind[row] in tried or (reachable is not None and not reachable[row]):
                continue
            tried.add(self.kind[row])
            spent = self.spent[row]
            furthest = bisect.bisect_right(spent, spent[start] + cap, start, self.ends[row] + 1) - 1
            nearest = furthest if self.linked is None else start + 1
            for end in range(furthest, max(start, nearest - 1), -1):
                yield PathSegment(row, start, end)

    def _known(self, reached: dict[tuple[int, ...], int], visits: list[PathSegment]) -> bool:
        """Whether a prefix with the same rows used, of those that still matter, has reached as far before."""
        end = visits[-1].end
        spent = sorted(self.kind[v.row] for v in visits if self.ends[v.row] > end)
        key = (*spent,) if self.linked is None else (*spent, -1, visits[-1].row, end)
        if reached.get(key, -1) >= end:
            return True
        reached[key] = end
        return False
