"""Compiles the grammars of a tail's sessions and computes their masks, off the event loop and off the compute device.

Owns the threads for it, so that grammars sent by strangers never take more than these, whose turn it is in them, and
the model's tokenizer, which a node loads when the first grammar comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

from swarm.types import Grammar, PeerId
from swarm_kernels.sampling.grammar import GrammarCompiler, GrammarState, TokenMask
from swarm_kernels.tokenizer.tokenizer import ChatTokenizer
from swarm_node.serving.token_history import StepTokens

MAX_THREADS = 2

_T = TypeVar("_T")


class TailGrammars:
    """The grammars of one span's sessions. A peer has one piece of work in the threads at a time, also when its
    sessions end meanwhile: a hostile grammar may take seconds a mask, and delays those of its own sender."""

    def __init__(self, load_tokenizer: Callable[[], ChatTokenizer], vocab_size: int) -> None:
        """`load_tokenizer`: called in a thread, once."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._compiler: GrammarCompiler | None = None
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="swarm-grammar")
        self._turns: WeakValueDictionary[PeerId, asyncio.Lock] = WeakValueDictionary()

    async def compile(self, grammar: Grammar, peer: PeerId) -> GrammarState:
        """Raises InvalidRequest, and ModelError when the model's tokenizer cannot be read."""
        return await self._run(peer, lambda: self._compile(grammar))

    async def masks(self, state: GrammarState, tokens: StepTokens, peer: PeerId) -> Sequence[TokenMask | None]:
        """For each row that is sampled from. Raises InvalidRequest."""
        return await self._run(peer, lambda: _masks(state, tokens)) if tokens.paths else ()

    async def _run(self, peer: PeerId, work: Callable[[], _T]) -> _T:
        turn = self._turns.get(peer) or self._turns.setdefault(peer, asyncio.Lock())
        await turn.acquire()
        working = asyncio.get_running_loop().run_in_executor(self._threads, work)
        working.add_done_callback(lambda _: turn.release())
        return await asyncio.shield(working)  # a thread cannot be stopped, and holds its turn to the end

    def _compile(self, grammar: Grammar) -> GrammarState:
        if self._compiler is None:  # two threads may both load it: the second one's work is lost
            self._compiler = GrammarCompiler(self._load_tokenizer(), self._vocab_size)
        return self._compiler.compile(grammar)


def _masks(state: GrammarState, tokens: StepTokens) -> list[TokenMask | None]:
    answer = tokens.paths[0].committed[tokens.prompt_tokens :].tolist()  # the same for all rows of a step
    return state.masks(answer, [path.drafts() for path in tokens.paths])
