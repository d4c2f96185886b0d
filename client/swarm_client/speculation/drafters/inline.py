"""Calls a drafter on the event loop: for n-gram look-ups of microseconds, where a switch of threads takes a hundred.

Whatever the drafter raises is a DrafterFailed, as in `threaded`; a drafter that may stall belongs there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from swarm.errors import DrafterFailed
from swarm.planner.generation.draft_tree import MedusaCandidates
from swarm_client.speculation.drafters.base import CachedProposal, Candidate, Drafter

_T = TypeVar("_T")


class InlineDrafter:
    """Asynchronous twin of a Drafter that never waits. Raises DrafterFailed."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter

    async def reset(self, prompt_ids: Sequence[int]) -> None:
        self._call(lambda: self.drafter.reset(prompt_ids))

    async def extend(self, tokens: Sequence[int], medusa: MedusaCandidates = ()) -> None:
        self._call(lambda: self.drafter.extend(tokens))
        self._call(lambda: self.drafter.set_medusa_candidates(medusa))

    async def propose_many(self, paths: Sequence[Sequence[int]], width: int) -> list[list[Candidate]]:
        return self._call(lambda: self.drafter.propose_many(paths, width))

    async def propose_cached(self, paths: Sequence[Sequence[int]], width: int) -> CachedProposal:
        return self._call(lambda: self.drafter.propose_cached(paths, width))

    def close(self) -> None:
        """Nothing to free."""

    def _call(self, work: Callable[[], _T]) -> _T:
        try:
            return work()
        except Exception as error:  # anybody's code, whose failure costs speed and never the answer
            name, kind = self.drafter.name, type(error).__name__
            raise DrafterFailed(f"the drafter '{name}' raised {kind}: {error}; going on without it") from error
