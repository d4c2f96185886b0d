"""Several generations of one prompt, of which the hops compute the prompt once.

Owns which of them computes it, and that no more of them run than there are slots. It only delays them: the hops' prefix
caches find what the others share (`OpenSession.block_hashes`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from swarm_client.api.results import TextChunk


class SharedPrefill:
    """One for the forks of one prompt; `fork` wraps the chunks of each. `slots`: one is held by every fork that runs.

    The fork that is read first computes the prompt, and the others wait for its first token. If it ends without one,
    or has to wait for a chain, the next one computes it.
    """

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots = slots
        self._computing = asyncio.Lock()
        self._computed = False

    async def fork(self, chunks: AsyncGenerator[TextChunk, None]) -> AsyncGenerator[TextChunk, None]:
        computes = await self._begin()
        try:
            # A slot is taken after the turn: forks that wait for their turn would else keep slots from its owner.
            async with self._slots, aclosing(chunks):
                async for chunk in chunks:
                    if computes:
                        computes = False
                        self._end(computed=bool(chunk.token_ids))
                    yield chunk
        finally:
            if computes:
                self._end(computed=False)

    async def _begin(self) -> bool:
        """Wait until the prompt is computed, or it is this fork's turn to do it. -> whether it is."""
        if not self._computed:
            await self._computing.acquire()
            if not self._computed:
                return True
            self._computing.release()
        return False

    def _end(self, *, computed: bool) -> None:
        self._computed = computed
        self._computing.release()
