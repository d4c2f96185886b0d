"""Petals (Borzunov et al., 2023), by its source: `server/block_selection.py` and `client/routing/sequence_manager.py`.

Block choice: a server takes the run of blocks whose throughputs, sorted, are the lowest, and moves later if the swarm's
bottleneck would gain enough. Routing: the least of network delay, a fixed overhead a hop, and each server's time for a
block as it measured it at start, never its load; a server is always used to the end of its blocks; one without cache
room costs ten seconds more. After a loss the client sends the lost server's whole input to another one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from swarm.errors import NoRoute
from swarm.planner.routing.repair import Repair
from swarm.simulator.model.node import SimNode
from swarm.simulator.model.rng import NamedStream
from swarm.simulator.model.session import SimSession
from swarm.simulator.policy import ReplayPlan, ServingPolicy, alive, covered
from swarm.simulator.stale_snapshot import StaleSnapshot
from swarm.types import Chain, Hop, LayerSpan, NodeProfile, PeerId, missing_ranges

ALLOC_DELAY_MS = 10_000.0
BALANCE_QUALITY = 0.75
EPS = 1e-3
BENCHMARK_ROWS = 1024  # tokens of the batch with which a server measures its throughput


class Petals(ServingPolicy):
    """Servers choose blocks one after the other; clients route by static speeds."""

    def place(self, view: StaleSnapshot) -> Mapping[PeerId, LayerSpan]:
        nodes = [node for node in alive(view) if node.capacity > 0]
        self._random = NamedStream(self.scenario.seed, "petals")
        speed = {node.id: self._throughput(node) for node in nodes}
        spans: dict[PeerId, LayerSpan] = {}
        for node in nodes:
            spans[node.id] = _best_span(_throughputs(spans, speed, view.num_layers), node.capacity)
        self._rebalance_all(spans, speed, view.num_layers)
        covered(spans, view.num_layers)
        return spans

    def _throughput(self, node: SimNode) -> float:
        """Requests a second: the slower of network and compute, for a batch and an average part of its blocks."""
        model, spec = self.scenario.model, self.network.spec
        network = spec.bandwidth_mbps * 1e6 / 8 / model.row_bytes
        block_s = node.cost.layer_ms(BENCHMARK_ROWS, 0.0, 0.0) / 1e3
        compute = BENCHMARK_ROWS / block_s / ((node.capacity + 1) / 2)
        return min(network, compute)

    def _rebalance_all(self, spans: dict[PeerId, LayerSpan], speed: Mapping[PeerId, float], num_layers: int) -> None:
        """Servers check in turn whether to move, until none does; at most one round a server."""
        for _ in range(len(spans)):
            moved = False
            for peer in sorted(spans):
                if self._should_move(peer, spans, speed, num_layers):
                    others = {p: s for p, s in spans.items() if p != peer}
                    spans[peer] = _best_span(_throughputs(others, speed, num_layers), len(spans[peer]))
                    moved = True
            if not moved:
                return

    def _should_move(
        self, peer: PeerId, spans: Mapping[PeerId, LayerSpan], speed: Mapping[PeerId, float], num_layers: int
    ) -> bool:
        """Whether the bottleneck now is below BALANCE_QUALITY of what it would be once no server moved any more."""
        now = _throughputs(spans, speed, num_layers)
        mine = spans[peer]
        without = list(now)
        for block in mine:
            without[block] -= speed[peer] * (1 + EPS)
        if min(now) > EPS and min(without) <= 0:
            return False
        if _best_span(without, len(mine)) == mine:
            return False
        moved = dict(spans)
        moved[peer] = _best_span(without, len(mine))
        self._relax(moved, speed, num_layers)
        then = min(_throughputs(moved, speed, num_layers))
        return then >= max(min(now), EPS) and min(now) / then < BALANCE_QUALITY - EPS

    def _relax(self, spans: dict[PeerId, LayerSpan], speed: Mapping[PeerId, float], num_layers: int) -> None:
        moved, rounds = True, 0
        while moved and rounds < 100:
            moved, rounds = False, rounds + 1
            peers = list(spans)
            self._random.shuffle(peers)
            for peer in peers:
                rest = _throughputs(spans, speed, num_layers)
                for block in spans[peer]:
                    rest[block] -= speed[peer] * (1 + EPS)
                best = _best_span(rest, len(spans[peer]))
                moved = moved or best != spans[peer]
                spans[peer] = best

    def join(self, view: StaleSnapshot) -> Mapping[PeerId, LayerSpan]:
        seen = {n.peer: n.span for n in view.take(self.scenario.serving.record_lifetime_ms).nodes if n.span}
        speed = {peer: self._throughput(view.nodes[peer]) for peer in seen}
        blocks = _throughputs(seen, speed, view.num_layers)
        return {n.id: _best_span(blocks, n.capacity) for n in alive(view) if n.span is None and n.capacity > 0}

    def choose(self, session: SimSession, view: StaleSnapshot) -> Chain:
        return self._route(session, view, 0, view.num_layers, session.banned)

    def repair(self, session: SimSession, view: StaleSnapshot) -> ReplayPlan:
        """New servers for the blocks of each lost one; the client kept what it had sent there."""
        hops: list[Hop] = []
        anew: list[Hop] = []
        for hop in session.hops:
            if hop.peer in session.ready:
                hops.append(hop)
                continue
            taken = session.banned | {h.peer for h in session.hops} | {h.peer for h in hops}
            found = self._route(session, view, hop.start, hop.end, taken).hops
            hops.extend(found)
            anew.extend(found)
        kept = tuple(hop for hop in hops if hop not in anew)
        return ReplayPlan(Repair(Chain(tuple(hops)), kept, tuple(anew)), from_client=True)

    def _route(self, session: SimSession, view: StaleSnapshot, start: int, end: int, banned: set[PeerId]) -> Chain:
        """Least cost from the client through blocks `[start, end)` and back. Raises NoRoute."""
        servers = [n for n in view.snapshot().serving() if n.peer not in banned]
        at: list[list[NodeProfile]] = [[] for _ in range(end)]
        for server in servers:
            if server.span is not None:
                for block in range(max(start, server.span.start), min(end, server.span.end)):
                    at[block].append(server)
        missing = missing_ranges(1 if block < start or at[block] else 0 for block in range(end))
        if missing:
            raise NoRoute("no server has room for these blocks", missing)
        client_ms = view.client_ms(session.request.client)
        # reached[block][server]: the least cost of having left that server there, its hop, and the server before it
        reached: list[dict[PeerId, tuple[float, Hop | None, PeerId]]] = [{} for _ in range(end + 1)]
        reached[start][""] = (0.0, None, "")
        for block in range(start, end):
            for last, (cost, _, _) in list(reached[block].items()):
                for server in at[block]:
                    delay = client_ms[server.peer] if not last else self.network.latency(last, server.peer)
                    stop = min(server.span.end, end) if server.span else end
                    hop = Hop(server.peer, block, stop)
                    total = cost + delay + self._server_ms(session, server, view, stop - block)
                    if server.peer != last and total < reached[stop].get(server.peer, (math.inf, None, ""))[0]:
                        reached[stop][server.peer] = (total, hop, last)
        return _trace_back(reached, end, client_ms)

    def _server_ms(self, session: SimSession, server: NodeProfile, view: StaleSnapshot, blocks: int) -> float:
        """Overhead, blocks at the speed measured at start, and the penalty for cache that is full."""
        full = server.kv_free_tokens < session.most_tokens
        step = view.nodes[server.peer].cost.device.step_overhead_ms / len(server.span or (0,))
        return self.spec.overhead_ms + blocks * (server.cost.ms_at(1) + step) + (ALLOC_DELAY_MS if full else 0.0)


def _throughputs(spans: Mapping[PeerId, LayerSpan], speed: Mapping[PeerId, float], num_layers: int) -> list[float]:
    result = [0.0] * num_layers
    for peer in sorted(spans):
        for block in spans[peer]:
            result[block] += speed[peer]
    return result


def _best_span(throughputs: Sequence[float], blocks: int) -> LayerSpan:
    """The run of `blocks` blocks whose sorted throughputs are the least."""
    starts = range(len(throughputs) - blocks + 1)
    start = min(starts, key=lambda i: (sorted(throughputs[i : i + blocks]), i))
    return LayerSpan(start, start + blocks)


def _trace_back(
    reached: Sequence[Mapping[PeerId, tuple[float, Hop | None, PeerId]]], end: int, client_ms: Mapping[PeerId, float]
) -> Chain:
    """The cheapest chain to `end` and back to the client."""
    total, peer = min((cost + client_ms[p], p) for p, (cost, _, _) in reached[end].items())
    hops: list[Hop] = []
    block = end
    while (hop := reached[block][peer][1]) is not None:
        hops.append(hop)
        block, peer = hop.start, reached[block][peer][2]
    return Chain(tuple(reversed(hops)), total)
