"""More generations at once than a node admits sessions of one peer: the others wait for their turn."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from memory_swarm import LIMITS, cut, memory_swarm
from tiny_models import ModelTensors, tiny_model
from virtual_clock import virtual_time

from swarm.errors import NodeBusy
from swarm.testing.memory_network import LinkModel

LINK = LinkModel(delay_s=0.01)
FEW = replace(LIMITS, max_sessions_per_peer=3, turn_timeout_s=30.0)
PROMPTS = [[random.Random(i).randrange(2, 131) for _ in range(9)] for i in range(10)]


@pytest.fixture(scope="module")
def source() -> ModelTensors:
    return ModelTensors(tiny_model("llama"))


@virtual_time
async def test_all_are_answered_and_none_is_refused(source: ModelTensors) -> None:
    async with memory_swarm(source, cut(6, 2, 4), LINK, limits=FEW) as swarm, swarm.client() as client:
        waits: list[str] = []

        async def answer(prompt: Sequence[int]) -> tuple[int, ...]:
            stream = client.stream(prompt, max_new_tokens=6)
            async for chunk in stream:
                if chunk.waiting:
                    waits.append(chunk.waiting)
            return stream.result.token_ids

        together = await asyncio.gather(*(answer(prompt) for prompt in PROMPTS))
        alone = [(await client.generate(prompt, max_new_tokens=6)).token_ids for prompt in PROMPTS]
        assert list(together) == alone
        assert len(waits) == len(PROMPTS) - FEW.max_sessions_per_peer
        assert all("waits for its turn" in reason for reason in waits)


@virtual_time
async def test_streams_that_nobody_reads_are_named(source: ModelTensors) -> None:
    async with memory_swarm(source, cut(6, 2, 4), LINK, limits=FEW) as swarm, swarm.client() as client:
        async with contextlib.AsyncExitStack() as stack:
            for prompt in PROMPTS[: FEW.max_sessions_per_peer]:
                stream = await stack.enter_async_context(client.stream(prompt, max_new_tokens=6))
                await anext(aiter(stream))
            with pytest.raises(NodeBusy, match=r"3 generations open.*read each stream to its end, or close it"):
                await client.generate(PROMPTS[-1], max_new_tokens=6)
        assert len((await client.generate(PROMPTS[-1], max_new_tokens=6)).token_ids) == 6


@virtual_time
async def test_forks_and_ordinary_answers_wait_for_each_other_without_a_knot(source: ModelTensors) -> None:
    async with memory_swarm(source, cut(6, 2, 4), LINK, limits=FEW) as swarm, swarm.client() as client:
        forks = client.fork_streams(PROMPTS[0], 7, max_new_tokens=5, temperature=0.8, seed=1)
        plain = [client.stream(prompt, max_new_tokens=5) for prompt in PROMPTS]
        results = await asyncio.gather(*(stream.read() for stream in (*forks, *plain)))
        assert all(len(result.token_ids) == 5 for result in results)


@virtual_time
async def test_a_cancelled_wait_gives_no_turn_away(source: ModelTensors) -> None:
    async with memory_swarm(source, cut(6, 2, 4), LINK, limits=FEW) as swarm, swarm.client() as client:
        tasks = [asyncio.create_task(client.generate(prompt, max_new_tokens=6)) for prompt in PROMPTS]
        await asyncio.sleep(0.02)
        for task in tasks[::2]:
            task.cancel()
        left = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(result, asyncio.CancelledError) for result in left[::2]] == [True] * len(tasks[::2])
        again = await asyncio.gather(*(client.generate(prompt, max_new_tokens=6) for prompt in PROMPTS))
        assert all(len(result.token_ids) == 6 for result in again)
