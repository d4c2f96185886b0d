"""A caller's own `asyncio.timeout` around an answer ends in TimeoutError, whenever it expires and whatever fails."""

from __future__ import annotations

import asyncio

import pytest
from memory_swarm import MemorySwarm
from recovery_swarm import TOKENS, prompt, swarm_of, truth
from virtual_clock import virtual_time

from swarm_client import SwarmClient


async def timed_out(client: SwarmClient, timeout_s: float) -> bool:
    """Whether the answer took longer. The calling task is not left cancelled either way."""
    task = asyncio.current_task()
    assert task is not None
    begun = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(timeout_s):
            answer = await client.generate(prompt(), max_new_tokens=TOKENS)
            assert list(answer.token_ids) == truth()
        return False
    except TimeoutError:
        assert asyncio.get_running_loop().time() - begun == pytest.approx(timeout_s, abs=1e-3)  # and at once
        return True
    finally:
        assert task.cancelling() == 0


def crash_one(swarm: MemorySwarm) -> None:
    """Of each span, while the records still say that they serve."""
    for peer in swarm.peers[:3]:
        swarm.kill(peer)


@pytest.mark.parametrize("crashed", [False, True])
@virtual_time
async def test_a_callers_timeout_at_any_time(crashed: bool) -> None:
    outcomes = set()
    for millis in [*range(1, 120, 3), *range(120, 700, 29), 5000, 20000]:
        async with swarm_of(2) as swarm, swarm.client() as client:
            if crashed:
                crash_one(swarm)
            outcomes.add(await timed_out(client, millis / 1e3))
            await asyncio.sleep(1.0)
            assert not any(node.service.sessions for node in list(swarm.nodes.values())[3:])
    assert outcomes == {True, False}


@virtual_time
async def test_a_callers_timeout_while_there_is_no_chain() -> None:
    async with swarm_of(1) as swarm, swarm.client() as client:
        crash_one(swarm)
        for millis in (1, 10, 100, 500, 1000):
            assert await timed_out(client, millis / 1e3)
