"""Draft tokens of the drafter that the chain's last node holds (`swarm.tap_messages`); they come with its results.

Owns only which of them follow the text by now. A tail that sends none proposes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm.tap_messages import DraftedChildren
from swarm_client.speculation.drafters.base import Candidate, Drafter, TokenPath


class TailDrafter(Drafter):
    """It has the candidates already, so every call is synchronous."""

    is_synchronous = extend_is_synchronous = True

    def __init__(self, name: str = "tail") -> None:
        super().__init__(name)
        self._children: DraftedChildren = {}

    def set_tail_draft(self, children: DraftedChildren) -> None:
        self._children = children

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        self._children = {}

    def _advance(self, tokens: Sequence[int]) -> None:
        path, size = tuple(tokens), len(tokens)
        self._children = {at[size:]: below for at, below in self._children.items() if at[:size] == path}

    def _draft(self, paths: Sequence[TokenPath], width: int) -> list[list[Candidate]]:
        return [[Candidate(*pair) for pair in self._children.get(path, ())[:width]] for path in paths]
