"""The draft tree: draft tokens after the last known token, as they are proposed, sent, accepted and dropped
(PipeDec §3.3).

Owns the nodes below the last known token and the hops' tree slots that hold them. Does not know the drafter or when
a step is sent.

The root is the last known token. It is in the committed KV blocks, or still in the tree slot of its draft; either way
its children have no parent slot, because the step that brings them commits the root first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from swarm.types import TokenLogprobs

ROOT = -1
"""The parent slot of the root's children."""

NO_SLOT = -1

_NEARLY_CERTAIN = math.log(0.9)  # after its parent
_WORTH_A_ROW = math.log(0.5)  # the whole path, where a forecast would send fewer rows

MedusaCandidates: TypeAlias = tuple[tuple[tuple[int, float], ...], ...]
"""For 1, 2, ... positions ahead: (token, ln p), likeliest first."""


@dataclass(slots=True, eq=False)
class DraftNode:
    """A draft token at `position` of the text. `path_logprob`: ln p of its path below the root of that time.

    `slot`: the tree slot of its keys and values at the hops, NO_SLOT before it was sent. `sampled`: the target model's
    token after it, None before the result, `logprobs` those of that token, if asked for, and `medusa_candidates` what
    the tail's Medusa heads propose after it.
    `expanded`: drafts after it were requested. `unassigned_mass`: the probability that its children do not cover yet
    and that a call of the draft model could assign.
    """

    token: int
    position: int
    parent: DraftNode | None = None
    path_logprob: float = 0.0
    slot: int = NO_SLOT
    sampled: int | None = None
    logprobs: TokenLogprobs | None = None
    medusa_candidates: MedusaCandidates = ()
    expanded: bool = False
    unassigned_mass: float = 1.0
    children: dict[int, DraftNode] = field(default_factory=dict)

    @property
    def nearly_certain(self) -> bool:
        """Whether it follows its parent almost for sure, as where a grammar forces it."""
        return self.parent is not None and self.path_logprob - self.parent.path_logprob >= _NEARLY_CERTAIN

    def descendants(self) -> Iterator[DraftNode]:
        """The subtree below this node, parents before children."""
        waiting = list(self.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())


class DraftTree:
    """Mutable. `add` candidates, `take_for_step` those worth sending, `advance` with every sampled token."""

    def __init__(self, token: int, position: int) -> None:
        self.root = DraftNode(token, position)
        self._free: list[int] = []  # a heap: low slots keep the ancestor masks short
        self._used = 0  # slots ever allocated

    def __len__(self) -> int:
        return sum(1 for _ in self.root.descendants())

    @property
    def num_sent(self) -> int:
        """Nodes in tree slots of the hops, not counting the root."""
        return sum(1 for node in self.root.descendants() if node.slot != NO_SLOT)

    def path(self, node: DraftNode) -> tuple[int, ...]:
        """The tokens from the root's child down to `node`; empty for the root."""
        tokens: list[int] = []
        while node is not self.root:
            assert node.parent is not None  # only the root has none
            tokens.append(node.token)
            node = node.parent
        return tuple(reversed(tokens))

    def follow(self, sampled: Mapping[DraftNode, int], ends: Collection[int]) -> tuple[int, ...]:
        """The tokens sampled from the root down, where `sampled` had come too, until a draft differs or one of `ends`
        comes. Changes nothing."""
        tokens: list[int] = []
        node: DraftNode | None = self.root
        while node is not None and (token := sampled.get(node, node.sampled)) is not None:
            tokens.append(token)
            node = None if token in ends else node.children.get(token)
        return tuple(tokens)

    def advance(self, token: int) -> int:
        """`token` follows the root: it becomes the root, and its subtree is kept.

        -> the slot that holds the new root, NO_SLOT if none does. Slots are free for others from here on: the step that
        uses them next commits the root first, and with that the hops drop the rejected nodes.
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
        """The hops no longer hold any of the nodes: they were lost or dropped. The draft tokens stay."""
        for node in (self.root, *self.root.descendants()):
            node.slot, node.sampled = NO_SLOT, None
        self._free, self._used = [], 0

    def add(self, parent: DraftNode, candidates: Iterable[tuple[int, float]], unassigned_mass: float = 0.0) -> None:
        """Set the candidates (token, ln p) after `parent`; new probabilities replace earlier ones.

        `unassigned_mass`: the probability that only a call of the draft model can assign.
        """
        parent.expanded, parent.unassigned_mass = True, unassigned_mass
        for token, logprob in candidates:
            path_logprob = parent.path_logprob + min(0.0, logprob)
            child = parent.children.get(token)
            if child is None:
                parent.children[token] = DraftNode(token, parent.position + 1, parent, path_logprob)
            else:
                for node in (*child.descendants(), child):  # the child last: the others need its old value
                    node.path_logprob += path_logprob - child.path_logprob

    def mark_terminal(self, node: DraftNode) -> None:
        """No token can follow `node`."""
        node.expanded, node.unassigned_mass = True, 0.0

    def path_prob(self, node: DraftNode) -> float:
        """The drafter's probability that the target model samples the path to `node`."""
        return math.exp(node.path_logprob - self.root.path_logprob)

    def most_uncertain(self, rows: int, min_mass: float, end: int) -> list[DraftNode]:
        """Up to `rows` nodes for which the draft model could assign most probability, at least `min_mass` each."""
        nodes = [
            (self.path_prob(node) * node.unassigned_mass, node)
            for node in (self.root, *self.root.descendants())
            if node.unassigned_mass > 0
        ]
        eligible = [(mass, i) for i, (mass, node) in enumerate(nodes) if mass >= min_mass and node.position + 1 < end]
        return [nodes[i][1] for _, i in heapq.nlargest(rows, eligible)]

    def to_expand(self, rows: int, min_logprob: float, end: int, *, sent_only: bool) -> list[DraftNode]:
        """The nodes to request drafts for: not expanded, and likely enough for a child to be among the next `rows`.

        `min_logprob`: nodes below it are not sent. `end`: the first position beyond the text. `sent_only`: only nodes
        that the hops hold.
        """
        waiting = heapq.nlargest(rows, self._unsent(min_logprob), key=_by_path_logprob)
        bar = max(min_logprob, waiting[-1].path_logprob - self.root.path_logprob if len(waiting) == rows else -math.inf)
        nodes = [
            node
            for node in (self.root, *self.root.descendants())
            if not node.expanded
            and node.position + 1 < end
            and node.path_logprob - self.root.path_logprob >= bar
            and (not sent_only or node is self.root or node.slot != NO_SLOT)
        ]
        return heapq.nlargest(rows, nodes, key=_by_path_logprob)

    def ends_of_runs(self, rows: int, end: int) -> list[DraftNode]:
        """The nodes to request drafts for beyond a step's depth: where runs of nearly certain nodes end that the hops
        do not hold. None once `rows` of them are known. `end`: as in `to_expand`."""
        run = [node for node in self._ready() if node.nearly_certain]
        for node in run:  # grows
            run += [child for child in node.children.values() if child.nearly_certain]
        return [node for node in run if not node.expanded and node.position + 1 < end] if len(run) < rows else []

    def take_for_step(
        self, rows: int, max_depth: int, min_logprob: float, min_path_prob: float = 0.0, run_rows: int = 0
    ) -> list[DraftNode]:
        """Allocate slots for the up to `rows` likeliest unsent nodes, at most `max_depth` levels below the sent ones.

        `run_rows`: up to so many if the text reaches them nearly for sure, however deep they are. Empty if the text
        reaches the topmost of them with a probability below `min_path_prob` in all. Parents come before their children.
        """
        chosen: list[DraftNode] = []
        reached = 0.0
        ready = [(-node.path_logprob, i, node, 1) for i, node in enumerate(self._ready())]
        heapq.heapify(ready)
        order = len(ready)
        while ready and len(chosen) < max(rows, run_rows):
            _, _, node, level = heapq.heappop(ready)
            least = min_logprob if len(chosen) < rows else _WORTH_A_ROW
            if node.path_logprob - self.root.path_logprob < least:
                break
            chosen.append(node)
            reached += self.path_prob(node) if level == 1 else 0.0
            for child in node.children.values():
                below = level + (not (run_rows and child.nearly_certain))
                if below <= max_depth:
                    heapq.heappush(ready, (-child.path_logprob, order, child, below))
                    order += 1
        if reached < min_path_prob:
            return []
        for node in chosen:
            node.slot = self._allocate_slot()
        return chosen

    def parent_slots(self, nodes: Sequence[DraftNode]) -> tuple[int, ...]:
        """Each node's parent as in `SendStep.parents`."""
        return tuple(ROOT if node.parent is self.root or node.parent is None else node.parent.slot for node in nodes)

    def _ready(self) -> Iterator[DraftNode]:
        """Unsent nodes whose parent the hops hold, or get with the next step's causal rows or commit."""
        for parent in (self.root, *self.root.descendants()):
            if parent is self.root or parent.slot != NO_SLOT:
                yield from (child for child in parent.children.values() if child.slot == NO_SLOT)

    def _unsent(self, min_logprob: float) -> Iterator[DraftNode]:
        least = min_logprob + self.root.path_logprob
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
