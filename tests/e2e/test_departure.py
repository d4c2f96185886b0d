"""Nodes that leave in the middle of answers transfer their KV caches: nothing is computed again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from memory_swarm import MemorySwarm
from recovery_swarm import SPANS, answer_with, assert_clean, prompt, swarm_of, truth
from virtual_clock import virtual_time

from swarm.errors import NodeLeaving
from swarm.types import Chain

pytestmark = pytest.mark.slow


def leaver(swarm: MemorySwarm, *victims: int) -> Callable[[Chain], None]:
    def strike(chain: Chain) -> None:
        for victim in victims:
            assert swarm.nodes[chain.peers[victim]].service.evict(NodeLeaving("this node leaves"), lambda span: True)

    return strike


@pytest.mark.parametrize("at", [1, 9, 20])
@pytest.mark.parametrize("victims", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)], ids=str)
@virtual_time
async def test_a_departing_node_transfers_its_kv_cache(victims: tuple[int, ...], at: int) -> None:
    async with swarm_of(2) as swarm, swarm.client() as client:
        answer, _, _ = await answer_with(client, leaver(swarm, *victims), at, prompt(37))
        assert list(answer.token_ids) == truth(37)
        counters = [node.service.counters for node in swarm.nodes.values()]
        assert sum(c.replayed for c in counters) == 0
        assert sum(c.kv_transferred for c in counters) >= len(victims) * (37 + at - 1)
        await asyncio.sleep(6.0)
        await assert_clean(swarm)


@pytest.mark.parametrize("victim", range(3))
@virtual_time
async def test_a_failed_kv_transfer_falls_back_to_replay(victim: int) -> None:
    async with swarm_of(2) as swarm, swarm.client() as client:

        def strike(chain: Chain) -> None:
            leaver(swarm, victim)(chain)
            for node in swarm.nodes.values():
                if node.span == SPANS[victim]:
                    swarm.network.partition(chain.peers[victim], node.peer)

        answer, _, _ = await answer_with(client, strike, 9)
        assert list(answer.token_ids) == truth()
        assert sum(node.service.counters.kv_transferred for node in swarm.nodes.values()) == 0
