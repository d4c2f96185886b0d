"""Who counts as silent: those that answer no ping, and nobody for our own being late."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from virtual_clock import virtual_time

from swarm.errors import ConnectionLost
from swarm_client.health.ping_failure_detector import MAX_BACKOFF, RTT_FACTOR, PingFailureDetector


class Pool:
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


def pulse(pool: Pool) -> PingFailureDetector:
    fake: Any = pool
    return PingFailureDetector(fake, ping_timeout_s=1.0)


@virtual_time
async def test_who_answers_no_ping_is_silent_after_the_limit_and_next_time_after_twice_as_long() -> None:
    watch = pulse(Pool(a=0.01, b=None, c=ConnectionLost("gone")))
    clock = asyncio.get_running_loop().time
    assert await watch.unresponsive(["a", "b", "c"]) == ["b", "c"]
    assert clock() == 1.0
    assert await watch.unresponsive(["b"]) == ["b"]
    assert clock() == 3.0
    for _ in range(5):
        await watch.unresponsive(["b"])
    assert watch.next_timeout_s == MAX_BACKOFF


@virtual_time
async def test_where_answers_are_slow_silence_takes_longer() -> None:
    pool = Pool(a=0.4, b=0.9)
    watch = pulse(pool)
    assert await watch.unresponsive(["a"]) == []
    assert watch.next_timeout_s == RTT_FACTOR * 0.4
    assert await watch.unresponsive(["b"]) == []


async def test_being_late_ourselves_is_not_held_against_a_peer() -> None:
    class Sleepy(Pool):
        async def rtt(self, peer: str) -> float:
            if len(self.pings) < 2:
                self.pings.append(peer)
                time.sleep(0.3)  # noqa: ASYNC251  # the whole process was stopped, say
                await asyncio.sleep(0.2)
            return 1.0

    pool = Sleepy()
    fake: Any = pool
    assert await PingFailureDetector(fake, ping_timeout_s=0.2).unresponsive(["a"]) == []
    assert len(pool.pings) == 2
