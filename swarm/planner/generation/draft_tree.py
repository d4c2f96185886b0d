"""The prediction tree: tokens that may come next, as the engine drafts, sends, accepts and drops them (PipeDec §3.3).

Owns the guesses below the last known token and the tree slots of the hops that hold them. Knows neither who drafted a
token nor when a step goes out.

The root is the last known token. It lies in the committed pages, or still in the tree slot it was guessed in; either
way its children have no parent slot, because the step that brings them commits the root first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

ROOT = -1
"""The parent slot of the root's children."""

NO_SLOT = -1

MedusaCandidates: TypeAlias = tuple[tuple[tuple[int, float], ...], ...]
"""For 1, 2, ... places on: (token, ln p), likeliest first."""


@dataclass(slots=True, eq=False)
class DraftNode:
    """One token after another, the `position`-th of the text. `score`: ln p of its path below the root of that time.

    `slot`: where the hops hold its keys and values, NO_SLOT before it was sent. `drawn`: the target's own token
    after it, None until the tail has said, and `hints` what the tail thinks comes after that. `asked`: the drafter
    was asked what follows. `open`: the part of belief that a more thorough question could still place.
    """

    token: int
    position: int
    parent: DraftNode | None = None
    path_logprob: float = 0.0
    slot: int = NO_SLOT
    sampled: int | None = None
    medusa_candidates: MedusaCandidates = ()
    expanded: bool = False
    unassigned_mass: float = 1.0
    children: dict[int, DraftNode] = field(default_factory=dict)

    def descendants(self) -> Iterator[DraftNode]:
        """Everything that hangs on this node, parents before children."""
        waiting = list(self.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())


class DraftTree:
    """Mutable. `advance` when the root's token was drawn, `add` guesses, `send` those worth sending."""

    def __init__(self, token: int, position: int) -> None:
        self.root = DraftNode(token, position)
        self._free: list[int] = []  # a heap: low slots keep the ancestor masks short
        self._used = 0  # slots ever handed out

    def __len__(self) -> int:
        return sum(1 for _ in self.root.descendants())

    @property
    def num_sent(self) -> int:
        """Nodes that lie in tree slots of the hops, the root's own slot not counted."""
        return sum(1 for node in self.root.descendants() if node.slot != NO_SLOT)

    def path(self, node: DraftNode) -> tuple[int, ...]:
        """The tokens from the root's child down to `node`; empty for the root."""
        tokens: list[int] = []
        while node is not self.root:
            assert node.parent is not None  # only the root has none
            tokens.append(node.token)
            node = node.parent
        return tuple(reversed(tokens))

    def advance(self, token: int) -> int:
        """`token` followed the root: it becomes the root, with whatever was guessed below it.

        -> the slot that holds the new root, NO_SLOT if none does. Slots are free for others from here on: whatever
        step uses them next commits the root first, and with it the hops drop what was guessed wrong.
        """
        old, child = self.root, self.root.children.pop(token, None)
        for node in old.descendants():
            self._free_slots(node)
        if child is None:
            self.root = DraftNode(token, old.position + 1)
            return NO_SLOT
        self.root, child.parent = child, None
        slot = child.slot
        if slot != NO_SLOT:
            heapq.heappush(self._free, slot)
        return slot

    def forget_slots(self) -> None:
        """The hops hold none of this any more, for they have lost it or were told to drop it; the guesses stay."""
        for node in (self.root, *self.root.descendants()):
            node.slot, node.sampled = NO_SLOT, None
        self._free, self._used = [], 0

    def add(self, parent: DraftNode, candidates: Iterable[tuple[int, float]], still_open: float = 0.0) -> None:
        """What a drafter says follows `parent`: (token, ln p) each. What it says now counts, whatever was said before.

        `still_open`: the belief that it would place only if asked more thoroughly.
        """
        parent.expanded, parent.unassigned_mass = True, still_open
        for token, logprob in candidates:
            score = parent.path_logprob + min(0.0, logprob)
            child = parent.children.get(token)
            if child is None:
                parent.children[token] = DraftNode(token, parent.position + 1, parent, score)
            else:
                for node in (*child.descendants(), child):
                    node.path_logprob += score - child.path_logprob

    def mark_terminal(self, node: DraftNode) -> None:
        """Nothing can follow `node`."""
        node.expanded, node.unassigned_mass = True, 0.0

    def path_prob(self, node: DraftNode) -> float:
        """That its path comes true, as far as the drafter's odds can be trusted."""
        return math.exp(node.path_logprob - self.root.path_logprob)

    def most_uncertain(self, rows: int, least: float, end: int) -> list[DraftNode]:
        """Up to `rows` nodes about which a more thorough question could place most belief, at least `least` each."""
        nodes = [
            (self.path_prob(node) * node.unassigned_mass, node)
            for node in (self.root, *self.root.descendants())
            if node.unassigned_mass > 0
        ]
        good = [(belief, i) for i, (belief, node) in enumerate(nodes) if belief >= least and node.position + 1 < end]
        return [nodes[i][1] for _, i in heapq.nlargest(rows, good)]

    def to_expand(self, rows: int, floor: float, end: int, *, sent_only: bool) -> list[DraftNode]:
        """The nodes to ask a drafter about: not asked yet, and good enough that a child may be among the next `rows`.

        `floor`: ln p below which a node is not worth its row. `end`: the position that no child may have.
        `sent_only`: only below nodes that the hops hold.
        """
        waiting = heapq.nlargest(rows, self._unsent(floor), key=_by_path_logprob)
        bar = max(floor, waiting[-1].path_logprob - self.root.path_logprob if len(waiting) == rows else -math.inf)
        nodes = [
            node
            for node in (self.root, *self.root.descendants())
            if not node.expanded
            and node.position + 1 < end
            and node.path_logprob - self.root.path_logprob >= bar
            and (not sent_only or node is self.root or node.slot != NO_SLOT)
        ]
        return heapq.nlargest(rows, nodes, key=_by_path_logprob)

    def take_for_step(self, rows: int, levels: int, floor: float, reach: float = 0.0) -> list[DraftNode]:
        """Give slots to the up to `rows` likeliest nodes that the hops lack, at most `levels` below what they hold.

        None at all if the chance that the text comes to the first of them on a path is below `reach`. Parents before
        children: a step's rows may hang on each other.
        """
        chosen: list[DraftNode] = []
        reached = 0.0
        ready = [(-node.path_logprob, i, node, 1) for i, node in enumerate(self._ready())]
        heapq.heapify(ready)
        order = len(ready)
        while ready and len(chosen) < rows:
            _, _, node, level = heapq.heappop(ready)
            if node.path_logprob - self.root.path_logprob < floor:
                break
            chosen.append(node)
            reached += self.path_prob(node) if level == 1 else 0.0
            if level < levels:
                for child in node.children.values():
                    heapq.heappush(ready, (-child.path_logprob, order, child, level + 1))
                    order += 1
        if reached < reach:
            return []
        for node in chosen:
            node.slot = self._allocate_slot()
        return chosen

    def parent_slots(self, nodes: Sequence[DraftNode]) -> tuple[int, ...]:
        """Each node's parent as a step names it."""
        return tuple(ROOT if node.parent is self.root or node.parent is None else node.parent.slot for node in nodes)

    def _ready(self) -> Iterator[DraftNode]:
        """Nodes that the hops lack and whose parent they hold, or get with the next step's line or commit."""
        for parent in (self.root, *self.root.descendants()):
            if parent is self.root or parent.slot != NO_SLOT:
                yield from (child for child in parent.children.values() if child.slot == NO_SLOT)

    def _unsent(self, floor: float) -> Iterator[DraftNode]:
        least = floor + self.root.path_logprob
        return (node for node in self.root.descendants() if node.slot == NO_SLOT and node.path_logprob >= least)

    def _allocate_slot(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._used += 1
        return self._used - 1

    def _free_slots(self, node: DraftNode) -> None:
        if node.slot != NO_SLOT:
            heapq.heappush(self._free, node.slot)
            node.slot = NO_SLOT


def _by_path_logprob(node: DraftNode) -> float:
    return node.path_logprob
