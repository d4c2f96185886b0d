"""Trees of drafters: against a plain search of all paths, on random drafters."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from swarm_kernels.draft.session import DraftCandidates
from swarm_kernels.draft.tree import DraftedTree, TreeBounds, grow

Path = tuple[int, ...]


class RandomProposer:
    """The same candidates for the same path, some with none."""

    def __init__(self, seed: int) -> None:
        self.seed, self.passes = seed, 0

    def propose(self, paths: Sequence[Path], width: int) -> list[DraftCandidates]:
        self.passes += 1
        return [self.candidates(path)[:width] for path in paths]

    def candidates(self, path: Path) -> DraftCandidates:
        rng = random.Random(f"{self.seed} {path}")
        tokens, left = rng.sample(range(9), rng.randint(0, 4)), 1.0
        found = []
        for token in tokens:
            p = left * rng.uniform(0.2, 0.9)
            found.append((token, math.log(p)))
            left -= p
        return sorted(found, key=lambda pair: -pair[1])


def paths_of(tree: DraftedTree) -> list[Path]:
    paths: list[Path] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        assert -1 <= parent < len(paths)
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@given(st.integers(0, 10**9), st.integers(1, 12), st.integers(1, 4))
def test_without_a_beam_it_has_the_likeliest_nodes_of_all(seed: int, nodes: int, depth: int) -> None:
    proposer = RandomProposer(seed)
    every: dict[Path, float] = {(): 0.0}
    for path in (p for n in range(depth) for p in itertools.product(range(9), repeat=n)):
        for token, logprob in proposer.candidates(path) if path in every else ():
            every[*path, token] = every[path] + logprob
    del every[()]
    best = sorted(every.values(), reverse=True)[:nodes]
    tree = grow(proposer, TreeBounds(nodes, depth, 10**6, 9, 0.0))
    paths = paths_of(tree)
    assert len(set(paths)) == len(paths)
    assert [round(every[path], 9) for path in paths] == [round(total, 9) for total in best]
    assert all(abs(every[p] - every.get(p[:-1], 0.0) - lp) < 1e-9 for p, lp in zip(paths, tree.logprobs, strict=True))


@given(st.integers(0, 10**9), st.integers(1, 40), st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
def test_it_keeps_its_bounds(seed: int, nodes: int, depth: int, beam: int, width: int) -> None:
    proposer = RandomProposer(seed)
    paths = paths_of(grow(proposer, TreeBounds(nodes, depth, beam, width)))
    assert len(paths) <= nodes
    assert max(map(len, paths), default=0) <= depth
    assert proposer.passes <= depth
    assert all(sum(path[:-1] == above for path in paths) <= width for above in {path[:-1] for path in paths})


def test_unlikely_paths_take_no_pass() -> None:
    class Unsure(RandomProposer):
        def candidates(self, path: Path) -> DraftCandidates:
            return [(token, math.log(0.1)) for token in range(4)]

    unsure = Unsure(0)
    grow(unsure, TreeBounds(32, 6, 4, 4, 0.02))
    assert unsure.passes == 2  # 0.1, then 0.01
