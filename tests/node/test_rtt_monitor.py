"""Which peers a node pings, and how RTTs are smoothed and forgotten."""

from __future__ import annotations

from collections.abc import Sequence

from swarm.errors import PeerUnreachable
from swarm.types import LayerSpan, NodeProfile, NodeState, Snapshot
from swarm_node.membership.policy import RttPolicy
from swarm_node.membership.rtt_monitor import RttMonitor, possible_next_hops

MINE = LayerSpan(2, 4)
POLICY = RttPolicy()


def node(peer: str, start: int, end: int, state: NodeState = NodeState.SERVING) -> NodeProfile:
    return NodeProfile(peer, "", state, "bf16", "h", 4, LayerSpan(start, end), addresses=(f"/memory/{peer}",))


class Pings:
    def __init__(self) -> None:
        self.rtt_ms = {"near": 10.0, "far": 80.0}
        self.asked: list[str] = []

    async def rtt(self, peer: str, addresses: Sequence[str] = (), timeout_s: float = 5.0) -> float:
        self.asked.append(peer)
        if peer not in self.rtt_ms:
            raise PeerUnreachable(peer)
        return self.rtt_ms[peer]


def test_possible_next_hops_are_serving_and_continue_the_layers() -> None:
    nodes = (
        node("me", 2, 4),
        node("next", 4, 6),
        node("overlaps", 3, 5),
        node("inside", 2, 4),
        node("before", 0, 2),
        node("later", 5, 8),
        node("loading", 4, 6, NodeState.LOADING),
    )
    assert [n.peer for n in possible_next_hops(Snapshot("toy", 8, nodes), "me", MINE)] == ["next", "overlaps"]


async def test_rho_is_half_a_round_trip_smoothed_and_forgotten_with_its_peer() -> None:
    pings = Pings()
    links = RttMonitor(pings, "me")
    both = Snapshot("toy", 8, (node("far", 4, 8), node("near", 4, 8)))
    await links.measure(both, MINE)
    assert links.link_ms == {"near": 5.0, "far": 40.0}
    pings.rtt_ms["near"] = 20.0
    await links.measure(both, MINE)
    assert 5.0 < links.link_ms["near"] < 10.0
    del pings.rtt_ms["near"]
    for _ in range(POLICY.max_misses):
        assert "near" in links.link_ms
        await links.measure(both, MINE)
    assert set(links.link_ms) == {"far"}
    await links.measure(Snapshot("toy", 8, ()), MINE)
    assert links.link_ms == {}


async def test_many_peers_are_pinged_in_turn() -> None:
    pings = Pings()
    names = [f"p{i:02d}" for i in range(3 * POLICY.pings_per_round)]
    pings.rtt_ms = dict.fromkeys(names, 4.0)
    links = RttMonitor(pings, "me")
    snapshot = Snapshot("toy", 8, tuple(node(name, 4, 8) for name in names))
    await links.measure(snapshot, MINE)
    assert len(pings.asked) == POLICY.pings_per_round
    for _ in range(4):  # half of the pings are for those that have answered
        await links.measure(snapshot, MINE)
    assert set(links.link_ms) == set(names)


async def test_invented_next_hops_take_no_turn_of_those_that_answer() -> None:
    pings = Pings()
    links = RttMonitor(pings, "me")
    honest = (node("far", 4, 8), node("near", 4, 8))
    await links.measure(Snapshot("toy", 8, honest), MINE)
    invented = tuple(node(f"i{number:03d}", 4, 8) for number in range(500))
    pings.asked.clear()
    for _ in range(5):
        await links.measure(Snapshot("toy", 8, (*honest, *invented)), MINE)
    assert pings.asked.count("far") == pings.asked.count("near") == 5
    assert len(pings.asked) <= 5 * (POLICY.pings_per_round + POLICY.strangers_per_round)
    assert set(links.link_ms) == {"far", "near"}
