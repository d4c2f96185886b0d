"""The client's map of the swarm."""

from __future__ import annotations

from collections.abc import Sequence

from memory_swarm import cut, memory_swarm
from tiny_models import ModelTensors, tiny_model
from virtual_clock import virtual_time

from swarm.net.memory import Link
from swarm.types import PeerId
from swarm_client.view import SwarmView


class Amnesia:
    """A directory that knows nobody any more until it is told of somebody."""

    def __init__(self, records: dict[PeerId, bytes]) -> None:
        self.records = records
        self.known = True
        self.met: list[str] = []

    async def read(self, model: str) -> dict[PeerId, bytes]:
        return self.records if self.known else {}

    async def meet(self, addresses: Sequence[str]) -> int:
        self.met = list(addresses)
        self.known = True
        return len(addresses)


@virtual_time
async def test_a_client_whose_directory_has_lost_everybody_looks_up_those_it_knew() -> None:
    source = ModelTensors(tiny_model("llama"))
    async with memory_swarm(source, cut(6, 3), Link(0.001)) as swarm, swarm.client() as client:
        await client.snapshot()
        real = client._view
        assert real is not None
        directory = Amnesia(await real._directory.read(real._model))
        view = SwarmView(
            directory,  # type: ignore[arg-type]
            real._pool,
            real._model,
            6,
            dtype=None,
            weight_hash=real._weight_hash,
            wall_clock=real._wall_clock,
            meet=directory.meet,
        )
        before = await view.snapshot(fresh=True)
        assert len(before.nodes) == 2
        directory.known = False
        after = await view.snapshot(fresh=True)
        assert [node.peer for node in after.nodes] == [node.peer for node in before.nodes]
        assert directory.met == [node.addresses[0] for node in before.nodes]
        await view.close()
