"""A whole draft tree of a drafter that reads hidden states, and how long one takes.

Owns which nodes a tree has: a few of the likeliest paths go on at every level, and of all that was proposed the
likeliest nodes are kept (EAGLE-2, Li et al. 2024, §4: expansion and reranking). Knows neither texts nor peers.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from swarm.types import TappedRows
from swarm_kernels.draft.session import DraftCachePolicy, DraftCandidates, Path
from swarm_kernels.draft.tapped import TappedDraft
from swarm_kernels.runtime.taps import encode


@dataclass(frozen=True, slots=True)
class TreeBounds:
    """`nodes`, `depth`: of a tree, at most. `beam`: paths that go on at a level: more take longer and miss less.
    `width`: candidates of each. `min_path_prob`: a path that is less likely goes no further: a pass costs all the
    same."""

    nodes: int = 32
    depth: int = 6
    beam: int = 4
    width: int = 4
    min_path_prob: float = 0.02

    @property
    def cache(self) -> DraftCachePolicy:
        """For a session that only grows such trees."""
        return DraftCachePolicy(max_tree_slots=max(16, self.beam * self.depth))


class DraftedTree(NamedTuple):
    """`parents`: of each node, the index of an earlier one, or -1. `logprobs`: ln of its probability after it."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    logprobs: tuple[float, ...]


class Proposer(Protocol):
    """See `TappedSession.propose`."""

    def propose(self, paths: Sequence[Path], width: int) -> list[DraftCandidates]: ...


def grow(session: Proposer, shape: TreeBounds) -> DraftedTree:
    """The tree below a session's text; without nodes where it has nothing to say. Raises DrafterFailed."""
    found: list[tuple[float, Path, float]] = []  # ln p of a path, the path, and of its last token alone
    ends: list[tuple[float, Path]] = [(0.0, ())]
    least = math.log(shape.min_path_prob) if shape.min_path_prob > 0 else -math.inf
    for _ in range(shape.depth):
        proposed = session.propose([path for _, path in ends], shape.width)
        level = [
            (above + min(0.0, logprob), (*path, token), min(0.0, logprob))
            for (above, path), candidates in zip(ends, proposed, strict=True)
            for token, logprob in candidates
        ]
        level.sort(key=lambda node: (-node[0], node[1]))
        found += level
        ends = [(total, path) for total, path, _ in level[: shape.beam] if total >= least]
        if not ends:
            break
    found.sort(key=lambda node: (-node[0], len(node[1]), node[1]))  # parents come before their children
    kept = found[: shape.nodes]
    index = {path: at for at, (_, path, _) in enumerate(kept)}
    return DraftedTree(
        tuple(path[-1] for _, path, _ in kept),
        tuple(index[path[:-1]] if len(path) > 1 else -1 for _, path, _ in kept),
        tuple(logprob for _, _, logprob in kept),
    )


def measure_tree_ms(
    draft: TappedDraft, shape: TreeBounds = TreeBounds(), clock: Callable[[], float] = time.perf_counter
) -> float:
    """What a full tree takes below a short text, with the rows of one more token. Raises DrafterFailed, OutOfMemory."""
    full = TreeBounds(shape.nodes, shape.depth, shape.beam, shape.width, 0.0)
    generator = torch.Generator().manual_seed(1)
    session = draft.new_session(_TIMED_TEXT + 64, full.cache)
    session.reset([1] * _TIMED_TEXT)
    times = []
    for turn in range(_TIMED_TREES + 1):
        known = range(_TIMED_TEXT - 1) if turn == 0 else range(_TIMED_TEXT + turn - 2, _TIMED_TEXT + turn - 1)
        if turn:
            session.extend([1])
        session.add(_random_rows(draft, known, generator))
        started = clock()
        grow(session, full)
        times.append((clock() - started) * 1e3)
    return statistics.median(times[1:])


_TIMED_TEXT, _TIMED_TREES = 32, 5


def _random_rows(draft: TappedDraft, positions: range, generator: torch.Generator) -> TappedRows:
    taps = draft.taps
    rows = {}
    for position in positions:
        states = torch.randn(len(taps.layers), taps.hidden_size, generator=generator)
        rows[position] = tuple(encode(states[i : i + 1], taps.bits) for i in range(len(taps.layers)))
    return rows
