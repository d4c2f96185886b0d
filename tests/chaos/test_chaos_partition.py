"""The network is cut between two halves of a swarm for 30 s, and whole again: nothing hangs, and no token is lost."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from memory_swarm import MemorySwarm, cut, memory_swarm
from tiny_models import ModelTensors
from virtual_chaos import model, question
from virtual_clock import virtual_time

from swarm.config import Limits
from swarm.errors import NoRoute, SwarmError
from swarm.testing.memory_network import LinkModel, MemoryDirectory, MemoryNetwork
from swarm.types import PeerId
from swarm_client import SwarmClient

pytestmark = pytest.mark.slow

LIMITS = Limits()
SPANS = cut(6, 2, 4)
CUT_S = 30.0
CLIENT = 0


class TornDirectory(MemoryDirectory):
    """What a reader knows of peers it is cut off from is what it knew before, until that expires."""

    def __init__(self, network: MemoryNetwork, peer: PeerId) -> None:
        super().__init__(network, peer)
        self._known: dict[PeerId, bytes] = {}

    async def read(self, model: str) -> dict[PeerId, bytes]:
        records = await super().read(model)
        self._known.update({p: r for p, r in records.items() if not self._network.cut(self._peer, p)})
        return {p: self._known[p] for p in records if p in self._known}


@pytest.fixture(autouse=True)
def _torn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryNetwork, "directory", lambda network, peer: TornDirectory(network, peer))


@contextmanager
def torn(swarm: MemorySwarm, ours: Sequence[PeerId], theirs: Sequence[PeerId]) -> Iterator[None]:
    pairs = list(itertools.product(ours, theirs))
    for a, b in pairs:
        swarm.network.partition(a, b)
    yield
    for a, b in pairs:
        swarm.network.heal(a, b)


async def covered_after(client: SwarmClient) -> float:
    """Seconds until the client's map shows every layer served."""
    clock = asyncio.get_running_loop().time
    begun = clock()
    while True:
        if not (await client.snapshot()).missing():
            return clock() - begun
        await asyncio.sleep(0.25)


async def outcome(client: SwarmClient, number: int) -> tuple[str, float]:
    """Ask. -> "right" or the error's code, and how long that took."""
    clock = asyncio.get_running_loop().time
    prompt, expected = question(number)
    begun = clock()
    try:
        answer = await client.generate(prompt, max_new_tokens=len(expected))
    except SwarmError as error:
        return error.code, clock() - begun
    assert answer.token_ids == expected
    return "right", clock() - begun


@pytest.mark.parametrize("whole", [True, False], ids=["our half has every layer", "our half lacks layers"])
@virtual_time
async def test_a_cut_of_thirty_seconds(whole: bool) -> None:
    async with memory_swarm(ModelTensors(model()), SPANS * 2, LinkModel(delay_s=0.02), limits=LIMITS) as swarm:
        async with swarm.client(CLIENT) as client:
            assert (await outcome(client, 0))[0] == "right"
            me = client._network.pool.peer  # type: ignore[union-attr]
            half = swarm.peers[:3] if whole else [swarm.peers[i] for i in (0, 1, 3, 4)]
            theirs = [peer for peer in swarm.peers if peer not in half]
            clock = asyncio.get_running_loop().time
            asking = asyncio.create_task(outcome(client, 1))
            await asyncio.sleep(0.3)
            begun = clock()
            with torn(swarm, [me, *half], theirs):
                ended = await asking
                if whole:
                    assert ended[0] == "right"
                else:
                    assert ended[0] == NoRoute.code
                    assert clock() - begun <= LIMITS.repair_timeout_s + 1.0
                later, took_s = await outcome(client, 2)
                assert later == ("right" if whole else NoRoute.code)
                assert took_s <= LIMITS.route_timeout_s + LIMITS.open_timeout_s + 1.0
                await asyncio.sleep(max(0.0, begun + CUT_S - clock()))
            assert await covered_after(client) <= 30.0
            assert (await outcome(client, 3))[0] == "right"


@virtual_time
async def test_an_answer_that_was_cut_off_goes_on_when_the_network_is_whole_again() -> None:
    async with memory_swarm(ModelTensors(model()), SPANS * 2, LinkModel(delay_s=0.02), limits=LIMITS) as swarm:
        async with swarm.client(CLIENT) as client:
            assert (await outcome(client, 0))[0] == "right"
            me = client._network.pool.peer  # type: ignore[union-attr]
            theirs = [swarm.peers[2], swarm.peers[5]]
            asking = asyncio.create_task(outcome(client, 1))
            await asyncio.sleep(0.3)
            with torn(swarm, [me, *(p for p in swarm.peers if p not in theirs)], theirs):
                await asyncio.sleep(15.0)
                assert not asking.done()
            ended, took_s = await asking
            assert ended == "right"
            assert took_s < 15.0 + LIMITS.repair_timeout_s
