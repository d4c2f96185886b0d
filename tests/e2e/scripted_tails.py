"""Drafters for tails whose trees are scripted: they read nothing, whatever taps they ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from swarm.types import FINGERPRINT_BYTES, OfferedDrafter, Taps
from swarm_kernels.draft.session import DraftCandidates
from swarm_kernels.draft.tail import OpenDrafter
from swarm_kernels.draft.tapped import TappedDraft

Say = Callable[[tuple[int, ...], int], DraftCandidates]
"""From a path and a width."""


def opened(draft: TappedDraft, tree_ms: float = 1.0) -> OpenDrafter:
    return OpenDrafter(draft, OfferedDrafter(draft.kind, "test", bytes(FINGERPRINT_BYTES), draft.taps.layers, tree_ms))


class Scripted:
    """A drafter, and its session, that says what `say` makes of each path."""

    kind = "eagle"
    context_length = 1 << 20

    def __init__(self, taps: Taps, say: Say) -> None:
        self.taps, self.say = taps, say

    def new_session(self, *_: Any) -> Any:
        return self

    def reset(self, tokens: Any) -> None:
        """It reads nothing."""

    extend = add = reset

    def propose(self, paths: Sequence[tuple[int, ...]], width: int) -> list[DraftCandidates]:
        return [self.say(path, width) for path in paths]


def scripted(layers: tuple[int, ...], hidden_size: int, say: Say = lambda path, width: []) -> OpenDrafter:
    return opened(Scripted(Taps(layers, hidden_size), say))  # type: ignore[arg-type]  # it is its own session
