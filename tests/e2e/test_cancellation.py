"""A generation that is cancelled ends on every hop as soon as the hop can know it, whatever it waits for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
from memory_swarm import STEP_S, MemorySwarm, cut, memory_swarm
from tiny_models import ModelTensors, tiny_model
from virtual_clock import virtual_time

from swarm.planner.generation.state_machine import FinishReason
from swarm.testing.memory_network import LinkModel
from swarm_client import TextStream
from swarm_hop.serving.executor import Compute, ScheduledStep

DELAY_S = 0.01
LINK = LinkModel(delay_s=DELAY_S)
PROMPT = [random.Random(9).randrange(2, 131) for _ in range(300)]
RUN_S = {"opening": 0.025, "prefill": 0.13, "decoding": 0.5}  # how long it runs before it is cancelled


@pytest.fixture(scope="module")
def source() -> ModelTensors:
    return ModelTensors(tiny_model("llama", max_position_embeddings=1024))


def record_starts(swarm: MemorySwarm) -> list[float]:
    """The loop times at which steps start on any hop from now on."""
    starts: list[float] = []
    for engine in swarm.engines.values():
        original = engine.prepare

        def prepare(steps: Sequence[ScheduledStep], original: Any = original) -> Compute:
            starts.extend([asyncio.get_running_loop().time()] * len(steps))
            compute: Compute = original(steps)
            return compute

        engine.prepare = prepare  # type: ignore[method-assign]
    return starts


async def read_some(stream: TextStream) -> None:
    async for _ in stream:
        pass


async def assert_it_ends(swarm: MemorySwarm, starts: list[float], cancelled_at: float) -> None:
    """From when the news can be there, no hop starts a step, and none keeps the session."""
    before = len(starts)
    await asyncio.sleep(DELAY_S + STEP_S + 1e-6)
    assert not any(node.service.sessions for node in swarm.nodes.values())
    await asyncio.sleep(1.0)
    late = [at for at in starts[before:] if at > cancelled_at + DELAY_S + 1e-6]
    assert late == []


@pytest.mark.parametrize("decoding", ["sequential", "tree", "pipedec"])
@pytest.mark.parametrize("phase", list(RUN_S))
@virtual_time
async def test_a_reader_that_is_cancelled_ends_the_work_on_every_hop(
    source: ModelTensors, phase: str, decoding: str
) -> None:
    async with memory_swarm(source, cut(6, 2, 4), LINK) as swarm, swarm.client(prefill_chunk=8) as client:
        starts = record_starts(swarm)
        stream = client.stream(PROMPT, max_new_tokens=500, decoding=decoding)
        reader = asyncio.create_task(read_some(stream))
        await asyncio.sleep(RUN_S[phase])
        assert bool(starts) == (phase != "opening")
        assert bool(stream._loop.generation.generated) == (phase == "decoding")
        reader.cancel()
        cancelled_at = asyncio.get_running_loop().time()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert asyncio.get_running_loop().time() == cancelled_at  # it waits for no hop
        await assert_it_ends(swarm, starts, cancelled_at)
        await stream.cancel()
        assert stream.result.finish_reason is FinishReason.CANCELLED


@pytest.mark.parametrize("phase", list(RUN_S))
@virtual_time
async def test_another_task_may_cancel_it_and_the_reader_s_loop_ends(source: ModelTensors, phase: str) -> None:
    async with memory_swarm(source, cut(6, 2, 4), LINK) as swarm, swarm.client(prefill_chunk=8) as client:
        starts = record_starts(swarm)
        stream = client.stream(PROMPT, max_new_tokens=500)
        reader = asyncio.create_task(read_some(stream))
        await asyncio.sleep(RUN_S[phase])
        cancelled_at = asyncio.get_running_loop().time()
        await asyncio.gather(stream.cancel(), stream.cancel())  # at the same time
        await reader  # not cancelled itself
        assert reader.cancelling() == 0
        await assert_it_ends(swarm, starts, cancelled_at)
        assert stream.result.finish_reason is FinishReason.CANCELLED
        await stream.cancel()


@virtual_time
async def test_a_reader_that_leaves_its_loop_ends_the_work(source: ModelTensors) -> None:
    async with memory_swarm(source, cut(6, 2, 4), LINK) as swarm, swarm.client() as client:
        starts = record_starts(swarm)
        async with client.stream(PROMPT, max_new_tokens=500) as stream:
            await anext(aiter(stream))
        await assert_it_ends(swarm, starts, asyncio.get_running_loop().time())
        unread = client.stream(PROMPT)
        await unread.cancel()
        assert unread.result.token_ids == ()


@virtual_time
async def test_a_reader_that_is_cancelled_by_two_stays_cancelled(source: ModelTensors) -> None:
    async with memory_swarm(source, cut(6, 3), LINK) as swarm, swarm.client() as client:
        stream = client.stream(PROMPT, max_new_tokens=500)
        reader = asyncio.create_task(read_some(stream))
        await asyncio.sleep(RUN_S["decoding"])
        reader.cancel()
        await stream.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
