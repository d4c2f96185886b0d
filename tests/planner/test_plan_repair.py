"""Repairs against brute force, on snapshots."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from swarm.errors import NoRoute
from swarm.planner.routing.repair import repair
from swarm.planner.routing.route import RouteTable
from swarm.types import Chain, Hop, LayerSpan, NodeProfile, NodeState, Snapshot


def serving(peer: str, start: int, end: int, ms: float = 1.0, **more: object) -> NodeProfile:
    span = LayerSpan(start, end)
    return NodeProfile(
        peer,
        peer,
        NodeState.SERVING,
        "bf16",
        "w",
        end - start,
        span,
        layer_ms=(ms,) * len(span),
        **more,  # type: ignore[arg-type]
    )


def random_snapshot(rng: random.Random, most_layers: int = 6, most_nodes: int = 6) -> Snapshot:
    num_layers = rng.randint(2, most_layers)
    peers = [f"p{i}" for i in range(rng.randint(2, most_nodes))]
    nodes = []
    for peer in peers:
        start = rng.randrange(num_layers)
        end = rng.randint(start + 1, num_layers)
        if rng.random() < 0.3:
            start, end = 0, num_layers
        far = {other: float(rng.randint(0, 9)) for other in peers}
        nodes.append(serving(peer, start, end, float(rng.randint(0, 5)), link_ms=far))
    return Snapshot("m", num_layers, tuple(nodes))


def cost_ms(snapshot: Snapshot, hops: tuple[Hop, ...]) -> float:
    by_peer = {n.peer: n for n in snapshot.nodes}
    compute = sum(by_peer[h.peer].layer_ms[0] * (h.end - h.start) for h in hops)
    return compute + sum(by_peer[a.peer].link_ms[b.peer] for a, b in itertools.pairwise(hops))


def every_simple_chain(snapshot: Snapshot, fresh: list[str], kept: list[Hop]) -> Iterator[tuple[Hop, ...]]:
    spans = {p: n.span for p in fresh if (n := snapshot.node(p)) and n.span}

    def extend(hops: tuple[Hop, ...]) -> Iterator[tuple[Hop, ...]]:
        start = hops[-1].end if hops else 0
        if start == snapshot.num_layers:
            yield hops
            return
        used = {h.peer for h in hops}
        options = {h for h in kept if h.start == start}
        options |= {Hop(p, start, e) for p, s in spans.items() if start in s for e in range(start + 1, s.end + 1)}
        for hop in options:
            if hop.peer not in used:
                yield from extend((*hops, hop))

    return extend(())


def check_chain(chain: Chain, num_layers: int) -> None:
    assert [h.start for h in chain.hops] == [0, *(h.end for h in chain.hops[:-1])]
    assert chain.hops[-1].end == num_layers
    assert len(set(chain.peers)) == len(chain)


def test_a_repair_rebuilds_the_fewest_layers_then_takes_the_quickest_chain() -> None:
    rng = random.Random(0)
    repaired = 0
    for case in range(700):
        snapshot = random_snapshot(rng, 6, 5)
        table = RouteTable(snapshot)
        try:
            chain = table.route()
        except NoRoute:
            continue
        lost = {rng.choice(chain.peers)}
        kept = [h for h in chain.hops if h.peer not in lost]
        fresh = [n.peer for n in snapshot.nodes if n.peer not in lost]

        def rebuilt(hops: tuple[Hop, ...], kept: list[Hop] = kept) -> int:
            return sum(h.end - h.start for h in hops if h not in kept)

        chains = every_simple_chain(snapshot, fresh, kept)
        expected = min(((rebuilt(hops), cost_ms(snapshot, hops)) for hops in chains), default=None)
        try:
            found = repair(table, chain, lost)
        except NoRoute:
            assert expected is None, case
            continue
        check_chain(found.chain, snapshot.num_layers)
        assert found.chain.cost_ms == pytest.approx(cost_ms(snapshot, found.chain.hops))
        assert (found.layers, found.chain.cost_ms) == expected, (case, chain, lost, snapshot)
        assert found.layers == rebuilt(found.chain.hops)
        assert set(found.kept) == set(kept) & set(found.chain.hops)
        repaired += 1
    assert repaired > 200


def test_hops_of_draining_nodes_and_of_nodes_without_a_record_are_kept() -> None:
    old = Chain((Hop("a", 0, 4), Hop("b", 4, 8), Hop("c", 8, 12)))
    nodes = (
        serving("a", 0, 4),
        serving("b2", 4, 8),
        serving("z", 0, 12, 0.01),  # quicker, but everything would have to be rebuilt
    )
    drained = NodeProfile("c", "c", NodeState.DRAINING, "bf16", "w", 4, LayerSpan(8, 12), layer_ms=(1.0,) * 4)
    for members in (nodes, (*nodes, drained)):  # the record of c is missing, or lists it as draining
        snapshot = Snapshot("m", 12, tuple(sorted(members, key=lambda n: n.peer)))
        found = repair(RouteTable(snapshot), old, {"b"})
        assert found.kept == (Hop("a", 0, 4), Hop("c", 8, 12))
        assert found.layers == 4
        assert [hop.start for hop in found.rebuild] == [4]


def test_a_survivor_whose_hop_grows_rebuilds_all_of_it() -> None:
    old = Chain((Hop("a", 0, 4), Hop("b", 4, 8)))
    table = RouteTable(Snapshot("m", 8, (serving("a", 0, 8), serving("c", 0, 8))))
    assert repair(table, old, {"b"}).chain.peers == ("a", "c")
    assert repair(table, old, {"b"}, banned={"c"}).rebuild == (Hop("a", 0, 8),)


def test_a_repair_never_changes_weights_or_dtype() -> None:
    other = NodeProfile("x", "x", NodeState.SERVING, "fp32", "w", 8, LayerSpan(0, 8), layer_ms=(0.1,) * 8)
    table = RouteTable(Snapshot("m", 8, (serving("a", 0, 4), serving("b", 4, 8), other)))
    with pytest.raises(NoRoute) as refusal:
        repair(table, Chain((Hop("a", 0, 4), Hop("b", 4, 8))), {"b"})
    assert refusal.value.missing == ((4, 8),)
