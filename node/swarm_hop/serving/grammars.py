"""Compiles the grammars of a tail's sessions and computes their masks, off the event loop and off the compute device.

Owns the threads for it, whose turn it is in them, how much time and memory the grammars of one address block may take,
and the model's tokenizer, which a node loads when the first grammar comes.

The threads have no lower priority than others: they hold the interpreter's lock now and then, and whoever waits for
that would wait for everything else that the processor has to do.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakValueDictionary

from swarm.errors import NodeBusy
from swarm.planner.scheduling.fair_shares import Share
from swarm.token_bucket import KeyedBuckets
from swarm.types import Grammar, PeerId
from swarm_hop.serving.token_history import StepTokens
from swarm_kernels.device.allocator import release_free_memory
from swarm_kernels.sampling.grammar import GrammarCompiler, GrammarState, TokenMask
from swarm_kernels.tokenizer.tokenizer import ChatTokenizer

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class GrammarPolicy:
    """What the grammars of clients may take. A usual schema compiles in 2 ms, the worst in 30 ms to 1 s."""

    compile_share: float = 0.02  # of a core, for the grammars of one address block: new ones against a flood of them
    compile_burst_s: float = 0.25  # ... at once
    max_wait_s: float = 5.0  # for its budget; a session beyond it is refused
    block_bytes: int = 6 << 20  # of the compiled grammars of one block's sessions, by our estimate
    total_bytes: int = 24 << 20  # ... of all
    bytes_per_character: int = 64  # measured: 15 to 80 for long grammars, 200 for short ones
    grammar_bytes: int = 64 << 10
    mask_threads: int = 2


class TailGrammars:
    """The grammars of one span's sessions. An address block has one compilation at a time, and a peer one piece of
    other work, also when its sessions end meanwhile: a hostile grammar may take seconds a mask, and delays those of its
    own sender."""

    def __init__(
        self, load_tokenizer: Callable[[], ChatTokenizer], vocab_size: int, policy: GrammarPolicy = GrammarPolicy()
    ) -> None:
        """`load_tokenizer`: called in a thread, once."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._policy = policy
        self._compiler: GrammarCompiler | None = None
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="swarm-grammar")
        self._masking = ThreadPoolExecutor(policy.mask_threads, thread_name_prefix="swarm-mask")
        self._turns: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()
        self._budgets = KeyedBuckets(policy.compile_share, policy.compile_burst_s)
        self._held: Counter[Hashable] = Counter()  # bytes of compiled grammars, by block
        self._holding = threading.Lock()  # states may be freed in any thread

    async def compile(self, grammar: Grammar, share: Share) -> GrammarState:
        """Raises InvalidRequest, NodeBusy when the block of `share` takes too much here, and ModelError when the
        model's tokenizer cannot be read."""
        size = self._policy.grammar_bytes + self._policy.bytes_per_character * len(grammar.source)
        self._hold(share, size)
        try:
            if self._compiler is None:
                await self._run(self._compiling, "", self._load)
            state = await self._run(self._compiling, ("compile", share.block), lambda: self._compile(grammar), share)
        except BaseException:
            self._free(share.block, size)
            raise
        weakref.finalize(state, self._free, share.block, size).atexit = False
        return state

    async def masks(self, state: GrammarState, tokens: StepTokens, peer: PeerId) -> Sequence[TokenMask | None]:
        """For each row that is sampled from. Raises InvalidRequest."""
        return await self._run(self._masking, peer, lambda: _masks(state, tokens)) if tokens.paths else ()

    async def _run(
        self, threads: ThreadPoolExecutor, key: Hashable, work: Callable[[], _T], payer: Share | None = None
    ) -> _T:
        """In the turn of `key`; `payer`: from whose budget of time it goes."""
        turn = self._turns.get(key) or self._turns.setdefault(key, asyncio.Lock())
        await turn.acquire()
        spent = 0.0

        def timed() -> _T:
            nonlocal spent
            begun = time.thread_time()
            try:
                return work()
            finally:
                spent = time.thread_time() - begun

        def done(_: object) -> None:
            if payer is not None and not payer.first:
                self._budgets.spend(payer.block, spent, _now())
            turn.release()

        try:
            if payer is not None:
                await self._wait_for_budget(payer)
            working = asyncio.get_running_loop().run_in_executor(threads, timed)
        except BaseException:
            turn.release()
            raise
        working.add_done_callback(done)
        return await asyncio.shield(working)  # a thread cannot be stopped, and holds its turn to the end

    async def _wait_for_budget(self, payer: Share) -> None:
        """Raises NodeBusy."""
        wait_s = self._budgets.spend(payer.block, 0.0, _now())
        if wait_s > self._policy.max_wait_s and not payer.first:
            raise NodeBusy("the grammars from where you are take too much time here", retry_after_s=wait_s)
        if not payer.first:
            await asyncio.sleep(wait_s)

    def _hold(self, share: Share, size: int) -> None:
        """Raises NodeBusy. Each block may hold one grammar, whatever its size."""
        with self._holding:
            mine, all_ = self._held[share.block], self._held.total()
            if mine and not share.first and mine + size > self._policy.block_bytes:
                raise NodeBusy("the sessions from where you are hold too many grammars here")
            if not share.first and all_ + size > self._policy.total_bytes:
                raise NodeBusy("the sessions of all clients hold too many grammars here")
            self._held[share.block] += size

    def _free(self, block: Hashable, size: int) -> None:
        with self._holding:
            self._held[block] -= size
            if self._held[block] <= 0:
                del self._held[block]

    def _load(self) -> None:
        if self._compiler is None:
            compiler = GrammarCompiler(self._load_tokenizer(), self._vocab_size)
            compiler.prepare()
            release_free_memory()  # what loading took, 15 MB
            self._compiler = compiler

    def _compile(self, grammar: Grammar) -> GrammarState:
        assert self._compiler is not None
        return self._compiler.compile(grammar)


def _masks(state: GrammarState, tokens: StepTokens) -> list[TokenMask | None]:
    answer = tokens.paths[0].committed[tokens.prompt_tokens :].tolist()  # the same for all rows of a step
    return state.masks(answer, [path.drafts() for path in tokens.paths])


def _now() -> float:
    return asyncio.get_running_loop().time()
