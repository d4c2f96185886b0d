"""Whole nodes that share the experts of layers, in one process and on a network in memory. In real time, since a
leader's compute thread waits for what other nodes compute."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from memory_swarm import NumberTokenizer
from tiny_models import ModelTensors

from swarm.config import ClientConfig, Limits, NodeConfig
from swarm.net.security.identity import Identity, verify
from swarm.records import to_snapshot
from swarm.testing.memory_network import LinkModel, MemoryNetwork
from swarm.types import CostCurve, NodeProfile, PeerId, Snapshot
from swarm_client import SwarmClient
from swarm_client.network.connection import ClientNetwork
from swarm_kernels.device.device import DTYPES
from swarm_node import node as node_module
from swarm_node.membership import hardware
from swarm_node.membership.hardware import Hardware
from swarm_node.membership.memory_plan import ModelMemory
from swarm_node.membership.profiler import Calibration
from swarm_node.network.connection import NodeNetwork

LIMITS = Limits(drain_timeout_s=1.0, handover_timeout_s=0.5, route_timeout_s=20.0, repair_timeout_s=20.0)
CURVE = CostCurve((1, 4, 16, 64), (0.2, 0.3, 0.6, 2.0))
ROOM = 256 << 20
CPU = torch.device("cpu")


@dataclass
class SharingNode:
    """A node under test. `inside`: the real one, once it has begun."""

    peer: PeerId
    stop: asyncio.Event
    task: asyncio.Task[None]
    transport: Any = None
    inside: Any = None
    events: list[tuple[str, str]] = field(default_factory=list)

    def event(self, name: str, sentence: str, **facts: Any) -> None:
        self.events.append((name, sentence))

    def loading(self, share: float) -> None:
        assert 0 <= share <= 1

    def fetching(self, done: int, total: int) -> None:
        assert 0 <= done <= total

    async def until(self, name: str, within_s: float = 20.0) -> str:
        """The sentence of the first event of this name."""
        async with asyncio.timeout(within_s):
            while True:
                if self.task.done():
                    self.task.result()
                for found, sentence in self.events:
                    if found == name:
                        return sentence
                await asyncio.sleep(0.02)


class ExpertSwarm:
    def __init__(self, source: ModelTensors, link: LinkModel, budget: int | None) -> None:
        self.source = source
        self.network = MemoryNetwork(link=link, clock=time.time)
        self.nodes: list[SharingNode] = []
        self.budget = budget
        self._clients = 0

    def add(self, *, dtype: str = "bf16", seed: int | None = None, **config: Any) -> SharingNode:
        """`config`: of the node, `layers`, `experts` and `lead` among it."""
        identity = Identity.from_seed((len(self.nodes) + 1 if seed is None else seed).to_bytes(32, "big"))
        stop = asyncio.Event()
        settings = NodeConfig(dtype=dtype, peers=("/memory/x/p2p/x",), limits=LIMITS, **config)
        node = SharingNode(identity.peer, stop, None)  # type: ignore[arg-type]

        @asynccontextmanager
        async def connect(config: NodeConfig) -> AsyncIterator[NodeNetwork]:
            node.transport = self.network.transport(identity.peer)
            try:
                directory = self.network.directory(identity.peer)
                yield NodeNetwork(node.transport, directory, identity.sign, wall_clock=time.time)
            finally:
                await node.transport.close()

        node.task = asyncio.create_task(node_module.join(settings, node, stop, connect), name=f"node {len(self.nodes)}")
        self.nodes.append(node)
        return node

    def machine(self, config: NodeConfig) -> Hardware:
        dtype = DTYPES[config.dtype]
        memory = ModelMemory.of(self.source, dtype)
        budget = config.max_memory or memory.memory_for(memory.num_layers) + ROOM
        room = hardware._room(config, self.source, CPU, memory, budget)
        facts = self.source, CPU, dtype, Calibration(1, CURVE), memory, budget, room.capacity
        return Hardware(*facts, None, room.expert_room, room.lead_room)

    async def kill(self, node: SharingNode) -> None:
        """As a power cut does: nobody is told."""
        self.network.kill(node.peer)
        node.task.cancel()
        await asyncio.wait([node.task])

    async def snapshot(self) -> Snapshot:
        records = await self.network.directory("looker").read("tiny")
        return to_snapshot(records, "tiny", time.time(), verify, self.source.config.num_layers)

    async def profile(self, node: SharingNode) -> NodeProfile | None:
        return (await self.snapshot()).node(node.peer)

    async def until(self, holds: Callable[[Snapshot], bool], within_s: float = 20.0) -> None:
        async with asyncio.timeout(within_s):
            while not holds(await self.snapshot()):
                for node in self.nodes:
                    if node.task.done() and not node.task.cancelled():
                        node.task.result()
                await asyncio.sleep(0.05)

    async def covered(self) -> None:
        await self.until(lambda snapshot: not snapshot.missing())

    @asynccontextmanager
    async def client(self, **given: Any) -> AsyncIterator[SwarmClient]:
        self._clients += 1
        transport = self.network.transport(Identity.from_seed((1000 + self._clients).to_bytes(32, "big")).peer)
        directory = self.network.directory(transport.peer)
        network = ClientNetwork.from_transport(transport, directory, LIMITS, time.time, time.monotonic)
        options: Any = {"network": network, "source": self.source, "tokenizer": NumberTokenizer(), **given}
        settings = ClientConfig(drafter="ngram", limits=LIMITS)
        async with network.pool, SwarmClient(config=settings, **options) as client:
            yield client
        await transport.close()


@asynccontextmanager
async def expert_swarm(
    monkeypatch: pytest.MonkeyPatch, source: ModelTensors, link: LinkModel = LinkModel(), budget: int | None = None
) -> AsyncIterator[ExpertSwarm]:
    swarm = ExpertSwarm(source, link, budget)

    class Noted(node_module.Node):
        def __init__(self, config: NodeConfig, report: Any, machine: Hardware, network: Any, *rest: Any) -> None:
            super().__init__(config, report, machine, network, *rest)
            report.inside = self

    monkeypatch.setattr(node_module, "measure", swarm.machine)
    monkeypatch.setattr(node_module, "Node", Noted)
    try:
        yield swarm
    finally:
        for node in swarm.nodes:
            node.stop.set()
        alive = [node.task for node in swarm.nodes if not node.task.done()]
        await asyncio.gather(*alive)
