"""Hops that accept and never answer, or advertise quick and deliver slow, cost a client a short pause or two."""

from __future__ import annotations

import asyncio
import itertools

from recovery_swarm import TOKENS, answer_with, prompt, swarm_of, truth
from virtual_clock import virtual_time

from swarm.errors import ConnectionLost
from swarm.types import Chain

PAUSE_S, LONGEST_S = 0.5, 1.5


def nobody(chain: Chain) -> None:
    pass


@virtual_time
async def test_a_black_hole_costs_two_short_pauses_and_is_remembered() -> None:
    async with swarm_of(2) as swarm, swarm.client() as client:
        router = client._router
        assert router is not None
        chain, _ = await router.route()
        hole = chain.peers[1]
        swarm.nodes[hole].device.delay_s = 600.0
        pauses: list[float] = []
        for _ in range(6):
            begun = asyncio.get_running_loop().time()
            answer, times, _ = await answer_with(client, nobody, 1)
            assert list(answer.token_ids) == truth()
            pauses += [b - a for a, b in itertools.pairwise([begun, *times]) if b - a > PAUSE_S]
            await asyncio.sleep(60.0)  # longer than any block without a memory
        assert 1 <= len(pauses) <= 2, pauses
        assert max(pauses) < LONGEST_S
        evidence = router.memory.of(hole)
        assert evidence.strikes == len(pauses)
        served = [peer for peer, one in router.memory.known.items() if one.sessions]
        assert len(served) == 3
        assert all(router.memory.of(peer).rows >= TOKENS for peer in served)


@virtual_time
async def test_a_hop_that_is_slow_from_the_start_is_replaced_and_avoided() -> None:
    async with swarm_of(2) as swarm, swarm.client(decoding="sequential") as client:
        router = client._router
        assert router is not None
        chain, _ = await router.route()
        liar = chain.peers[0]
        swarm.nodes[liar].device.delay_s = 0.6  # where its record promises 2 ms
        answer, times, _ = await answer_with(client, nobody, 1)
        assert list(answer.token_ids) == truth()
        assert sum(b - a > 0.5 for a, b in itertools.pairwise(times)) <= 4
        assert answer.repairs
        for _ in range(3):
            answer, times, _ = await answer_with(client, nobody, 1)
            assert liar not in answer.chain.peers
            assert not answer.repairs
            await asyncio.sleep(20.0)


@virtual_time
async def test_with_nobody_else_a_node_that_failed_is_used_again() -> None:
    async with swarm_of(1) as swarm, swarm.client() as client:
        router = client._router
        assert router is not None
        chain, snapshot = await router.route()
        for peer in chain.peers:
            for number in range(3):
                router.memory.failed(peer, ConnectionLost(str(number)), snapshot.observed_at)
        answer, _, _ = await answer_with(client, nobody, 1, prompt())
        assert list(answer.token_ids) == truth()
