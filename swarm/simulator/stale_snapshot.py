"""What clients and nodes read: snapshots as old as the directory makes them, and the real routing tables over them.

Owns the age of snapshots. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarm.planner.routing.route import RouteTable
from swarm.simulator.model.network import NetworkModel
from swarm.simulator.model.node import SimNode
from swarm.simulator.scenario import Scenario
from swarm.types import PeerId, Snapshot

KV_ROUNDING_TOKENS = 1024  # in large swarms requests' KV tokens are rounded up to this, to share routing tables
LARGE_SWARM_NODES = 64


class StaleSnapshot:
    """The swarm at `now`. `nodes`: also those that have left, by id."""

    def __init__(self, scenario: Scenario, network: NetworkModel, nodes: Mapping[PeerId, SimNode]) -> None:
        self.scenario = scenario
        self.network = network
        self.nodes = nodes
        self.now = 0.0
        self._taken_at = -1.0
        self._version = -1
        self.version = 0  # raised with every change that nodes publish at once
        self._snapshot: Snapshot | None = None
        self._tables: dict[int, RouteTable] = {}
        self._listed: list[SimNode] = []  # nodes that a snapshot may still show
        self._known = 0  # how many of `nodes` have been listed
        self._client_ms: dict[str, dict[PeerId, float]] = {}

    @property
    def num_layers(self) -> int:
        return self.scenario.model.layers

    def snapshot(self) -> Snapshot:
        """As a client reads it: at most `refresh_ms` old, with nodes that have just left still in it."""
        refresh_ms = self.scenario.serving.refresh_ms
        age = self.now - self._taken_at
        current = age < refresh_ms if refresh_ms > 0 else age == 0.0 and self._version == self.version
        if self._snapshot is None or not current:
            self._snapshot = self.take(self.scenario.serving.record_lifetime_ms)
            self._taken_at, self._version = self.now, self.version
            self._tables.clear()
        return self._snapshot

    def take(self, lifetime_ms: float = 0.0) -> Snapshot:
        """The swarm this instant; those that died less than `lifetime_ms` ago are still in it."""
        serving = self.scenario.serving
        new = list(self.nodes.values())[self._known :]
        self._known += len(new)
        self._listed = [
            node
            for node in (*self._listed, *new)
            if node.died is None or self.now - node.died < serving.record_lifetime_ms
        ]
        profiles = (
            node.profile(self.now) for node in self._listed if node.died is None or self.now - node.died < lifetime_ms
        )
        return Snapshot(
            self.scenario.model.name, self.num_layers, tuple(sorted(profiles, key=lambda p: p.peer)), self.now
        )

    def table(self, min_free_tokens: int) -> RouteTable:
        """The routes through nodes that publish at least so many free KV tokens."""
        snapshot = self.snapshot()
        room = min_free_tokens
        if len(snapshot.nodes) > LARGE_SWARM_NODES:
            room = -(-room // KV_ROUNDING_TOKENS) * KV_ROUNDING_TOKENS
        if room not in self._tables:
            self._tables[room] = RouteTable(snapshot, min_free_tokens=room)
        return self._tables[room]

    def client_ms(self, client: str) -> Mapping[PeerId, float]:
        """ρ between a client and every node, ms."""
        known = self._client_ms.setdefault(client, {})
        for peer in list(self.nodes)[len(known) :]:
            known[peer] = self.network.latency(client, peer)
        return known
