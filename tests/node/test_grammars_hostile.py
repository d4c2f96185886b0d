"""Grammars of strangers at a tail: they delay their own sender, not the device, and not the event loop."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from memory_swarm import cut, memory_swarm
from test_grammar_identity import GRAMMARS, ascii_tokenizer
from tiny_models import ModelTensors, tiny_model

from swarm.errors import InvalidRequest, NodeBusy
from swarm.messages import Step
from swarm.planner.scheduling.fair_shares import Share
from swarm.types import Grammar, GrammarKind, Sampling
from swarm_hop.serving import tail_sampler
from swarm_hop.serving.grammars import GrammarPolicy, TailGrammars
from swarm_hop.serving.session import InboundStep
from swarm_hop.serving.token_history import StepTokens, TokenHistory
from swarm_kernels.sampling.grammar import GrammarState, TokenMask

GRAMMAR = GRAMMARS["schema"]


def paths(*tokens: int) -> StepTokens:
    return TokenHistory([*tokens], len(tokens), 64, 512).apply(Step(b"s" * 16, 0, 0, 0, 1, tokens=[tokens[0]]))


class Blocked:
    """Stands in for a state whose masks take very long."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.go_on = threading.Event()

    def masks(self, text: Sequence[int], paths: Sequence[Sequence[int]]) -> list[TokenMask | None]:
        self.entered.release()
        assert self.go_on.wait(20)
        return [None] * len(paths)


async def test_a_peer_has_one_thread_however_many_sessions_it_opens_and_closes() -> None:
    grammars = TailGrammars(ascii_tokenizer, 128)
    hostile: Any = Blocked()
    tasks = [asyncio.create_task(grammars.masks(hostile, paths(5), "hostile")) for _ in range(6)]
    assert await asyncio.to_thread(hostile.entered.acquire, timeout=5)
    try:
        tasks[0].cancel()  # its session ends; the thread cannot
        state = await asyncio.wait_for(grammars.compile(GRAMMAR, Share("home", "honest")), 10)
        assert (await asyncio.wait_for(grammars.masks(state, paths(5), "honest"), 10))[0] is not None
        assert not hostile.entered.acquire(blocking=False)
    finally:
        hostile.go_on.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1:] == [[None]] * 5


async def test_new_grammars_of_one_block_are_few_and_others_have_a_budget_of_their_own() -> None:
    policy = GrammarPolicy(compile_share=1e-6, compile_burst_s=1e-6, max_wait_s=1.0)
    grammars = TailGrammars(ascii_tokenizer, 128, policy)
    assert await grammars.compile(GRAMMAR, Share("x", "first"))
    for member in ("first", "second"):
        with pytest.raises(NodeBusy, match="time"):
            await grammars.compile(Grammar(GrammarKind.REGEX, f"[ab]+{member}"), Share("x", member))
    assert await grammars.compile(GRAMMAR, Share("home", "honest"))
    assert await grammars.compile(GRAMMAR, Share("owner", "owner", first=True))
    assert await grammars.compile(GRAMMAR, Share("owner", "owner", first=True))


async def test_what_a_block_s_grammars_hold_is_bounded_and_given_back() -> None:
    policy = GrammarPolicy(block_bytes=2000, total_bytes=3000, grammar_bytes=800, bytes_per_character=1)
    grammars = TailGrammars(ascii_tokenizer, 128, policy)
    simple = Grammar(GrammarKind.REGEX, "[ab]+")
    held = [await grammars.compile(simple, Share("x", i)) for i in range(2)]
    with pytest.raises(NodeBusy, match="where you are"):
        await grammars.compile(simple, Share("x", "another"))
    other = await grammars.compile(simple, Share("home", "honest"))
    with pytest.raises(NodeBusy, match="all clients"):
        await grammars.compile(simple, Share("third", "honest"))
    with pytest.raises(InvalidRequest):
        await grammars.compile(Grammar(GrammarKind.REGEX, "["), Share("owner", "owner", first=True))
    del held
    assert await grammars.compile(simple, Share("x", "another")) is not other


async def test_others_generate_while_a_mask_takes_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked, real = Blocked(), GrammarState.masks

    def masks(self: GrammarState, text: Sequence[int], paths: Sequence[Sequence[int]] = ((),)) -> Any:
        blocked.masks(text, paths)
        return real(self, text, paths)

    monkeypatch.setattr(GrammarState, "masks", masks)
    tokenizer, made = ascii_tokenizer(), tiny_model("llama")
    async with (
        memory_swarm(ModelTensors(made), cut(6, 3), tokenizer=tokenizer) as swarm,
        swarm.client(tokenizer=tokenizer) as hostile,
        swarm.client(tokenizer=tokenizer) as honest,
    ):
        bomb = asyncio.create_task(hostile.generate([7, 8], max_new_tokens=3, grammar=GRAMMAR, decoding="sequential"))
        try:
            assert await asyncio.to_thread(blocked.entered.acquire, timeout=5)
            answer = await asyncio.wait_for(honest.generate([5, 6], max_new_tokens=20, ignore_eos=True), 10)
            assert len(answer.token_ids) == 20
            assert not bomb.done()
        finally:
            blocked.go_on.set()
        assert len((await bomb).token_ids) == 3


def test_penalties_of_many_tree_rows_over_a_long_text_take_little_memory() -> None:
    rows, length = 256, 50_000
    history = TokenHistory([3] * length, length, 2 * length, 16)
    step = Step(b"s" * 16, 0, 0, length - 1, 1, tokens=[3] * (rows + 1), parents=[-1] * rows, slots=list(range(rows)))
    arrival = InboundStep(step, b"", history.apply(step))
    session = SimpleNamespace(sampling=Sampling(repetition_penalty=1.5), claimed=())
    scheduled: Any = SimpleNamespace(session=session, arrival=arrival)
    tracemalloc.start()
    output = tail_sampler._sample_step(scheduled, torch.rand(rows + 1, 16), [length] * (rows + 1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(getattr(output, "tokens", ())) == rows + 1
    assert peak < 10 << 20  # all copies together would be 100 MB
