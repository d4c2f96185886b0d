"""Draft trees against plain definitions on random trees, and ARCA's trees against every tree of the same width."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import UsageError
from swarm.plan.tree import ROOT, DraftTree, TreeRows


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    size = draw(st.integers(0, 24))
    parents = [draw(st.integers(ROOT, node - 1)) for node in range(size)]
    tokens = [draw(st.integers(0, 3)) * 100 + node for node in range(size)]
    return DraftTree(tuple(tokens), tuple(parents), tuple(-draw(st.floats(0, 5)) for _ in range(size)))


few = settings(max_examples=50, deadline=None)


def ancestors(tree: DraftTree, node: int) -> set[int]:
    return set() if node == ROOT else {node} | ancestors(tree, tree.parents[node])


@few
@given(trees())
def test_what_follows_from_the_parents(tree: DraftTree) -> None:
    for node in range(len(tree)):
        above = ancestors(tree, node)
        assert set(tree.path(node)) == above
        assert tree.depths()[node] == len(above)
        assert tree.masks()[node] == sum(1 << i for i in above)
        assert tree.cumulative()[node] == pytest.approx(sum(tree.logprobs[i] for i in above))
        assert tree.child(tree.parents[node], tree.tokens[node]) == node
    assert sorted(node for level in tree.levels() for node in level) == list(range(len(tree)))
    assert all(tree.depths()[node] == d for d, level in enumerate(tree.levels(), 1) for node in level)


@few
@given(trees(), st.randoms(use_true_random=False))
def test_masks_and_rows_follow_the_slots(tree: DraftTree, rng: random.Random) -> None:
    slots = rng.sample(range(200), len(tree))
    for node, mask in enumerate(tree.masks(slots)):
        assert mask == sum(1 << slots[i] for i in ancestors(tree, node))
    rows = tree.flatten(slots)
    assert rows.slots == tuple(slots)
    for token, parent, slot in zip(rows.tokens, rows.parents, rows.slots, strict=True):
        node = slots.index(slot)
        assert token == tree.tokens[node]
        assert parent == (ROOT if tree.parents[node] == ROOT else slots[tree.parents[node]])
    if tree.levels():
        last = tree.levels()[-1]
        assert tree.flatten(slots, last) == TreeRows(
            tuple(rows.tokens[i] for i in last), tuple(rows.parents[i] for i in last), tuple(slots[i] for i in last)
        )


@few
@given(trees(), st.data())
def test_reroot_keeps_what_hangs_below(tree: DraftTree, data: st.DataObject) -> None:
    if not len(tree):
        return
    node = data.draw(st.integers(0, len(tree) - 1))
    below, kept = tree.reroot(node)
    assert kept == tuple(i for i in range(len(tree)) if i != node and node in ancestors(tree, i))
    assert below.tokens == tuple(tree.tokens[i] for i in kept)
    for new, old in enumerate(kept):
        assert [below.tokens[i] for i in below.path(new)] == [tree.tokens[i] for i in tree.path(old) if i in set(kept)]


@few
@given(trees(), st.data())
def test_prune_drops_descendants_too(tree: DraftTree, data: st.DataObject) -> None:
    dropped = data.draw(st.sets(st.integers(0, max(0, len(tree) - 1))))
    pruned, kept = tree.prune(dropped)
    assert kept == tuple(i for i in range(len(tree)) if not ancestors(tree, i) & dropped)
    for new, old in enumerate(kept):
        assert [pruned.tokens[i] for i in pruned.path(new)] == [tree.tokens[i] for i in tree.path(old)]


@few
@given(trees(), st.integers(0, 30))
def test_the_best_nodes_come_with_their_ancestors(tree: DraftTree, count: int) -> None:
    best = tree.best(count)
    assert len(best) == min(count, len(tree))
    sums = tree.cumulative()
    assert sorted((sums[i] for i in best), reverse=True) == sorted(sums, reverse=True)[: len(best)]
    assert tree.select(best).tokens == tuple(tree.tokens[i] for i in best)  # raises if a parent is missing


@few
@given(trees(), st.data())
def test_grow_takes_the_most_probable_paths(tree: DraftTree, data: st.DataObject) -> None:
    candidates = data.draw(
        st.lists(st.tuples(st.integers(ROOT, len(tree) - 1), st.integers(0, 330), st.floats(-5, 0)), max_size=12)
    )
    width = data.draw(st.integers(0, 8))
    grown = tree.grow(candidates, width)
    assert grown.tokens[: len(tree)] == tree.tokens
    known = set(zip(tree.parents, tree.tokens, strict=True))
    fresh: dict[tuple[int, int], float] = {}
    for parent, token, logprob in candidates:
        if (parent, token) not in known:
            fresh.setdefault((parent, token), logprob)
    sums = tree.cumulative()
    totals = sorted((p + (sums[parent] if parent != ROOT else 0.0) for (parent, _), p in fresh.items()), reverse=True)
    added = sorted(grown.cumulative()[len(tree) :], reverse=True)
    assert added == pytest.approx(totals[:width])


def test_growing_by_levels_stays_breadth_first() -> None:
    rng, tree = random.Random(0), DraftTree()
    for _ in range(5):
        last = tree.levels()[-1] if len(tree) else (ROOT,)
        tree = tree.grow([(node, rng.randrange(1000), -rng.random()) for node in last for _ in range(4)], 6)
    assert list(tree.depths()) == sorted(tree.depths())
    assert [len(level) for level in tree.levels()] == [4, 6, 6, 6, 6]


@few
@given(trees(), st.data())
def test_only_tokens_the_target_draws_are_accepted(tree: DraftTree, data: st.DataObject) -> None:
    """The target's text is fixed; whatever the tree, what is settled is a prefix of it, one longer than the match."""
    truth: dict[int, int] = {}

    def draw(node: int) -> int:
        drafted = [tree.tokens[i] for i in range(len(tree)) if tree.parents[i] == node]
        truth[node] = data.draw(st.sampled_from([*drafted, -7]))
        return truth[node]

    accepted, last = tree.accept(draw)
    assert [tree.parents[node] for node in accepted] == [ROOT, *accepted[:-1]][: len(accepted)]
    for parent, node in zip([ROOT, *accepted], accepted, strict=False):
        assert truth[parent] == tree.tokens[node]
    end = accepted[-1] if accepted else ROOT
    assert last == truth[end]
    assert tree.child(end, last) is None


def test_paths_are_merged_where_they_begin_alike() -> None:
    tree = DraftTree.of_paths([[5, 6, 7], [5, 8], [9], [5, 6, 7, 1]], [[-1, -2, -3], [-1, -4], [-5], [-1, -2, -3, -6]])
    assert tree.tokens == (5, 6, 7, 8, 9, 1)
    assert tree.parents == (ROOT, 0, 1, 0, ROOT, 2)
    assert tree.cumulative() == (-1, -3, -6, -5, -5, -12)
    assert DraftTree.of_paths([[1, 2], []]).logprobs == (0.0, 0.0)


@pytest.mark.parametrize(
    "arrays",
    [
        ((1,), (), (0.0,)),
        ((1,), (0,), (0.0,)),
        ((1,), (-2,), (0.0,)),
        ((1, 1), (-1, -1), (0.0, 0.0)),
        ((1,), (-1,), (0.5,)),
        ((1,), (-1,), (math.nan,)),
    ],
)
def test_what_is_no_tree_is_refused(arrays: tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]) -> None:
    with pytest.raises(UsageError):
        DraftTree(*arrays)


def test_a_node_is_not_kept_without_its_parent() -> None:
    tree = DraftTree.of_paths([[1, 2]])
    with pytest.raises(UsageError, match="parent"):
        tree.select([1])
    with pytest.raises(UsageError, match="candidate's parent"):
        tree.grow([(5, 1, 0.0)], 1)
