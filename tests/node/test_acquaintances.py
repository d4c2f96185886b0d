"""What a node knows of the others: who answers, since when."""

from __future__ import annotations

from collections.abc import Sequence

from swarm.errors import PeerUnreachable
from swarm.planner.trust.doubts import DoubtPolicy
from swarm.types import LayerSpan, NodeProfile, NodeState, Snapshot
from swarm_node.membership.acquaintances import Acquaintances
from swarm_node.membership.policy import RttPolicy
from swarm_node.membership.rtt_monitor import RttMonitor

MINE = LayerSpan(2, 4)
POLICY = DoubtPolicy()


def node(peer: str, start: int, end: int) -> NodeProfile:
    return NodeProfile(peer, "", NodeState.SERVING, "bf16", "h", 4, LayerSpan(start, end))


class Pinger:
    def __init__(self, *answering: str) -> None:
        self.answering = set(answering)
        self.asked: list[str] = []

    async def rtt(self, peer: str, addresses: Sequence[str] = (), timeout_s: float = 5.0) -> float:
        self.asked.append(peer)
        if peer not in self.answering:
            raise PeerUnreachable(peer)
        return 4.0


async def rounds(count: int, snapshot: Snapshot, pinger: Pinger) -> Acquaintances:
    known = Acquaintances("me")
    monitor = RttMonitor(pinger, "me", acquaintances=known)
    for second in range(count):
        known.saw((n.peer for n in snapshot.nodes), float(second))
        await monitor.measure(snapshot, MINE)
    return known


async def test_an_invented_node_is_doubted_after_a_few_pings_and_an_honest_one_never() -> None:
    seen = Snapshot("toy", 8, (node("beside", 2, 4), node("invented", 0, 4), node("me", 2, 4), node("next", 4, 8)))
    pinger = Pinger("beside", "next")
    known = await rounds(POLICY.silent_pings - 1, seen, pinger)
    assert not known.doubts(POLICY.grace_s).silent
    known = await rounds(POLICY.silent_pings, seen, pinger)
    late = known.doubts(POLICY.grace_s + POLICY.silent_pings)
    assert late.silent == {"invented"}
    assert not late.new
    assert known.doubts(1.0).new == {"beside", "next"}
    assert known.strangers() == ["invented"]


async def test_who_reaches_nobody_doubts_nobody() -> None:
    seen = Snapshot("toy", 8, (node("a", 2, 4), node("b", 4, 8)))
    known = await rounds(3 * POLICY.silent_pings, seen, Pinger())
    assert not known.doubts(1000.0).silent


async def test_a_thousand_records_cost_a_few_pings_a_round_and_no_memory() -> None:
    seen = Snapshot("toy", 8, tuple(node(f"x{i:04d}", 2, 4) for i in range(1000)))
    pinger = Pinger()
    known = await rounds(3, seen, pinger)
    assert len(pinger.asked) == 3 * RttPolicy().strangers_per_round
    assert len(set(pinger.asked)) == len(pinger.asked)
    known.saw((), 5.0)
    assert known.strangers() == []


def test_the_condemned_stay_so_when_they_come_back() -> None:
    known = Acquaintances("me")
    known.saw(["cheat"], 0.0)
    known.answered("cheat")
    known.condemn("cheat")
    assert known.doubts(100.0).silent == {"cheat"}
    known.saw([], 1.0)
    known.saw(["cheat"], 2.0)
    known.answered("cheat")
    assert known.doubts(100.0).silent == {"cheat"}
