"""Drafts by a head on this machine (EAGLE-3, DFlash, MTP), from hidden states that the hops send
(`swarm.tap_messages`).

Owns what is said when none come. Keys, values and trees are the head's session's; a text whose hidden states
have not come gets no drafts, and one that gets some late or wrong gets bad ones.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from swarm.errors import DrafterFailed
from swarm.types import TappedRows, Taps
from swarm_client.speculation.drafters.base import CachedProposal, Candidate, Drafter, TokenPath
from swarm_kernels.draft.tapped import TappedDraft, TappedSession
from swarm_kernels.draft.tree import measure_tree_ms

logger = logging.getLogger(__name__)

MISSING_AFTER = 32  # tokens of one text without a hidden state, after which it is said


class TappedDrafter(Drafter):
    """A level of a tree is one pass of the head's layer, whatever its width; a block, one for all levels."""

    extend_is_synchronous = True  # nothing is computed before a proposal

    def __init__(self, model: TappedDraft, name: str = "", max_tokens: int | None = None) -> None:
        """`max_tokens`: of prompt and answer; beyond them it proposes nothing. Raises OutOfMemory."""
        super().__init__(name or model.kind)
        self.model = model
        self._taps = model.taps
        self._open: TappedSession | None = model.new_session(max_tokens)
        self._blind = 0  # tokens since hidden states came

    @property
    def taps(self) -> Taps:
        return self._taps

    def set_taps(self, rows: TappedRows) -> None:
        self._blind = 0
        self._session.add(rows)

    def tree_ms(self) -> float:
        """What a tree takes here, measured. Raises DrafterFailed, OutOfMemory."""
        return measure_tree_ms(self.model)

    def close(self) -> None:
        super().close()
        self._open = None

    @property
    def _session(self) -> TappedSession:
        if self._open is None:
            raise DrafterFailed(f"{self.name} is closed")
        return self._open

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        self._blind = 0
        self._session.reset(prompt_ids)

    def _advance(self, tokens: Sequence[int]) -> None:
        before, self._blind = self._blind, self._blind + len(tokens)
        if before < MISSING_AFTER <= self._blind:
            logger.warning(
                "the hops send no hidden states of layers %s for %s; going on without its drafts",
                ", ".join(map(str, self._taps.layers)),
                self.name,
            )
        self._session.extend(tokens)

    def _draft(self, paths: Sequence[TokenPath], width: int) -> list[list[Candidate]]:
        return [[Candidate(*pair) for pair in pairs] for pairs in self._session.propose(paths, width)]

    def _propose_cached(self, paths: Sequence[TokenPath], width: int) -> CachedProposal:
        """What has been computed: of a block, all levels."""
        known = self._session.known(paths, width)
        candidates = [[Candidate(*pair) for pair in pairs or ()] for pairs in known]
        return CachedProposal(candidates, [1.0 if pairs is None else 0.0 for pairs in known])
