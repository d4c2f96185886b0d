"""The bundled draft model, which nobody asked for and no answer waits for: loaded beside the first tokens.

`LateModel` owns the loading, once for all generations of a client. A generation that begins before it is loaded drafts
with n-grams, and with both once the model has read its text (`LateDrafter`); the text is the same either way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from swarm.errors import DrafterFailed, SwarmError
from swarm.net.base.tasks import TaskSet, wait_out
from swarm.planner.generation.draft_tree import MedusaCandidates
from swarm.types import TappedRow, TappedRows, Taps
from swarm_client.speculation.drafters.base import NO_TAPS, CachedProposal, Candidate, Drafter
from swarm_client.speculation.drafters.inline import InlineDrafter
from swarm_client.speculation.drafters.mixture import MixtureDrafter
from swarm_client.speculation.drafters.ngram import NgramDrafter
from swarm_client.speculation.drafters.threaded import ThreadedDrafter

logger = logging.getLogger(__name__)

QUIET_S = 1.0  # after the start without any answer: then the model is loaded, for who types a question


class LateModel:
    """`start()` loads it in a thread; `make` is None until it is there, and if it cannot be used. Close it before what
    `load` reads from."""

    def __init__(self, load: Callable[[], Callable[[], Drafter]], taps: Taps | None = None) -> None:
        """`load`: blocks; raises ModelError and DrafterFailed. -> makes the drafter of one generation. `taps`: what
        that drafter will read, for which a session asks when it opens."""
        self.make: Callable[[], Drafter] | None = None
        self.taps = taps
        self._load = load
        self._tasks = TaskSet("draft model")
        self._thread: asyncio.Future[Callable[[], Drafter]] | None = None
        self._tasks.start(self._start_soon(), "wait")

    def start(self) -> None:
        """Idempotent."""
        if self._thread is None and not self._tasks.closed:
            self._thread = asyncio.get_running_loop().run_in_executor(None, self._load)
            self._tasks.start(self._keep(self._thread), "load")

    async def close(self) -> None:
        """A thread cannot be stopped: wait for it."""
        await self._tasks.close()
        if self._thread is not None:
            await wait_out(self._thread)

    async def _start_soon(self) -> None:
        await asyncio.sleep(QUIET_S)
        self.start()

    async def _keep(self, thread: asyncio.Future[Callable[[], Drafter]]) -> None:
        try:
            self.make = await asyncio.shield(thread)
        except SwarmError as error:
            logger.warning("drafting with n-grams alone: %s", error)


class LateDrafter:
    """The drafter of a generation that begins before its client's draft model is loaded; see `AsyncDrafter`.

    The model reads the text in a thread of its own, while n-grams go on drafting.
    """

    def __init__(self, model: LateModel) -> None:
        self._model = model
        self._ngrams = NgramDrafter()
        self._current: InlineDrafter | ThreadedDrafter = InlineDrafter(self._ngrams)
        self._text: list[int] = []
        self._rows: dict[int, TappedRow] = {}  # that the model has not been given
        self._read = 0  # tokens of the text that the model has been given
        self._reading: asyncio.Future[Drafter] | None = None
        self._is_over = False

    @property
    def drafter(self) -> Drafter:
        return self._current.drafter

    @property
    def taps(self) -> Taps | None:
        return self._model.taps

    async def reset(self, prompt_ids: Sequence[int]) -> None:
        self._text = list(prompt_ids)
        await self._current.reset(prompt_ids)

    async def extend(self, tokens: Sequence[int], medusa: MedusaCandidates = (), taps: TappedRows = NO_TAPS) -> None:
        self._text += tokens
        if isinstance(self._current, InlineDrafter):
            self._rows.update(taps)
        await self._current.extend(tokens, medusa, taps)
        self._model.start()
        self._take_in_model()

    async def propose_cached(self, paths: Sequence[Sequence[int]], width: int) -> CachedProposal:
        return await self._current.propose_cached(paths, width)

    async def propose_many(self, paths: Sequence[Sequence[int]], width: int) -> list[list[Candidate]]:
        return await self._current.propose_many(paths, width)

    def close(self) -> None:
        self._is_over = True
        self._current.close()

    def _take_in_model(self) -> None:
        """Go on with the model if it is loaded and has read the text; never waits."""
        if self._reading is None:
            if self._model.make is not None:
                self._read = len(self._text)
                rows, self._rows = self._rows, {}
                self._reading = asyncio.get_running_loop().run_in_executor(
                    None, _read, self._model.make, tuple(self._text), rows
                )
                self._reading.add_done_callback(self._on_read)
        elif isinstance(self._current, InlineDrafter) and _succeeded(self._reading):
            model = self._reading.result()
            if self._rows:
                model.set_taps(self._rows)
            model.extend(self._text[self._read :])
            self._current = ThreadedDrafter(MixtureDrafter([self._ngrams, model]))

    def _on_read(self, reading: asyncio.Future[Drafter]) -> None:
        if reading.cancelled():
            return
        if (error := reading.exception()) is not None:
            logger.warning("drafting with n-grams alone: %s", error)
        elif self._is_over:
            reading.result().close()


def _read(make: Callable[[], Drafter], text: Sequence[int], taps: TappedRows) -> Drafter:
    """Blocks for as long as the model takes for the text. Raises DrafterFailed."""
    try:
        drafter = make()
        drafter.reset(text)
        if taps:
            drafter.set_taps(taps)
        drafter.propose_many([()], 1)
    except Exception as error:  # anybody's code, whose failure costs speed and never the answer
        raise DrafterFailed(f"the draft model raised {type(error).__name__}: {error}") from error
    return drafter


def _succeeded(future: asyncio.Future[Drafter]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
