"""Whole nodes whose directory shows nobody: they find each other, share the layers and serve a fresh client."""

from __future__ import annotations

import asyncio

import pytest
from virtual_clock import virtual_time, wall_clock
from virtual_nodes import LAYERS, VirtualSwarm, ask, virtual_swarm

from swarm.net.security.identity import Identity
from swarm.testing.memory_network import MemoryDirectory
from swarm.types import PeerId, coverage
from swarm_client import SwarmClient


def address_of(number: int) -> str:
    peer = Identity.from_seed(number.to_bytes(32, "big")).peer
    return f"/memory/{peer}/p2p/{peer}"


async def _nobody(directory: MemoryDirectory, model: str) -> dict[PeerId, bytes]:
    return {}


async def _covered(client: SwarmClient, nodes: int) -> None:
    async with asyncio.timeout(60.0):
        while True:
            serving = (await client.snapshot()).serving()
            if len(serving) == nodes and min(coverage((n.span for n in serving if n.span), LAYERS)) > 0:
                return
            await asyncio.sleep(0.2)


@virtual_time
async def test_nodes_that_the_directory_does_not_show_serve_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryDirectory, "read", _nobody)
    async with virtual_swarm(monkeypatch, LAYERS // 2) as swarm:
        swarm.add(LAYERS // 2, peers=(address_of(1),))
        async with swarm.client(0, peers=(address_of(2),)) as early:
            await _covered(early, 2)
            swarm.add(LAYERS, peers=(address_of(2),))
            await _covered(early, 3)
            for _ in range(30):  # for longer than a record lives
                assert len((await early.snapshot()).serving()) == 3
                await asyncio.sleep(1.0)
            await _serves_a_fresh_client(swarm)
            leaver = swarm.nodes[2]
            swarm.remove(leaver)
            await leaver.end()
            for _ in range(5):  # a client asks its peers when somebody wants to know
                await early.snapshot()
                await asyncio.sleep(1.0)
            for _ in range(5):
                assert leaver.peer not in {node.peer for node in (await early.snapshot()).nodes}
                await asyncio.sleep(1.0)


async def _serves_a_fresh_client(swarm: VirtualSwarm) -> None:
    before = wall_clock()
    async with swarm.client(1, peers=(address_of(1),)) as fresh:
        await ask(fresh, (3, 1, 4), 4)
    assert wall_clock() - before < 3.0
