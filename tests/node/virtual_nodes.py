"""Whole nodes, as `swarm-node join` runs them, in one process and in virtual time; clients to ask them.

Real: everything from `swarm_node.node.join` on. Made up: the network, the clock, and what a machine can do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from typing import Any

import pytest
import torch
from memory_swarm import NumberTokenizer
from tiny_models import ModelTensors, hf_greedy, tiny_model
from virtual_clock import wall_clock

from swarm.config import ClientConfig, Limits, NodeConfig
from swarm.net.security.identity import Identity, verify
from swarm.planner.rebalancing.policy import RebalancePolicy
from swarm.records import to_snapshot
from swarm.testing.memory_network import LinkModel, MemoryNetwork
from swarm.types import CostCurve, PeerId, Snapshot
from swarm_client import SwarmClient
from swarm_client.network.connection import ClientNetwork as ClientNetwork
from swarm_node import node as node_module
from swarm_node.membership.hardware import Hardware
from swarm_node.membership.memory_plan import ModelMemory
from swarm_node.membership.profiler import Calibration
from swarm_node.network.connection import Connect, NodeNetwork

LAYERS = 8
LIMITS = Limits(drain_timeout_s=5.0, handover_timeout_s=30.0, route_timeout_s=30.0, repair_timeout_s=30.0)
POLICY = RebalancePolicy(imbalance_timeout_s=10.0, cooldown_s=60.0)
CURVE = CostCurve((1, 4, 16, 64), (0.2, 0.3, 0.6, 2.0))
ROOM = 64 << 20  # bytes for keys and values, beyond what a layer must have
CPU = torch.device("cpu")


@cache
def model() -> Any:
    return tiny_model("llama", num_hidden_layers=LAYERS, hidden_size=48, intermediate_size=40)


@cache
def source() -> ModelTensors:
    return ModelTensors(model())


@cache
def truth(prompt: tuple[int, ...], count: int) -> list[int]:
    return hf_greedy(model(), prompt, count)


def machine_of(config: NodeConfig) -> Hardware:
    """A machine with room for as many layers as its config's `region` says."""
    weights = ModelMemory.of(source(), torch.float32)  # type: ignore[arg-type]
    capacity = int(config.region)
    calibration = Calibration(1, CURVE)
    budget = weights.memory_for(capacity) + ROOM
    return Hardware(source(), CPU, torch.float32, calibration, weights, budget, capacity)  # type: ignore[arg-type]


class RecordedEvents:
    """An EventReporter that remembers every event, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def event(self, name: str, sentence: str, **fields: Any) -> None:
        self.events.append((name, {"sentence": sentence, **fields}))

    def loading(self, share: float) -> None:
        assert 0 <= share <= 1

    def fetching(self, done: int, total: int) -> None:
        assert 0 <= done <= total

    def __enter__(self) -> RecordedEvents:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def names(self) -> list[str]:
        return [name for name, _ in self.events]


class VirtualNode:
    def __init__(self, swarm: VirtualSwarm, number: int, capacity: int, **config: Any) -> None:
        self.identity = Identity.from_seed(number.to_bytes(32, "big"))
        self.peer: PeerId = self.identity.peer
        self.reporter = RecordedEvents()
        self.stop = asyncio.Event()
        settings = NodeConfig(
            **{"dtype": "fp32", "region": str(capacity), "peers": ("/memory/x/p2p/x",), "limits": LIMITS, **config}
        )
        joining = node_module.join(
            settings, self.reporter, self.stop, _over_memory(swarm.network, self.identity), POLICY
        )
        self.task = asyncio.create_task(joining, name=f"node {number}")

    async def end(self) -> None:
        self.stop.set()
        await self.task


class VirtualSwarm:
    """`await add(capacity)`; `snapshot()`; `coverage()`; `async with client() as c`."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        self.nodes: list[VirtualNode] = []
        self.inside: dict[PeerId, node_module.Node] = {}
        self._made = 0

    def add(self, capacity: int, **config: Any) -> VirtualNode:
        self._made += 1
        node = VirtualNode(self, self._made, capacity, **config)
        self.nodes.append(node)
        return node

    def remove(self, node: VirtualNode) -> None:
        self.nodes.remove(node)

    async def snapshot(self) -> Snapshot:
        records = await self.network.directory("looker").read("tiny")
        return to_snapshot(records, "tiny", wall_clock(), verify, LAYERS)

    async def coverage(self) -> list[int]:
        return (await self.snapshot()).coverage()

    async def covered(self, within_s: float = 60.0) -> None:
        async with asyncio.timeout(within_s):
            while True:
                if min(await self.coverage()) > 0:
                    return
                await asyncio.sleep(0.1)

    @asynccontextmanager
    async def client(self, number: int = 0, peers: Sequence[str] = ()) -> AsyncIterator[SwarmClient]:
        transport = self.network.transport(Identity.from_seed((1000 + number).to_bytes(32, "big")).peer)
        network = ClientNetwork.from_transport(
            transport, self.network.directory(transport.peer), LIMITS, wall_clock, wall_clock, peers=peers
        )
        options = {"network": network, "source": source(), "tokenizer": NumberTokenizer()}
        async with network.pool, SwarmClient(config=ClientConfig(limits=LIMITS), **options) as client:  # type: ignore[arg-type]
            yield client
        await transport.close()


@asynccontextmanager
async def virtual_swarm(monkeypatch: pytest.MonkeyPatch, *capacities: int) -> AsyncIterator[VirtualSwarm]:
    source()  # made once and here: nodes open it in threads of their own, all at the same time
    swarm = VirtualSwarm(MemoryNetwork(link=LinkModel(delay_s=0.005), clock=wall_clock))

    class Noted(node_module.Node):
        def __init__(
            self, config: NodeConfig, report: Any, machine: Hardware, network: NodeNetwork, *rest: Any
        ) -> None:
            super().__init__(config, report, machine, network, *rest)
            swarm.inside[network.transport.peer] = self

    monkeypatch.setattr(node_module, "measure", machine_of)
    monkeypatch.setattr(node_module, "Node", Noted)
    async with AsyncExitStack() as stack:

        async def end() -> None:
            await asyncio.gather(*(node.end() for node in swarm.nodes))

        stack.push_async_callback(end)
        for capacity in capacities:
            swarm.add(capacity)
        yield swarm


def _over_memory(network: MemoryNetwork, identity: Identity) -> Connect:
    @asynccontextmanager
    async def connect(config: NodeConfig) -> AsyncIterator[NodeNetwork]:
        transport = network.transport(identity.peer)
        try:
            yield NodeNetwork(transport, network.directory(identity.peer), identity.sign, wall_clock=wall_clock)
        finally:
            await transport.close()

    return connect


async def ask(client: SwarmClient, prompt: Sequence[int], count: int) -> None:
    """One answer, which must be the model's."""
    answer = await client.generate(prompt, max_new_tokens=count)
    assert list(answer.token_ids) == truth(tuple(prompt), count)
