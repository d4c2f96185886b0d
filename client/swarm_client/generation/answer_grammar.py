"""The grammar of one generation, as the client knows it: a bad one is refused before any node is asked, and a tail that
does not keep to it is found out.

Owns the client's own state of the grammar. Computes in threads: a hostile grammar may take a second a token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from swarm_kernels.sampling.grammar import GrammarState

_T = TypeVar("_T")


@dataclass(slots=True)
class AnswerGrammar:
    """`await begin()` first. Every method raises InvalidRequest when the grammar turns out to be bad or to cost too
    much, as it does at the tails: no node is to blame then."""

    compile_grammar: Callable[[], GrammarState]
    threads: Executor
    _state: GrammarState | None = None

    async def begin(self) -> None:
        """Raises UnsupportedRequest as well."""
        self._state = await self._run(self.compile_grammar)
        await self.check(())

    async def check(self, text: Sequence[int]) -> None:
        """Whether a tail can go on after the answer's `text`."""
        await self._run(partial(self._begun.mask, text))

    async def permits(self, text: Sequence[int], tokens: Sequence[int]) -> bool:
        """Whether an honest tail may have sampled `tokens` after the answer's `text`."""
        return not tokens or await self._run(partial(self._begun.permits, text, tokens))

    @property
    def _begun(self) -> GrammarState:
        assert self._state is not None  # `begin` comes first
        return self._state

    async def _run(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)
