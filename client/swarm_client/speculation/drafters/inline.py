"""Calls a drafter on the event loop: for n-gram look-ups of microseconds, where a switch of threads takes a hundred. Or
in threads shared by all, for what takes as little but for hostile requests: grammars.

Whatever the drafter raises is a DrafterFailed, as in `threaded`; a drafter that may stall belongs there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

from swarm.errors import DrafterFailed
from swarm.planner.generation.draft_tree import MedusaCandidates
from swarm.types import TappedRows, Taps
from swarm_client.speculation.drafters.base import NO_TAPS, CachedProposal, Candidate, Drafter

_T = TypeVar("_T")


class InlineDrafter:
    """Asynchronous twin of a Drafter that never waits. Raises DrafterFailed."""

    def __init__(self, drafter: Drafter, threads: Executor | None = None) -> None:
        """`threads`: None for the event loop's own."""
        self.drafter = drafter
        self._threads = threads

    @property
    def taps(self) -> Taps | None:
        return self.drafter.taps

    async def reset(self, prompt_ids: Sequence[int]) -> None:
        await self._call(lambda: self.drafter.reset(prompt_ids))

    async def extend(self, tokens: Sequence[int], medusa: MedusaCandidates = (), taps: TappedRows = NO_TAPS) -> None:
        if taps:
            await self._call(lambda: self.drafter.set_taps(taps))
        await self._call(lambda: self.drafter.extend(tokens))
        await self._call(lambda: self.drafter.set_medusa_candidates(medusa))

    async def propose_many(self, paths: Sequence[Sequence[int]], width: int) -> list[list[Candidate]]:
        return await self._call(lambda: self.drafter.propose_many(paths, width))

    async def propose_cached(self, paths: Sequence[Sequence[int]], width: int) -> CachedProposal:
        return await self._call(lambda: self.drafter.propose_cached(paths, width))

    def close(self) -> None:
        """Nothing to free."""

    async def _call(self, work: Callable[[], _T]) -> _T:
        try:
            return work() if self._threads is None else await _in_thread(self._threads, work)
        except Exception as error:  # anybody's code, whose failure costs speed and never the answer
            name, kind = self.drafter.name, type(error).__name__
            raise DrafterFailed(f"the drafter '{name}' raised {kind}: {error}; going on without it") from error


async def _in_thread(threads: Executor, work: Callable[[], _T]) -> _T:
    return await asyncio.get_running_loop().run_in_executor(threads, work)
