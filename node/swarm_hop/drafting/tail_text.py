"""The text of one session as its tail sees it: committed tokens, draft tokens, and what was sampled after each.

Owns how far the text goes: the tail samples after every row, so it can follow its own samples down the draft tree as
the client does when it has the results (`planner.generation`). It follows the same steps as the KV cache, in order.
Tokens that it was never told count as unknown, and rows beside them as missing. Pure: no tensors and no peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from swarm.messages import Step
from swarm.types import TappedRow, TappedRows

UNKNOWN = 0
"""Stands for a token that nobody has told."""


@dataclass(slots=True, eq=False)
class _Node:
    """A computed row: the last committed token, or a draft token. `row`: its hidden states, until they are taken."""

    token: int
    position: int
    row: TappedRow | None
    sampled: int | None = None
    children: dict[int, _Node] = field(default_factory=dict)


class KnownText(NamedTuple):
    """`tokens`: the whole text, the last of them sampled and not computed. `rows`: of those computed since the last
    time."""

    tokens: list[int]
    rows: TappedRows


class TailText:
    """`follow` every step once it has run; `take` the text."""

    def __init__(self) -> None:
        self._tokens: list[int] = []  # committed
        self._told_from = 0  # from here on all committed tokens are known
        self._root: _Node | None = None  # the last committed token
        self._tree: dict[int, _Node] = {}  # by slot
        self._rows: dict[int, TappedRow] = {}  # of the text, not taken yet

    def follow(self, step: Step, samples: Sequence[int], rows: Sequence[TappedRow | None]) -> None:
        """`step` as this hop has run it (`HopSession.admit`); `samples`: its result's tokens; `rows`: one a row."""
        base = step.committed_before
        if base < len(self._tokens):
            del self._tokens[base:]
            self._root, self._tree = None, {}
            self._told_from = min(self._told_from, base)
            self._rows = {at: row for at, row in self._rows.items() if at < base}
        self._untold(base - len(self._tokens))
        self._commit(step.commit_slots)
        causal = step.causal_rows
        if causal:
            self._add_causal(step, rows[:causal])
        added = self._add_drafts(step, rows[causal:])
        nodes = [self._root, *added] if causal and self._root is not None else added
        for node, token in zip(nodes[::-1], samples[::-1], strict=False):  # with `sample_all` there are more of these
            node.sampled = token

    def take(self) -> KnownText | None:
        """The text as far as it was sampled, and the rows that are new; None while its end is not known."""
        node = self._root
        if node is None or node.sampled is None:
            return None
        tokens = list(self._tokens)
        while node is not None and node.sampled is not None:
            tokens.append(node.sampled)
            node = node.children.get(node.sampled)
            if node is not None:
                self._keep(node)
        first, last, rows = self._told_from - 1, len(tokens) - 2, self._rows
        self._rows = {at: row for at, row in rows.items() if at > last}
        return KnownText(tokens, {at: row for at, row in rows.items() if first <= at <= last})

    def _keep(self, node: _Node) -> None:
        if node.row is not None:
            self._rows[node.position], node.row = node.row, None

    def _untold(self, count: int) -> None:
        """Tokens that were computed elsewhere, or before."""
        if count > 0:
            self._tokens += [UNKNOWN] * count
            self._told_from = len(self._tokens)
            self._root, self._tree = None, {}

    def _commit(self, slots: Sequence[int]) -> None:
        """Draft tokens become text; of the tree what descends from the last one stays."""
        for slot in slots:
            node = self._tree.get(slot)
            if node is None:
                self._untold(1)
                continue
            self._keep(node)
            self._tokens.append(node.token)
            self._root = node
        if slots:
            alive = set() if self._root is None else _below(self._root)
            self._tree = {slot: node for slot, node in self._tree.items() if node in alive}

    def _add_causal(self, step: Step, rows: Sequence[TappedRow | None]) -> None:
        start, self._tree = len(self._tokens), {}
        if not step.tokens:
            self._untold(step.causal_rows)
            return
        self._tokens += step.tokens[: step.causal_rows]
        self._rows.update((start + at, row) for at, row in enumerate(rows) if row is not None)
        self._root = _Node(self._tokens[-1], len(self._tokens) - 1, None)

    def _add_drafts(self, step: Step, rows: Sequence[TappedRow | None]) -> list[_Node]:
        added: list[_Node] = []
        if not step.tokens:
            return added
        for parent, slot, token, row in zip(
            step.parents, step.slots, step.tokens[step.causal_rows :], rows, strict=True
        ):
            above = self._root if parent < 0 else self._tree.get(parent)
            node = _Node(token, above.position + 1 if above is not None else 0, row)
            if above is not None:
                above.children[token] = node
            self._tree[slot] = node
            added.append(node)
        return added


def _below(root: _Node) -> set[_Node]:
    found: set[_Node] = set()
    waiting = list(root.children.values())
    while waiting:
        node = waiting.pop()
        found.add(node)
        waiting += node.children.values()
    return found
