"""Speculation changes when a token arrives and never which: every strategy, drafter and chain, greedy and seeded."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from memory_swarm import cut, memory_swarm
from scripted_drafters import Noise, Oracle
from tiny_models import ModelTensors, hf_greedy, tiny_model
from virtual_clock import virtual_time

from swarm.testing.memory_network import LinkModel
from swarm_client.speculation.drafters.inline import InlineDrafter

CHAINS = {"one hop": (), "two": (4,), "three": (1, 2), "five": (1, 2, 3, 5)}
TOKENS = 14


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(2, 131) for _ in range(length)]


def model() -> tuple[Any, ModelTensors]:
    made = tiny_model("llama")
    return made, ModelTensors(made)


DRAFTERS: dict[str, Callable[[list[int]], Oracle]] = {
    "always right": lambda answer: Oracle(answer, 1.0, 1.0),
    "always wrong": lambda answer: Oracle(answer, 0.0),
    "often right": lambda answer: Oracle(answer, 0.8),
    "noise": lambda answer: Noise(answer),
    "failing": lambda answer: Oracle(answer, 0.7, fail_after=4),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(
    ("strategy", "chain"), [("tree", "one hop"), ("pipedec", "two"), ("auto", "three"), ("tree", "five")]
)
@virtual_time
async def test_greedy_tokens_do_not_depend_on_speculation(strategy: str, drafter: str, chain: str) -> None:
    made, source = model()
    prompt_ids = prompt(random.Random(chain + drafter), 19)
    truth = hf_greedy(made, prompt_ids, TOKENS)
    async with (
        memory_swarm(source, cut(6, *CHAINS[chain]), LinkModel(delay_s=0.02)) as swarm,
        swarm.client(prefill_chunk=8, make_drafter=lambda: InlineDrafter(DRAFTERS[drafter](truth))) as client,
    ):
        answer = await client.generate(prompt_ids, max_new_tokens=TOKENS, decoding=strategy)
        for engine in swarm.engines.values():
            engine.cache.check_integrity()
    assert list(answer.token_ids) == truth
    assert answer.repairs == ()
    assert answer.speculation is not None
    if drafter == "always right":
        assert answer.speculation["hits"] > TOKENS // 2
    if drafter == "always wrong":
        assert answer.speculation["hits"] == 0
    if drafter == "failing":
        assert (
            "fails on purpose" in answer.speculation["reason"] or answer.speculation["rows"] == 0 or strategy == "auto"
        )


@pytest.mark.parametrize("drafter", ["always right", "often right", "noise"])
@pytest.mark.parametrize("strategy", ["tree", "pipedec"])
@virtual_time
async def test_seeded_samples_do_not_depend_on_speculation(strategy: str, drafter: str) -> None:
    _, source = model()
    prompt_ids = prompt(random.Random(3), 12)
    options = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 17, "max_new_tokens": TOKENS}
    async with memory_swarm(source, cut(6, 1, 4), LinkModel(delay_s=0.01)) as swarm:
        async with swarm.client() as client:
            plain = await client.generate(prompt_ids, decoding="sequential", **options)
        answer = list(plain.token_ids)
        async with swarm.client(1, make_drafter=lambda: InlineDrafter(DRAFTERS[drafter](answer))) as client:
            speculated = await client.generate(prompt_ids, decoding=strategy, **options)
    assert speculated.token_ids == plain.token_ids
    assert speculated.speculation is not None
    assert speculated.speculation["rows"] > 0


@pytest.mark.slow
@virtual_time
async def test_speculative_sessions_in_one_batch_are_independent() -> None:
    made, source = model()
    rng = random.Random(5)
    prompts = [prompt(rng, length) for length in (3, 17, 40, 9)]
    truths = [hf_greedy(made, prompt_ids, 20) for prompt_ids in prompts]
    strategies = ["tree", "pipedec", "sequential", "auto"]
    oracles = iter([Oracle(truths[0], 0.8), Oracle(truths[1], 0.7), Oracle(truths[3], 0.9)])
    async with (
        memory_swarm(source, cut(6, 2, 5), LinkModel(delay_s=0.01)) as swarm,
        swarm.client(prefill_chunk=7, make_drafter=lambda: InlineDrafter(next(oracles))) as client,
    ):
        answers = await asyncio.gather(
            *(
                client.generate(prompt_ids, max_new_tokens=20, decoding=s)
                for prompt_ids, s in zip(prompts, strategies, strict=True)
            )
        )
        for engine in swarm.engines.values():
            engine.cache.check_integrity()
    assert [list(answer.token_ids) for answer in answers] == truths


@pytest.mark.parametrize("strategy", ["tree", "pipedec"])
@pytest.mark.parametrize("victim", [0, 1, 2])
@virtual_time
async def test_a_node_that_crashes_during_speculation_costs_no_token(victim: int, strategy: str) -> None:
    made, source = model()
    prompt_ids = prompt(random.Random(8), 18)
    truth = hf_greedy(made, prompt_ids, 20)
    async with (
        memory_swarm(source, cut(6, 2, 4) * 2, LinkModel(delay_s=0.01)) as swarm,
        swarm.client(make_drafter=lambda: InlineDrafter(Oracle(truth, 0.8))) as client,
    ):
        stream = client.stream(prompt_ids, max_new_tokens=20, decoding=strategy)
        seen: list[int] = []
        killed = False
        async for piece in stream:
            seen += piece.token_ids
            if len(seen) >= 9 and not killed:
                killed = True
                assert stream.chain is not None
                swarm.kill(stream.chain.peers[victim])
    assert seen == truth
    assert len(stream.result.repairs) == 1
