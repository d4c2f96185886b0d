"""A hop that lies spoils the answers it takes part in and none after: nothing computed from its rows is reused."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from memory_swarm import MemorySwarm
from recovery_swarm import TOKENS, prompt, swarm_of, truth
from virtual_clock import virtual_time

from swarm.block_hash import HASH_BLOCK_TOKENS
from swarm.errors import ConnectionLost
from swarm.types import LayerSpan, PeerId
from swarm_client import SwarmClient
from swarm_hop.serving.executor import ScheduledStep

LENGTH = 3 * HASH_BLOCK_TOKENS + 5
FIRST, MIDDLE, TAIL = LayerSpan(0, 2), LayerSpan(2, 4), LayerSpan(4, 6)
FORGOTTEN_S = 200.0  # longer than any block


def add_noise(swarm: MemorySwarm, peer: PeerId) -> None:
    """Whatever the node computes, it sends something else."""
    engine: Any = swarm.engines[peer]
    honest, random = engine.outputs, np.random.default_rng(1)

    def outputs(steps: Sequence[ScheduledStep], hidden: Any, plan: Any) -> Any:
        sent = []
        for output in honest(steps, hidden, plan):
            rows = np.frombuffer(bytes(output.body), np.float32)
            noisy = rows * (1.0 + random.standard_normal(rows.shape, np.float32))
            sent.append(dataclasses.replace(output, body=noisy.tobytes()))
        return sent

    engine.outputs = outputs


def peer_of(swarm: MemorySwarm, span: LayerSpan) -> PeerId:
    return next(peer for peer, node in swarm.nodes.items() if node.span == span)


async def answer(client: SwarmClient) -> tuple[list[int], tuple[PeerId, ...], int]:
    """-> (tokens, peers of the chain, cached tokens)."""
    result = await client.generate(prompt(LENGTH), max_new_tokens=TOKENS)
    return list(result.token_ids), result.chain.peers, result.cached_prompt_tokens


async def avoid(client: SwarmClient, peer: PeerId) -> None:
    router = client._router
    assert router is not None
    router.block(peer, ConnectionLost("for this test"))


@virtual_time
async def test_what_hops_behind_a_liar_cached_is_not_used_without_it() -> None:
    async with swarm_of(1) as swarm, swarm.client() as client:
        honest = peer_of(swarm, MIDDLE)
        assert (await answer(client))[0] == truth(LENGTH)  # now every hop has cached the question
        liar = await swarm.add_node(MIDDLE)
        add_noise(swarm, liar)
        await asyncio.sleep(5.0)
        await avoid(client, honest)
        tokens, peers, _ = await answer(client)
        assert liar in peers
        assert tokens != truth(LENGTH)
        swarm.kill(liar)
        await asyncio.sleep(FORGOTTEN_S)
        tokens, peers, cached = await answer(client)
        assert honest in peers
        assert tokens == truth(LENGTH)
        assert cached == LENGTH // HASH_BLOCK_TOKENS * HASH_BLOCK_TOKENS  # of the first answer
        for engine in swarm.engines.values():
            engine.cache.check_integrity()


@pytest.mark.parametrize("leaves_at", [1, 8])
@virtual_time
async def test_an_answer_that_outlived_a_liar_leaves_nothing_behind_it(leaves_at: int) -> None:
    async with swarm_of(1) as swarm, swarm.client() as client:
        honest = peer_of(swarm, MIDDLE)
        liar = await swarm.add_node(MIDDLE)
        add_noise(swarm, liar)
        await asyncio.sleep(5.0)
        await avoid(client, honest)
        stream = client.stream(prompt(LENGTH), max_new_tokens=TOKENS)
        tokens: list[int] = []
        async for piece in stream:
            tokens += piece.token_ids
            if len(tokens) >= leaves_at and swarm.network.alive(liar):
                swarm.kill(liar)
        assert len(stream.result.repairs) >= 1
        assert tokens != truth(LENGTH)
        for again in range(3):
            tokens, peers, cached = await answer(client)
            assert honest in peers
            assert tokens == truth(LENGTH)
            assert (cached > 0) == (again > 0)  # an honest chain's own are used as ever
        for engine in swarm.engines.values():
            engine.cache.check_integrity()
