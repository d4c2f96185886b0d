"""The central invariant: whatever the chain, the batching and the losses, the tokens are transformers' own (fp32)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from memory_swarm import cut, memory_swarm
from tiny_models import ModelTensors, hf_greedy, tiny_model
from virtual_clock import virtual_time

from swarm.errors import ContextOverflow, InvalidRequest, NoRoute, RemoteError, UsageError, WrongModel
from swarm.planner.generation.state_machine import FinishReason
from swarm.testing.memory_network import LinkModel
from swarm.types import LayerSpan

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-rope-llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
}
CHAINS = {"one hop": (), "two": (4,), "three": (1, 2), "five": (1, 2, 3, 5)}


def family(name: str) -> tuple[Any, ModelTensors]:
    model = tiny_model(name.split("-")[0], **FAMILIES[name])
    return model, ModelTensors(model)


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(2, 131) for _ in range(length)]


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("name", FAMILIES)
@virtual_time
async def test_greedy_tokens_are_those_of_transformers(name: str, chain: str) -> None:
    model, source = family(name)
    rng = random.Random(chain)
    prompt_ids = prompt(rng, 21)
    async with memory_swarm(source, cut(6, *CHAINS[chain])) as swarm, swarm.client(prefill_chunk=8) as client:
        answer = await client.generate(prompt_ids, max_new_tokens=24)
    assert list(answer.token_ids) == hf_greedy(model, prompt_ids, 24)
    assert answer.finish_reason is FinishReason.LENGTH
    assert [(h.start, h.end) for h in answer.chain.hops] == [(s.start, s.end) for s in cut(6, *CHAINS[chain])]


@virtual_time
async def test_sessions_in_one_batch_are_independent() -> None:
    model, source = family("llama")
    rng = random.Random(5)
    prompts = [prompt(rng, length) for length in (3, 17, 40, 9, 26)]
    async with memory_swarm(source, cut(6, 2, 5)) as swarm, swarm.client(prefill_chunk=7) as client:
        answers = await asyncio.gather(*(client.generate(prompt_ids, max_new_tokens=20) for prompt_ids in prompts))
        for engine in swarm.engines.values():
            engine.cache.check_integrity()
    for prompt_ids, answer in zip(prompts, answers, strict=True):
        assert list(answer.token_ids) == hf_greedy(model, prompt_ids, 20)


@virtual_time
async def test_seeded_sampling_is_the_same_on_any_chain_and_in_any_batch() -> None:
    _, source = family("llama")
    rng = random.Random(6)
    prompt_ids, others = prompt(rng, 15), [prompt(rng, 30) for _ in range(3)]
    options = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1.2, "seed": 17}
    seen = set()
    for borders in ((), (3,), (1, 4)):
        async with memory_swarm(source, cut(6, *borders)) as swarm, swarm.client() as client:
            alone = await client.generate(prompt_ids, max_new_tokens=20, **options)
            together = await asyncio.gather(
                client.generate(prompt_ids, max_new_tokens=20, **options),
                *(client.generate(o, max_new_tokens=25, temperature=1.0, seed=i) for i, o in enumerate(others)),
            )
        seen |= {alone.token_ids, together[0].token_ids}
    assert len(seen) == 1
    async with memory_swarm(source, cut(6)) as swarm, swarm.client() as client:
        other = await client.generate(prompt_ids, max_new_tokens=20, **{**options, "seed": 18})
    assert other.token_ids not in seen


@virtual_time
async def test_hops_may_use_part_of_a_span() -> None:
    model, source = family("llama")
    prompt_ids = prompt(random.Random(7), 12)
    async with memory_swarm(source, [LayerSpan(0, 4), LayerSpan(2, 6)]) as swarm, swarm.client() as client:
        answer = await client.generate(prompt_ids, max_new_tokens=12)
    assert list(answer.token_ids) == hf_greedy(model, prompt_ids, 12)
    assert len(answer.chain) == 2


@pytest.mark.parametrize("victim", [0, 1, 2])
@virtual_time
async def test_a_node_that_crashes_mid_answer_costs_time_and_no_token(victim: int) -> None:
    model, source = family("llama")
    prompt_ids = prompt(random.Random(8), 18)
    spans = cut(6, 2, 4)
    async with (
        memory_swarm(source, [*spans, *spans], LinkModel(delay_s=0.005)) as swarm,
        swarm.client() as client,
        client.stream(prompt_ids, max_new_tokens=24) as stream,
    ):
        count = 0
        async for _ in stream:
            count += 1
            if count == 9:
                chain = stream.chain
                assert chain is not None
                swarm.kill(chain.hops[victim].peer)
        answer = stream.result
    assert list(answer.token_ids) == hf_greedy(model, prompt_ids, 24)
    assert len(answer.repairs) == 1


@virtual_time
async def test_no_full_chain_names_the_missing_layers() -> None:
    _, source = family("llama")
    async with memory_swarm(source, [LayerSpan(0, 2), LayerSpan(4, 6)]) as swarm, swarm.client() as client:
        with pytest.raises(NoRoute, match="2:4") as caught:
            await client.generate([5, 6], max_new_tokens=4)
    assert caught.value.missing == ((2, 4),)


@virtual_time
async def test_cancelling_frees_the_pages_of_every_hop() -> None:
    _, source = family("llama")
    async with memory_swarm(source, cut(6, 3)) as swarm, swarm.client() as client:
        stream = client.stream(prompt(random.Random(9), 40), max_new_tokens=100)
        async for piece in stream:
            if piece.token_ids:
                break
        await stream.cancel()
        assert stream.result.finish_reason is FinishReason.CANCELLED
        await asyncio.sleep(1.0)
        assert [leak for node in swarm.nodes.values() if (leak := node.leaks())] == []


@virtual_time
async def test_stop_strings_and_the_end_of_the_turn() -> None:
    model, source = family("llama")
    prompt_ids = prompt(random.Random(10), 12)
    expected = hf_greedy(model, prompt_ids, 20)
    words = "".join(f"{t} " for t in expected)
    async with memory_swarm(source, cut(6, 3)) as swarm:
        stop = f" {expected[7]} {expected[8]} "
        async with swarm.client() as client:
            answer = await client.generate(prompt_ids, max_new_tokens=20, stop=stop)
        assert answer.text == words[: words.index(stop)]
        assert answer.finish_reason is FinishReason.STOP
        async with swarm.client(name=1, eos=[expected[5]]) as client:
            answer = await client.generate(prompt_ids, max_new_tokens=20)
        assert answer.token_ids == tuple(expected[: expected.index(expected[5]) + 1])
        assert answer.finish_reason is FinishReason.EOS
        assert str(expected[5]) not in answer.text.split()[len(answer.token_ids) - 1 :]


@virtual_time
async def test_a_full_swarm_refuses_with_a_reason() -> None:
    _, source = family("llama")
    async with memory_swarm(source, []) as swarm:
        await swarm.add_node(LayerSpan(0, 6), kv_tokens=64)
        async with swarm.client() as client:
            with pytest.raises((RemoteError, NoRoute)) as caught:
                await client.generate(prompt(random.Random(11), 60), max_new_tokens=60)
    assert str(caught.value)


@virtual_time
async def test_the_client_relays_an_edge_between_hops_that_cannot_connect() -> None:
    model, source = family("llama")
    prompt_ids = prompt(random.Random(12), 30)
    async with memory_swarm(source, cut(6, 2, 4)) as swarm, swarm.client(prefill_chunk=8) as client:
        swarm.network.partition(swarm.peers[0], swarm.peers[1])
        answer = await client.generate(prompt_ids, max_new_tokens=12)
        assert answer.repairs == ()
    assert list(answer.token_ids) == hf_greedy(model, prompt_ids, 12)


@virtual_time
async def test_other_weights_under_the_same_name_are_rejected() -> None:
    _, source = family("llama")
    other_model = ModelTensors(tiny_model("llama", seed=1))
    other_model.weight_hash = "1" * 32
    async with memory_swarm(other_model, cut(6, 3)) as swarm:
        swarm.source = source
        async with swarm.client() as client:
            with pytest.raises(WrongModel, match="other weights"):
                await client.generate([5, 6], max_new_tokens=4)


@virtual_time
async def test_impossible_requests_are_refused_before_anything_is_sent() -> None:
    _, source = family("llama")
    async with memory_swarm(source, cut(6, 3)) as swarm, swarm.client() as client:
        with pytest.raises(InvalidRequest, match="empty"):
            await client.generate("")
        with pytest.raises(ContextOverflow, match="256"):
            await client.generate(list(range(2, 102)) * 3)
        with pytest.raises(InvalidRequest, match="vocabulary"):
            await client.generate([5, 131])
        with pytest.raises(UsageError, match="not an option"):
            await client.generate([5], beams=4)
        assert all(engine.cache.free_tokens == engine.cache.capacity_tokens for engine in swarm.engines.values())
