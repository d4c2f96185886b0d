"""Calls a drafter in a thread, within a timeout; whatever it raises, or a stall, is a DrafterFailed.

Owns the thread. A drafter may be anybody's code: it must neither end a generation nor hang it. A stalled thread cannot
be stopped; it is a daemon and is abandoned, and the drafter with it. Calls that the drafter declares synchronous run on
the event loop, where a switch of threads would cost more.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from swarm.errors import DrafterFailed
from swarm.planner.generation.draft_tree import MedusaCandidates
from swarm.types import TappedRows, Taps
from swarm_client.speculation.drafters.base import NO_TAPS, CachedProposal, Candidate, Drafter

_T = TypeVar("_T")
_Work = tuple[Callable[[], object], "Future[object]"]

STALL_S = 2.0  # a proposal that takes longer is useless
FIRST_STALL_S = 60.0  # a model reads the whole prompt before its first


class ThreadedDrafter:
    """Asynchronous twin of a Drafter: its calls run in the order they are made.

    Raises DrafterFailed from each of them; after the first, from every further call at once.
    """

    def __init__(self, drafter: Drafter, stall_s: float = STALL_S, first_stall_s: float = FIRST_STALL_S) -> None:
        self.drafter = drafter
        self._stall_s, self._first_stall_s = stall_s, first_stall_s
        self._failure: DrafterFailed | None = None
        self._warm = False
        self._prefilling: Future[object] | None = None
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._work, drafter), name=f"drafter {drafter.name}", daemon=True).start()

    @property
    def taps(self) -> Taps | None:
        return self.drafter.taps

    @property
    def failure(self) -> DrafterFailed | None:
        """Why it cannot be used any more."""
        return self._failure

    async def reset(self, prompt_ids: Sequence[int]) -> None:
        """A model starts the prefill of the prompt, beside the chain's."""
        self._warm = False
        await self._call(lambda: self.drafter.reset(prompt_ids), self._first_stall_s)
        self._prefilling = self._post(lambda: self.drafter.propose_many([()], 1))

    async def extend(self, tokens: Sequence[int], medusa: MedusaCandidates = (), taps: TappedRows = NO_TAPS) -> None:
        def learn() -> None:
            if taps:
                self.drafter.set_taps(taps)
            self.drafter.extend(tokens)
            self.drafter.set_medusa_candidates(medusa)

        if not self.drafter.extend_is_synchronous:
            await self._call(learn, self._timeout_s())
        else:
            await self._inline(learn)

    async def propose_cached(self, paths: Sequence[Sequence[int]], width: int) -> CachedProposal:
        def look_up() -> CachedProposal:
            return self.drafter.propose_cached(paths, width)

        if not self.drafter.cached_is_synchronous:
            return await self._call(look_up, self._timeout_s())
        return await self._inline(look_up)

    async def propose_many(self, paths: Sequence[Sequence[int]], width: int) -> list[list[Candidate]]:
        drafted = await self._call(lambda: self.drafter.propose_many(paths, width), self._timeout_s())
        self._warm = True
        return drafted

    def close(self) -> None:
        """End the thread once it has finished its calls. Idempotent."""
        self._work.put(None)

    def _timeout_s(self) -> float:
        return self._stall_s if self._warm else self._first_stall_s

    def _post(self, work: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()
        self._work.put((work, future))  # type: ignore[arg-type]  # the future is of what the work returns
        return future

    async def _call(self, work: Callable[[], _T], timeout_s: float) -> _T:
        if self._failure is not None:
            raise self._failure
        return await self._answer(self._post(work), timeout_s)

    async def _inline(self, work: Callable[[], _T]) -> _T:
        """Run on the event loop, once the thread is idle."""
        if self._failure is not None:
            raise self._failure
        if self._prefilling is not None:
            prefilling, self._prefilling = self._prefilling, None
            await self._answer(prefilling, self._first_stall_s)
            self._warm = True
        try:
            return work()
        except Exception as error:  # anybody's code, whose failure costs speed and never the answer
            raise self._failed(f"raised {type(error).__name__}: {error}") from error

    async def _answer(self, future: Future[_T], timeout_s: float) -> _T:
        wrapped = asyncio.wrap_future(future)
        done, _ = await asyncio.wait((wrapped,), timeout=timeout_s)
        if not done:
            wrapped.cancel()
            raise self._failed(f"has not answered for {timeout_s:g} s")
        error = wrapped.exception()
        if error is not None:
            raise self._failed(f"raised {type(error).__name__}: {error}") from error
        return wrapped.result()

    def _failed(self, why: str) -> DrafterFailed:
        self._failure = DrafterFailed(f"the drafter '{self.drafter.name}' {why}; going on without it")
        self.close()
        return self._failure


def _serve(work: queue.SimpleQueue[_Work | None], drafter: Drafter) -> None:
    while (item := work.get()) is not None:
        task, future = item
        if not future.set_running_or_notify_cancel():
            continue
        try:
            result = task()
        except BaseException as error:  # noqa: BLE001  # set on the future, as concurrent.futures does
            future.set_exception(error)
        else:
            future.set_result(result)
    drafter.close()
