"""How long a message takes between machines: latency, and an uplink that carries one message at a time."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from swarm.simulator.model.rng import NamedStream


class NetworkSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`uniform`: all pairs `latency_ms` apart, give or take `spread`. `plane`: points in a square of that side."""

    kind: Literal["uniform", "plane"] = "uniform"
    latency_ms: float = 10.0  # one way
    spread: float = 0.0  # 0.2: each pair's latency lies between 0.8 and 1.2 of latency_ms
    client_ms: float = 0.0  # uniform: one way between a client and any node
    bandwidth_mbps: float = 1000.0  # of each machine's uplink
    clients: int = 1  # places that requests come from


class NetworkModel:
    """Latencies are drawn once for each pair and each place, from the seed and the names alone."""

    def __init__(self, spec: NetworkSpec, seed: int) -> None:
        self.spec = spec
        self._seed = seed
        self._free: dict[str, float] = {}  # when a sender's uplink is free again
        self._points: dict[str, tuple[float, float]] = {}
        self._pairs: dict[tuple[str, str], float] = {}
        self._bytes_per_ms = spec.bandwidth_mbps * 1e6 / 8 / 1e3

    def point(self, name: str) -> tuple[float, ...]:
        """Network coordinate, ms; empty where there is no plane."""
        if self.spec.kind != "plane":
            return ()
        if name not in self._points:
            stream = NamedStream(self._seed, "place", name)
            side = self.spec.latency_ms
            self._points[name] = (stream.uniform(0.0, side), stream.uniform(0.0, side))
        return self._points[name]

    def latency(self, a: str, b: str) -> float:
        """One way, ms. A name that begins with "client" is a client's."""
        if a == b:
            return 0.0
        if self.spec.kind == "plane":
            (ax, ay), (bx, by) = self.point(a), self.point(b)
            return math.sqrt((ax - bx) * (ax - bx) + (ay - by) * (ay - by))
        if a.startswith("client") or b.startswith("client"):
            return self.spec.client_ms
        if not self.spec.spread:
            return self.spec.latency_ms
        pair = (min(a, b), max(a, b))
        if pair not in self._pairs:
            share = NamedStream(self._seed, "pair", *pair).uniform(-self.spec.spread, self.spec.spread)
            self._pairs[pair] = self.spec.latency_ms * (1.0 + share)
        return self._pairs[pair]

    def send(self, a: str, b: str, size: float, now: float) -> float:
        """When `size` bytes that `a` sends at `now` have reached `b`."""
        if a == b:
            return now
        done = max(now, self._free.get(a, 0.0)) + size / self._bytes_per_ms
        self._free[a] = done
        return done + self.latency(a, b)
