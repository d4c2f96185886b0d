"""The client's map of the swarm."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import NoReturn

import pytest
from memory_swarm import cut, memory_swarm
from tiny_models import ModelTensors, tiny_model
from virtual_clock import virtual_time

from swarm.errors import ConnectionLost, NoRoute, PeerUnreachable
from swarm.net.gossip.record_book import RecordBook
from swarm.net.gossip.record_exchange import RecordExchange
from swarm.net.gossip.record_reader import RecordReader
from swarm.net.security.identity import verify
from swarm.testing.memory_network import LinkModel
from swarm.types import PeerId
from swarm_client.routing.blocklist import BlocklistPolicy
from swarm_client.routing.router import ChainRouter


class Amnesia:
    """A directory that knows nobody any more until it is told of somebody."""

    def __init__(self, records: dict[PeerId, bytes]) -> None:
        self.records = records
        self.known = True
        self.met: list[str] = []

    async def read(self, model: str) -> dict[PeerId, bytes]:
        return self.records if self.known else {}

    async def rebootstrap(self, addresses: Sequence[str]) -> int:
        self.met = list(addresses)
        self.known = True
        return len(addresses)


class Loner:
    """A pool without links, to hear of nobody but by the directory."""

    peer = "loner"
    dialled: tuple[PeerId, ...] = ()

    async def get(self, peer: PeerId, addresses: Sequence[str] = (), timeout_s: float | None = None) -> NoReturn:
        raise PeerUnreachable("no links here")


def beside(real: ChainRouter, directory: Amnesia) -> ChainRouter:
    """Another view of the same swarm, by way of `directory` alone."""
    book = RecordBook(real._reader.book.model, real._reader.book._num_layers, verify, random.Random(0))
    reader = RecordReader(
        book,
        directory,  # type: ignore[arg-type]
        Loner(),  # type: ignore[arg-type]
        RecordExchange(),
        wall_clock=real._wall_clock,
        rebootstrap=directory.rebootstrap,
    )
    return ChainRouter(reader, real._pool, dtype=None, weight_hash=real._weight_hash, wall_clock=real._wall_clock)


@virtual_time
async def test_a_client_whose_directory_has_lost_everybody_looks_up_those_it_knew() -> None:
    source = ModelTensors(tiny_model("llama"))
    async with memory_swarm(source, cut(6, 3), LinkModel(0.001)) as swarm, swarm.client() as client:
        await client.snapshot()
        real = client._router
        assert real is not None
        directory = Amnesia(await real._reader._directory.read(real._reader.book.model))
        view = beside(real, directory)
        before = await view.snapshot(fresh=True)
        assert len(before.nodes) == 2
        directory.known = False
        after = await view.snapshot(fresh=True)
        assert [node.peer for node in after.nodes] == [node.peer for node in before.nodes]
        assert directory.met == [node.addresses[0] for node in before.nodes]
        await view.close()


@pytest.mark.parametrize("gone", [False, True])
@virtual_time
async def test_a_lost_node_that_answers_is_taken_back_when_there_is_no_other(gone: bool) -> None:
    source = ModelTensors(tiny_model("llama"))
    async with memory_swarm(source, cut(6, 3), LinkModel(0.001)) as swarm, swarm.client() as client:
        await client.snapshot()
        real = client._router
        assert real is not None
        view = beside(real, Amnesia(await real._reader._directory.read(real._reader.book.model)))  # no news from now on
        chain, _ = await view.route()
        victim = chain.peers[1]
        if gone:
            swarm.kill(victim, silent=True)
        view.block(victim, ConnectionLost("it fell silent"))
        with pytest.raises(NoRoute):
            await view.route()
        await asyncio.sleep(BlocklistPolicy().recovery_grace_s + 0.5)
        if gone:
            with pytest.raises(NoRoute):
                await view.route()
        else:
            assert (await view.route())[0].peers == chain.peers
            view.block(victim, ConnectionLost("once more"))  # a voice is believed once in a while, not at once again
            with pytest.raises(NoRoute):
                await view.plan_repair(chain, {victim}, include_unresponsive=True)
        await view.close()
