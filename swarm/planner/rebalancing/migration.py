"""From one allocation to another: which nodes move, and in which order, so that no layer is ever uncovered.

Owns the cost of a move (layers to load) and the make-before-break order. Knows neither why the allocation changes
(`target`) nor how a node loads weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from swarm.planner.rebalancing.assignment import min_cost_assignment
from swarm.types import LayerSpan, PeerId, coverage

IMPOSSIBLE = 1 << 40


@dataclass(frozen=True, slots=True)
class SpanMove:
    """A node changes its layers; `old` None: it had none. `overlap`: there is room to serve `old` while it loads."""

    peer: PeerId
    old: LayerSpan | None
    new: LayerSpan
    overlap: bool = False

    def __str__(self) -> str:
        return f"{self.peer}: {self.old or 'nothing'} -> {self.new}"


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """`waves`: moves that may go on at the same time, wave after wave; each wave once the one before serves.

    `held_back`: moves that would leave a layer without a node in any order; their nodes stay where they are.
    """

    waves: tuple[tuple[SpanMove, ...], ...]
    held_back: tuple[SpanMove, ...]


def relabel_equivalent(
    old: Mapping[PeerId, LayerSpan],
    new: Mapping[PeerId, LayerSpan | None],
    alike: Mapping[PeerId, Hashable],
    capacity: Mapping[PeerId, int],
) -> dict[PeerId, LayerSpan]:
    """The spans of `new` reassigned among nodes that are `alike`, so that the fewest layers must be loaded.

    Nodes are alike if they could swap their spans without harm, as far as `capacity` allows. None in `new`: there is no
    span for one of them; the node it is assigned to stays where it is, and is left out if it had no layers. Among
    assignments that load equally much, the fewest nodes change at all; minimal by assignment in each class.
    """
    classes: defaultdict[Hashable, list[PeerId]] = defaultdict(list)
    for peer in sorted(new):
        classes[alike[peer]].append(peer)
    result: dict[PeerId, LayerSpan] = {}
    for peers in classes.values():
        spans = [new[peer] for peer in peers]
        cost = [[_move_cost(old.get(peer), span, capacity[peer], len(peers)) for span in spans] for peer in peers]
        for peer, place in zip(peers, min_cost_assignment(np.array(cost, np.int64)), strict=True):
            span = spans[place] or old.get(peer)
            if span is not None:
                result[peer] = span
    return dict(sorted(result.items()))


def _move_cost(old: LayerSpan | None, new: LayerSpan | None, capacity: int, nodes: int) -> int:
    if new is None or old == new:
        return 0
    return 1 + layers_to_load(old, new) * (nodes + 1) if len(new) <= capacity else IMPOSSIBLE


def layers_to_load(old: LayerSpan | None, new: LayerSpan) -> int:
    """Layers of `new` that a node which holds `old` has to load."""
    if old is None:
        return len(new)
    return len(new) - max(0, min(old.end, new.end) - max(old.start, new.start))


def list_moves(
    old: Mapping[PeerId, LayerSpan], new: Mapping[PeerId, LayerSpan], capacity: Mapping[PeerId, int]
) -> list[SpanMove]:
    """The nodes whose span changes, by peer id. `capacity`: layers each can hold."""
    moves = []
    for peer, span in sorted(new.items()):
        before = old.get(peer)
        if before != span:
            together = (len(before) if before else 0) + layers_to_load(before, span)
            moves.append(SpanMove(peer, before, span, overlap=together <= capacity[peer]))
    return moves


def migration_plan(
    serving: Mapping[PeerId, LayerSpan],
    moves: Sequence[SpanMove],
    num_layers: int,
    loading: Mapping[PeerId, LayerSpan] | None = None,
) -> MigrationPlan:
    """Order `moves` so that every layer covered by `serving` stays covered throughout.

    A node without room for both spans serves nothing while it loads; one with room drops its old layers only when it
    serves the new ones. Either way it does not count for the layers it drops, and for the new ones only once its wave
    is done. Each wave takes as many moves as are safe together, first those that fill gaps, then those that drop
    least. While there are layers that no node serves or loads, the swarm cannot answer anyway, so blocked moves then
    go all at once.
    """
    covered = np.array(coverage(serving.values(), num_layers), np.int64)
    pending = np.array(coverage((loading or {}).values(), num_layers), np.int64)
    waiting = list(moves)
    waves: list[tuple[SpanMove, ...]] = []
    while waiting:
        left = covered.copy()
        wave: list[SpanMove] = []
        for move in sorted(waiting, key=lambda m: _priority(m, covered)):
            dropped = _dropped_ranges(move) if move.peer in serving else []
            if all(left[a:b].min(initial=2) >= 2 for a, b in dropped):
                for a, b in dropped:
                    left[a:b] -= 1
                wave.append(move)
        if not wave:
            if (covered + pending).min(initial=1) > 0:
                break
            wave = list(waiting)
        for move in wave:
            waiting.remove(move)
            if move.old and move.peer in serving:
                covered[move.old.start : move.old.end] -= 1
            covered[move.new.start : move.new.end] += 1
        waves.append(tuple(sorted(wave, key=lambda m: m.peer)))
    return MigrationPlan(tuple(waves), tuple(waiting))


def _priority(move: SpanMove, covered: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[int, int, int, PeerId]:
    fills = int((covered[move.new.start : move.new.end] == 0).sum())
    dropped = sum(b - a for a, b in _dropped_ranges(move))
    return -fills, dropped, layers_to_load(move.old, move.new), move.peer


def _dropped_ranges(move: SpanMove) -> list[tuple[int, int]]:
    """Layers that lose this node when its move begins (or, if it has room for both, when it ends)."""
    old, new = move.old, move.new
    if old is None:
        return []
    if not move.overlap or new.end <= old.start or old.end <= new.start:
        return [(old.start, old.end)]
    return [(a, b) for a, b in ((old.start, new.start), (new.end, old.end)) if a < b]
