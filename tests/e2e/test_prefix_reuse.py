"""The prefix cache saves prefill and changes no token: turns of a chat, equal prefixes, forks."""

from __future__ import annotations

import asyncio
import random

import pytest
from memory_swarm import cut, memory_swarm
from tiny_models import ModelTensors, hf_greedy, tiny_model
from virtual_clock import virtual_time

from swarm.block_hash import HASH_BLOCK_TOKENS
from swarm.testing.memory_network import LinkModel


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 131) for _ in range(length)]


@pytest.mark.slow
@pytest.mark.parametrize("hops", [(), (3,), (1, 2, 3, 5)])
@virtual_time
async def test_the_next_turn_reuses_the_prefix_of_the_last_one(hops: tuple[int, ...]) -> None:
    made = tiny_model("llama")
    source = ModelTensors(made)
    first = prompt(1, 2 * HASH_BLOCK_TOKENS + 5)
    async with memory_swarm(source, cut(6, *hops)) as swarm, swarm.client(prefill_chunk=16) as client:
        one = await client.generate(first, max_new_tokens=30)
        assert one.cached_prompt_tokens == 0
        assert list(one.token_ids) == hf_greedy(made, first, 30)
        second = [*first, *one.token_ids, *prompt(2, 9)]
        two = await client.generate(second, max_new_tokens=10)
        assert (
            two.cached_prompt_tokens == (len(first) + len(one.token_ids) - 1) // HASH_BLOCK_TOKENS * HASH_BLOCK_TOKENS
        )
        assert list(two.token_ids) == hf_greedy(made, second, 10)
        again = await client.generate(first, max_new_tokens=8)
        assert again.cached_prompt_tokens == 2 * HASH_BLOCK_TOKENS
        assert again.token_ids == one.token_ids[:8]
        async with swarm.client(1) as other_client:
            other = await other_client.generate(first, max_new_tokens=8)
        assert other.cached_prompt_tokens == 0
        assert other.token_ids == one.token_ids[:8]
        for engine in swarm.engines.values():
            engine.cache.check_integrity()


@pytest.mark.slow
@virtual_time
async def test_concurrent_sessions_share_the_prefix_of_a_running_one() -> None:
    made = tiny_model("llama")
    source = ModelTensors(made)
    start = prompt(3, 3 * HASH_BLOCK_TOKENS)
    prompts = [[*start, *prompt(10 + i, 7)] for i in range(4)]
    async with memory_swarm(source, cut(6, 2, 4), LinkModel(delay_s=0.01)) as swarm, swarm.client() as client:
        running = client.stream(start, max_new_tokens=40)
        await anext(aiter(running))
        answers = await asyncio.gather(*(client.generate(prompt_ids, max_new_tokens=12) for prompt_ids in prompts))
        await running.cancel()
        for engine in swarm.engines.values():
            engine.cache.check_integrity()
    # The last token before a fork must be computed for each, so the running session's last block may not be reused.
    assert all(answer.cached_prompt_tokens >= 2 * HASH_BLOCK_TOKENS for answer in answers)
    for prompt_ids, answer in zip(prompts, answers, strict=True):
        assert list(answer.token_ids) == hf_greedy(made, prompt_ids, 12)


@virtual_time
async def test_retained_prefixes_are_evicted_for_new_sessions() -> None:
    source = ModelTensors(tiny_model("llama"))
    async with memory_swarm(source, cut(6)) as swarm, swarm.client() as client:
        (engine,) = swarm.engines.values()
        capacity = engine.cache.capacity_tokens
        for seed in range(12):
            await client.generate(prompt(seed, 4 * HASH_BLOCK_TOKENS), max_new_tokens=8)
        answer = await client.generate(prompt(99, 40), max_new_tokens=capacity // 2, decoding="sequential", stop=())
        assert len(answer.token_ids) > 0
        engine.cache.check_integrity()


@virtual_time
async def test_a_hop_that_crashes_after_a_prefix_cache_hit_costs_no_token() -> None:
    made = tiny_model("llama")
    source = ModelTensors(made)
    first = prompt(1, 3 * HASH_BLOCK_TOKENS)
    async with memory_swarm(source, cut(6, 2, 4) * 2, LinkModel(delay_s=0.005)) as swarm, swarm.client() as client:
        await client.generate(first, max_new_tokens=4)
        prompt_ids = [*first, *prompt(5, 11)]
        stream = client.stream(prompt_ids, max_new_tokens=20)
        seen: list[int] = []
        killed = False
        async for piece in stream:
            seen += piece.token_ids
            if len(seen) >= 6 and not killed:
                killed = True
                assert stream.chain is not None
                swarm.kill(stream.chain.peers[1])
        assert len(stream.result.repairs) == 1
    assert seen == hf_greedy(made, prompt_ids, 20)


@virtual_time
async def test_routing_prefers_the_chain_that_caches_the_prefix_over_idle_replicas() -> None:
    made = tiny_model("llama")
    source = ModelTensors(made)
    first = prompt(1, 6 * HASH_BLOCK_TOKENS)
    async with memory_swarm(source, cut(6, 3) * 2, LinkModel(delay_s=0.005)) as swarm, swarm.client() as client:
        one = await client.generate(first, max_new_tokens=4)
        usual = one.chain
        running = client.stream(first[:-2], max_new_tokens=200)  # now the replicas are less loaded
        await anext(aiter(running))
        assert running.chain == usual
        await asyncio.sleep(3.0)  # until they have published it
        unrelated = await client.generate(prompt(2, 40), max_new_tokens=3)
        assert not {*unrelated.chain.peers} & {*usual.peers}
        two = await client.generate([*first, 5, 6], max_new_tokens=3)
        await running.cancel()
    assert two.chain.hops == usual.hops
    assert two.cached_prompt_tokens >= 5 * HASH_BLOCK_TOKENS
    assert list(two.token_ids) == hf_greedy(made, [*first, 5, 6], 3)
