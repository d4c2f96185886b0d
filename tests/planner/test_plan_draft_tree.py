"""The draft tree against plain definitions on random trees."""

from __future__ import annotations

import math
import random

import pytest

from swarm.planner.generation.draft_tree import NO_SLOT, ROOT, DraftNode, DraftTree


def random_tree(rng: random.Random, nodes: int) -> DraftTree:
    tree = DraftTree(0, 10)
    everyone = [tree.root]
    while len(tree) < nodes:
        parent = rng.choice(everyone)
        tree.add(parent, [(rng.randrange(50), -rng.random() * 2) for _ in range(rng.randint(1, 3))])
        everyone = [tree.root, *tree.root.descendants()]
    return tree


def everyone(tree: DraftTree) -> list[DraftNode]:
    return [tree.root, *tree.root.descendants()]


def slots(tree: DraftTree) -> list[int]:
    return [node.slot for node in tree.root.descendants() if node.slot != NO_SLOT]


@pytest.mark.parametrize("seed", range(50))
def test_paths_positions_and_scores_follow_from_the_parents(seed: int) -> None:
    tree = random_tree(random.Random(seed), 20)
    for node in tree.root.descendants():
        assert node.parent is not None
        assert tree.path(node) == (*tree.path(node.parent), node.token)
        assert node.position == tree.root.position + len(tree.path(node))
        assert node.path_logprob <= node.parent.path_logprob
    assert tree.path(tree.root) == ()


@pytest.mark.parametrize("seed", range(100))
def test_the_likeliest_nodes_within_the_depth_are_sent(seed: int) -> None:
    rng = random.Random(seed)
    tree = random_tree(rng, 25)
    for _ in range(4):
        before = {node for node in everyone(tree) if node.slot != NO_SLOT} | {tree.root}
        rows, levels, floor = rng.randint(1, 8), rng.randint(1, 4), rng.choice([-math.inf, -1.5])
        chosen = tree.take_for_step(rows, levels, floor)
        assert len(chosen) <= rows
        for i, node in enumerate(chosen):
            assert node.parent in before or node.parent in chosen[:i], "parents come before children"
            assert node.path_logprob >= floor
        left_out = [
            node
            for node in tree.root.descendants()
            if node.slot == NO_SLOT and (node.parent in before) and node.path_logprob >= floor
        ]
        if left_out and chosen:
            assert len(chosen) == rows, "rows must not be wasted while drafts are unsent"
            assert max(n.path_logprob for n in left_out) <= min(n.path_logprob for n in chosen if n.parent in before)
        assert len(set(slots(tree))) == len(slots(tree)), "a slot holds one node"
        for node, parent in zip(chosen, tree.parent_slots(chosen), strict=True):
            assert node.parent is not None
            assert parent == (ROOT if node.parent is tree.root else node.parent.slot)


def depth_within(tree: DraftTree, chosen: list[DraftNode], node: DraftNode) -> int:
    depth = 0
    while node is not tree.root and node in chosen:
        depth += 1
        assert node.parent is not None
        node = node.parent
    return depth


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_a_step_has_at_most_so_many_levels_below_the_sent_nodes(levels: int) -> None:
    tree = random_tree(random.Random(levels), 40)
    chosen = tree.take_for_step(100, levels, -math.inf)
    assert max(depth_within(tree, chosen, node) for node in chosen) == levels


@pytest.mark.parametrize("seed", range(100))
def test_advancing_keeps_the_subtree_and_frees_the_rest(seed: int) -> None:
    rng = random.Random(seed)
    tree = random_tree(rng, 25)
    tree.take_for_step(12, 5, -math.inf)
    child = rng.choice(list(tree.root.children.values()))
    kept = {(n.token, n.position, n.slot) for n in child.descendants()}
    position, slot = tree.root.position, child.slot
    assert tree.advance(child.token) == slot
    assert tree.root is child
    assert tree.root.position == position + 1
    assert {(n.token, n.position, n.slot) for n in tree.root.descendants()} == kept
    tree.take_for_step(30, 9, -math.inf)
    assert len(set(slots(tree))) == len(slots(tree))
    assert max(slots(tree), default=0) < 40, "slots are reused"
    assert tree.advance(999) == NO_SLOT
    assert (tree.root.token, len(tree)) == (999, 0)


def test_forgetting_slots_keeps_the_drafts() -> None:
    tree = random_tree(random.Random(5), 15)
    first = [n.token for n in tree.take_for_step(6, 3, -math.inf)]
    tree.forget_slots()
    assert slots(tree) == []
    assert len(tree) >= 15
    assert [n.token for n in tree.take_for_step(6, 3, -math.inf)] == first


def test_only_nodes_whose_children_may_be_sent_are_expanded() -> None:
    tree = DraftTree(0, 0)
    assert tree.to_expand(4, -math.inf, 99, sent_only=False) == [tree.root]
    tree.add(tree.root, [(1, -0.1), (2, -1.0), (3, -3.0)])
    ahead = tree.to_expand(2, -math.inf, 99, sent_only=False)
    assert [n.token for n in ahead] == [1, 2], "two rows: nothing below the third can be among them"
    assert [n.token for n in tree.to_expand(8, -2.0, 99, sent_only=False)] == [1, 2]
    assert tree.to_expand(8, -math.inf, 99, sent_only=True) == []
    tree.take_for_step(1, 1, -math.inf)
    assert [n.token for n in tree.to_expand(8, -math.inf, 99, sent_only=True)] == [1]
    assert tree.to_expand(8, -math.inf, 2, sent_only=True) == [], "no child may stand at the end"


def test_later_probabilities_apply_to_the_subtree() -> None:
    tree = DraftTree(1, 0)
    tree.add(tree.root, [(2, -1.0)], unassigned_mass=0.6)
    child = tree.root.children[2]
    tree.add(child, [(3, -0.5)])
    tree.add(tree.root, [(2, -0.25), (4, -2.0)])
    assert (child.path_logprob, child.children[3].path_logprob) == (-0.25, -0.75)
    assert tree.root.unassigned_mass == 0.0
    assert set(tree.root.children) == {2, 4}


def test_the_most_uncertain_nodes_have_most_unassigned_mass() -> None:
    tree = DraftTree(1, 0)
    tree.add(tree.root, [(2, math.log(0.5)), (3, math.log(0.25))], unassigned_mass=0.1)
    likely, other = tree.root.children[2], tree.root.children[3]
    tree.add(likely, [(5, -0.1)], unassigned_mass=0.9)
    assert tree.most_uncertain(2, 0.0, 99) == [likely.children[5], likely]
    assert tree.most_uncertain(9, 0.2, 99)[-1] is other
    assert tree.most_uncertain(9, 0.3, 99) == [likely.children[5], likely]
    tree.mark_terminal(likely)
    assert likely not in tree.most_uncertain(9, 0.0, 99)
    assert tree.most_uncertain(9, 0.0, 1) == [], "nothing may stand at the end"


def test_a_step_that_is_unlikely_to_be_reached_is_not_sent() -> None:
    tree = DraftTree(1, 0)
    tree.add(tree.root, [(2, math.log(0.2)), (3, math.log(0.15))])
    tree.add(tree.root.children[2], [(4, 0.0)])
    assert tree.take_for_step(8, 4, -math.inf, min_path_prob=0.4) == []
    assert tree.num_sent == 0
    assert len(tree.take_for_step(8, 4, -math.inf, min_path_prob=0.3)) == 3
