"""Forks of one prompt: the hops compute it once, and every fork is what a generation of its own would be."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from memory_swarm import LIMITS, MemorySwarm, cut, memory_swarm
from tiny_models import ModelTensors, tiny_model
from virtual_clock import virtual_time

from swarm.block_hash import HASH_BLOCK_TOKENS
from swarm.errors import InvalidRequest
from swarm.planner.generation.state_machine import FinishReason
from swarm.testing.memory_network import LinkModel
from swarm.types import PeerId
from swarm_client import GenerationResult, TextStream
from swarm_hop.serving.executor import Compute, ScheduledStep

PROMPT = [random.Random(5).randrange(2, 131) for _ in range(4 * HASH_BLOCK_TOKENS + 3)]
BLOCK_END = 4 * HASH_BLOCK_TOKENS
SAMPLED: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.9, "top_p": 0.95, "seed": 70}
LINK = LinkModel(delay_s=0.01)


@pytest.fixture(scope="module")
def source() -> ModelTensors:
    return ModelTensors(tiny_model("llama"))


def count_prompt_rows(swarm: MemorySwarm) -> dict[PeerId, int]:
    """Counts the rows at positions of the prompt that each node computes from now on."""
    rows = dict.fromkeys(swarm.engines, 0)

    def watch(peer: PeerId) -> None:
        engine, original = swarm.engines[peer], swarm.engines[peer].prepare

        def prepare(steps: Sequence[ScheduledStep]) -> Compute:
            for step in (scheduled.arrival.step for scheduled in steps):
                first = step.committed_before + len(step.commit_slots)
                rows[peer] += len(range(first, min(first + step.causal_rows, len(PROMPT))))
            return original(steps)

        engine.prepare = prepare  # type: ignore[method-assign]

    for peer in swarm.engines:
        watch(peer)
    return rows


async def read_all(streams: Sequence[TextStream]) -> list[GenerationResult]:
    return list(await asyncio.gather(*(stream.read() for stream in streams)))


@pytest.mark.parametrize("decoding", ["sequential", "auto"])
@virtual_time
async def test_the_prompt_is_computed_once_and_the_tokens_are_those_of_separate_generations(
    source: ModelTensors, decoding: str
) -> None:
    async with memory_swarm(source, cut(6, 2, 4), LINK) as swarm:
        rows = count_prompt_rows(swarm)
        async with swarm.client() as client:
            forks = await read_all(client.fork_streams(PROMPT, 4, decoding=decoding, **SAMPLED))
        # Each fork computes the rest of the prompt after its last whole block.
        assert set(rows.values()) == {len(PROMPT) + 3 * (len(PROMPT) - BLOCK_END)}
        assert [fork.seed for fork in forks] == [70, 71, 72, 73]
        assert [fork.cached_prompt_tokens for fork in forks] == [0, BLOCK_END, BLOCK_END, BLOCK_END]
        for i, fork in enumerate(forks):
            async with swarm.client(1 + i) as other:  # has no prefix cached
                alone = await other.generate(PROMPT, **{**SAMPLED, "seed": 70 + i, "decoding": "sequential"})
            assert alone.cached_prompt_tokens == 0
            assert fork.token_ids == alone.token_ids
        assert len({fork.token_ids for fork in forks}) > 1


@virtual_time
async def test_greedy_forks_are_equal_and_only_the_first_has_the_prompt_s_log_probabilities(
    source: ModelTensors,
) -> None:
    async with memory_swarm(source, cut(6, 3)) as swarm, swarm.client() as client:
        forks = await read_all(client.fork_streams(PROMPT, 3, max_new_tokens=6))
        assert len({fork.token_ids for fork in forks}) == 1
        asked = client.fork_streams(PROMPT, 3, max_new_tokens=6, prompt_logprobs=2)
        assert [s._loop.generation.request.prompt_logprobs for s in asked] == [2, None, None]


@virtual_time
async def test_forks_read_one_after_the_other_or_in_any_order(source: ModelTensors) -> None:
    async with memory_swarm(source, cut(6, 3)) as swarm, swarm.client() as client:
        rows = count_prompt_rows(swarm)
        streams = client.fork_streams(PROMPT, 3, **SAMPLED)
        results = [await stream.read() for stream in reversed(streams)][::-1]
        assert set(rows.values()) == {len(PROMPT) + 2 * (len(PROMPT) - BLOCK_END)}
        together = await read_all(client.fork_streams(PROMPT, 3, **SAMPLED))
    assert [r.token_ids for r in results] == [r.token_ids for r in together]


@virtual_time
async def test_when_the_first_is_cancelled_before_its_token_the_next_one_computes_the_prompt(
    source: ModelTensors,
) -> None:
    async with memory_swarm(source, cut(6, 3), LINK) as swarm, swarm.client() as client:
        first, *others = client.fork_streams(PROMPT, 4, **SAMPLED)
        reading = [asyncio.create_task(stream.read()) for stream in (first, *others)]
        await asyncio.sleep(0.015)  # the session is opening
        await others[0].cancel()  # waits for its turn
        await first.cancel()
        results = await asyncio.gather(*reading)
    assert [r.finish_reason for r in results] == [FinishReason.CANCELLED] * 2 + [FinishReason.LENGTH] * 2
    assert [len(r.token_ids) for r in results] == [0, 0, 8, 8]
    assert [r.cached_prompt_tokens for r in results[2:]] == [0, BLOCK_END]


@virtual_time
async def test_no_more_forks_run_than_a_node_admits_sessions(source: ModelTensors) -> None:
    limits = replace(LIMITS, max_sessions_per_peer=3)
    async with memory_swarm(source, cut(6, 3), LINK, limits=limits) as swarm, swarm.client() as client:
        results = await read_all(client.fork_streams(PROMPT, 9, **SAMPLED))
        assert not any(result.repairs for result in results)
        assert [len(result.token_ids) for result in results] == [8] * 9
        assert [result.seed for result in results] == list(range(70, 79))
        assert sum(node.service.counters.refused for node in swarm.nodes.values()) == 0


@virtual_time
async def test_a_hop_that_crashes_costs_no_fork_a_token(source: ModelTensors) -> None:
    async with memory_swarm(source, [*cut(6, 3), *cut(6, 3)], LINK) as swarm, swarm.client() as client:
        want = [r.token_ids for r in await read_all(client.fork_streams(PROMPT, 3, **SAMPLED))]
        streams = client.fork_streams(PROMPT, 3, **SAMPLED)
        reading = [asyncio.create_task(stream.read()) for stream in streams]
        await asyncio.sleep(0.08)
        assert streams[0].chain is not None
        swarm.kill(streams[0].chain.peers[1])
        results = await asyncio.gather(*reading)
    assert [r.token_ids for r in results] == want
    assert results[0].repairs


@pytest.mark.parametrize("n", [0, -1, 129, True, 2.0, "3", None])
@virtual_time
async def test_a_number_of_forks_is_checked(source: ModelTensors, n: Any) -> None:
    async with memory_swarm(source, cut(6, 3)) as swarm, swarm.client() as client:
        with pytest.raises(InvalidRequest, match="from 1 to 128"):
            client.fork_streams(PROMPT, n)


@virtual_time
async def test_the_seeds_wrap_around(source: ModelTensors) -> None:
    async with memory_swarm(source, cut(6, 3)) as swarm, swarm.client() as client:
        results = await read_all(client.fork_streams(PROMPT, 2, max_new_tokens=1, seed=(1 << 63) - 1))
    assert [result.seed for result in results] == [(1 << 63) - 1, 0]
