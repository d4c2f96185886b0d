"""The failure detector: peers that answer no ping are unresponsive, and our own delays do not count."""

from __future__ import annotations

import asyncio
import time

from virtual_clock import virtual_time

from swarm.errors import ConnectionLost
from swarm_client.health.ping_failure_detector import PingFailureDetector, PingPolicy

POLICY = PingPolicy()


class Peers:
    """Peers that answer after so many seconds; None never, an error at once."""

    def __init__(self, **answers: float | Exception | None) -> None:
        self.answers = answers
        self.pings: list[str] = []

    async def rtt(self, peer: str) -> float:
        self.pings.append(peer)
        answer = self.answers[peer]
        if isinstance(answer, Exception):
            raise answer
        await asyncio.sleep(86_000.0 if answer is None else answer)
        return (answer or 0.0) * 1e3


def detector_of(peers: Peers) -> PingFailureDetector:
    return PingFailureDetector(peers.rtt, ping_timeout_s=1.0)


@virtual_time
async def test_a_peer_without_replies_is_unresponsive_after_the_timeout_which_then_doubles() -> None:
    detector = detector_of(Peers(a=0.01, b=None, c=ConnectionLost("gone")))
    clock = asyncio.get_running_loop().time
    assert await detector.unresponsive(["a", "b", "c"]) == ["b", "c"]
    assert clock() == 1.0
    assert await detector.unresponsive(["b"]) == ["b"]
    assert clock() == 3.0
    for _ in range(5):
        await detector.unresponsive(["b"])
    assert detector.next_timeout_s == POLICY.max_backoff


@virtual_time
async def test_the_timeout_follows_the_slowest_round_trip() -> None:
    peers = Peers(a=0.4, b=0.9)
    detector = detector_of(peers)
    assert await detector.unresponsive(["a"]) == []
    assert detector.next_timeout_s == POLICY.rtt_factor * 0.4
    assert await detector.unresponsive(["b"]) == []


async def test_our_own_delay_is_not_counted_against_a_peer() -> None:
    class Sleepy(Peers):
        async def rtt(self, peer: str) -> float:
            if len(self.pings) < 2:
                self.pings.append(peer)
                time.sleep(0.3)  # noqa: ASYNC251  # the whole process was stopped, say
                await asyncio.sleep(0.2)
            return 1.0

    peers = Sleepy()
    assert await PingFailureDetector(peers.rtt, ping_timeout_s=0.2).unresponsive(["a"]) == []
    assert len(peers.pings) == 2
