"""The token ids that a tail knows of one session: the text, and the draft tree below its last committed token.

Owns what penalties and grammars of a row may look at: the tokens on the way to that row. It follows the same steps as
the KV cache and the activation log, with token ids instead of rows. Pure: no tensors and no peers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarm.errors import ProtocolError
from swarm.messages import Step

TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _DraftToken:
    """A tree slot's token. `parent`: None, or a draft token above it, which may have been committed since."""

    token: int
    position: int
    parent: _DraftToken | None


@dataclass(frozen=True, slots=True, eq=False)
class TokenPath:
    """The tokens up to and including one row: a view of the text, and the row's draft token if it is a tree row.

    Valid until the session's next step.
    """

    committed: TokenIds
    draft: _DraftToken | None = None

    def drafts(self) -> list[int]:
        """The draft tokens after `committed`, the row's own last."""
        tokens: list[int] = []
        node = self.draft
        while node is not None and node.position >= len(self.committed):
            tokens.append(node.token)
            node = node.parent
        return tokens[::-1]

    def token_ids(self) -> TokenIds:
        return self.committed if self.draft is None else np.append(self.committed, np.array(self.drafts(), np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class StepTokens:
    """The tokens around the rows of one step.

    `paths`: one for each row that a token is sampled from. `prompt_targets`: the prompt tokens that follow the first
    causal rows, one for each causal row at a position before `prompt_tokens - 1`.
    """

    prompt_tokens: int
    paths: tuple[TokenPath, ...]
    prompt_targets: TokenIds


class TokenHistory:
    """Only `apply`, once for every step in order, and `prune` change it."""

    def __init__(self, tokens: Sequence[int], prompt_tokens: int, max_tokens: int, vocab_size: int) -> None:
        """`tokens`: all that the client knows, of which the chain may hold less. Raises ProtocolError."""
        if len(tokens) > max_tokens:
            raise ProtocolError(f"a history of {len(tokens)} tokens for a session of {max_tokens}")
        if prompt_tokens > len(tokens):
            raise ProtocolError(f"a prompt of {prompt_tokens} tokens in a history of {len(tokens)}")
        self._tokens: TokenIds = np.array(tokens, np.int64)
        if self._tokens.max(initial=0) >= vocab_size:
            raise ProtocolError(f"the history has a token id beyond the vocabulary of {vocab_size}")
        self.prompt_tokens = prompt_tokens
        self._known = len(tokens)
        self._committed = 0  # tokens after the last step
        self._root: _DraftToken | None = None  # the last committed token, if it was a draft
        self._tree: dict[int, _DraftToken] = {}  # by slot; a parent comes before its children

    def apply(self, step: Step) -> StepTokens:
        """Follow a step as this hop runs it (`HopSession.admit`). -> what its rows may look at.

        Raises ProtocolError, after which the history is not usable: for slots that are not there or in use, for tokens
        that are missing, and for causal rows without tokens (a replay) beyond what is known.
        """
        base = step.committed_before
        if base > self._known:
            raise ProtocolError(f"step {step.step} begins at {base} and the tokens up to {self._known} are known")
        if not step.tokens and (step.slots or step.sample):
            raise ProtocolError(f"step {step.step} lacks the token ids that this session's sampling needs")
        if base < self._committed:  # a rollback
            self._clear_tree()
        start = base + len(step.commit_slots)
        if step.commit_slots:
            self._commit(step, base)
        end = start + step.causal_rows
        if step.causal_rows:
            self._clear_tree()
            if not step.tokens and end > self._known:
                raise ProtocolError(f"step {step.step} replays up to {end} and tokens up to {self._known} are known")
            self._write(start, step.tokens[: step.causal_rows])
        self._committed = end
        text = self._tokens[:end]
        added = self._add_drafts(step, end)
        paths = [TokenPath(text)] if step.sample and step.causal_rows else []
        if step.sample:
            paths += [TokenPath(text, node) for node in added]
        targets = self._tokens[start + 1 : max(start + 1, min(end + 1, self.prompt_tokens))]
        return StepTokens(self.prompt_tokens, tuple(paths), targets)

    def prune(self, slots: Collection[int]) -> None:
        """Drop tree slots and their descendants; unknown slots are ignored."""
        dropped = {self._tree[slot] for slot in slots if slot in self._tree}
        if dropped:
            kept: dict[int, _DraftToken] = {}
            for slot, node in self._tree.items():
                if node in dropped or node.parent in dropped:
                    dropped.add(node)
                else:
                    kept[slot] = node
            self._tree = kept

    def _commit(self, step: Step, base: int) -> None:
        """Move slots to the text; only what descends from the last one stays in the tree."""
        tokens: list[int] = []
        for slot in step.commit_slots:
            node = self._tree.get(slot)
            if node is None or node.parent is not self._root:
                raise ProtocolError(f"tree slot {slot} cannot be committed: it is not a child of the token before it")
            tokens.append(node.token)
            self._root = node
        self._write(base, tokens)
        alive, kept = {self._root}, {}
        for slot, node in self._tree.items():
            if node.parent in alive:
                alive.add(node)
                kept[slot] = node
        self._tree = kept

    def _add_drafts(self, step: Step, root_position: int) -> list[_DraftToken]:
        added = []
        for parent, slot, token in zip(step.parents, step.slots, step.tokens[step.causal_rows :], strict=True):
            above = self._root if parent < 0 else self._tree.get(parent)
            if slot in self._tree or (above is None and parent >= 0):
                raise ProtocolError(f"tree slot {slot} of step {step.step} is in use, or its parent is unknown")
            node = _DraftToken(token, root_position if parent < 0 or above is None else above.position + 1, above)
            self._tree[slot] = node
            added.append(node)
        return added

    def _write(self, start: int, tokens: Sequence[int]) -> None:
        """`start` is at most the number of known tokens. What is known after them stays: the rest of a prompt."""
        end = start + len(tokens)
        if end > len(self._tokens):
            self._tokens = np.append(self._tokens[: self._known], np.zeros(max(64, end, self._known), np.int64))
        self._tokens[start:end] = tokens
        self._known = max(self._known, end)

    def _clear_tree(self) -> None:
        self._tree, self._root = {}, None
