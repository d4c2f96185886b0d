"""Ways to one peer that race each other, in virtual time; and how the two transports race for a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest
from virtual_clock import run, virtual_time

from swarm.errors import PeerUnreachable, WrongSwarm
from swarm.net.base.happy_eyeballs import staggered_race
from swarm.net.base.transport import Connection
from swarm.net.transports import multi
from swarm.net.transports.multi import MultiTransport

Plan = tuple[float, str | PeerUnreachable]  # how long a way takes, and where it leads


class Race:
    """What became of ways that go by plan."""

    def __init__(self, *plans: Plan) -> None:
        self._ways = [self._way(number, *plan) for number, plan in enumerate(plans)]
        self.begun: dict[int, float] = {}
        self.cancelled: list[int] = []
        self.discarded: list[str] = []

    def _way(self, number: int, seconds: float, end: str | PeerUnreachable) -> Callable[[], Awaitable[str]]:
        async def go() -> str:
            self.begun[number] = now()
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                self.cancelled.append(number)
                raise
            if isinstance(end, PeerUnreachable):
                raise end
            return end

        return go

    async def run(self, stagger_s: float = 0.3) -> str:
        return await staggered_race(self._ways, stagger_s, self.discarded.append)


def now() -> float:
    return asyncio.get_running_loop().time()


@virtual_time
async def test_a_quick_first_way_is_the_only_one() -> None:
    race = Race((0.2, "direct"), (0.0, "stream"))
    assert await race.run() == "direct"
    assert (now(), race.begun) == (0.2, {0: 0.0})


@virtual_time
async def test_a_slow_first_way_goes_on_beside_the_second_and_may_still_win() -> None:
    race = Race((0.5, "direct"), (10.0, "stream"))
    assert await race.run() == "direct"
    assert (now(), race.begun, race.cancelled) == (0.5, {0: 0.0, 1: 0.3}, [1])


@virtual_time
async def test_the_loser_is_cancelled() -> None:
    race = Race((100.0, "direct"), (0.1, "stream"))
    assert await race.run() == "stream"
    assert (now(), race.cancelled, race.discarded) == (pytest.approx(0.4), [0], [])


@virtual_time
async def test_a_way_that_fails_makes_room_for_the_next_at_once() -> None:
    race = Race((0.1, PeerUnreachable("refused")), (0.1, "stream"))
    assert await race.run() == "stream"
    assert now() == pytest.approx(0.2)


@virtual_time
async def test_two_that_arrive_at_the_same_moment_leave_one() -> None:
    race = Race((0.0, "one"), (0.0, "two"), (0.0, "three"))
    assert await race.run(stagger_s=0.0) == "one"
    assert race.discarded == [name for number, name in ((1, "two"), (2, "three")) if number in race.begun]


@virtual_time
async def test_all_fail() -> None:
    race = Race((0.5, PeerUnreachable("no direct way")), (0.1, PeerUnreachable("no stream")))
    with pytest.raises(PeerUnreachable, match="no stream"):
        await race.run()
    assert now() == 0.5
    race = Race((0.5, WrongSwarm("a wrong secret")), (0.1, PeerUnreachable("no stream")))
    with pytest.raises(WrongSwarm):
        await race.run()


@virtual_time
async def test_whoever_asks_may_give_up_and_nothing_is_left() -> None:
    race = Race((100.0, "direct"), (100.0, "stream"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2.0):
            await race.run()
    assert (now(), sorted(race.cancelled)) == (2.0, [0, 1])
    assert len(asyncio.all_tasks()) == 1


class Stub:
    """A transport whose every dial goes by plan. `daemon`: it is the p2p daemon's, and its own host."""

    def __init__(self, seconds: float, end: str | PeerUnreachable) -> None:
        self.peer = "us"
        self.daemon = self
        self.streams: list[Stub.Stream] = []
        self.dialled: tuple[str, ...] = ()
        self._plan = seconds, end

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name
            self.peer = "them"
            self.gone = False

        def abort(self) -> None:
            self.gone = True

        async def closed(self) -> None:
            await asyncio.Event().wait()

    def owns(self, stream: object) -> bool:
        return stream in self.streams

    async def dial(self, peer: str, addresses: Sequence[str]) -> Stream:
        seconds, end = self._plan
        self.dialled = tuple(addresses)
        await asyncio.sleep(seconds)
        if isinstance(end, PeerUnreachable):
            raise end
        self.streams.append(self.Stream(end))
        return self.streams[-1]

    async def close(self) -> None:
        for stream in self.streams:
            stream.abort()


ADDRESSES = ("/ip4/192.0.2.1/tcp/4001/tls/p2p/them", "/ip4/192.0.2.1/tcp/4002/p2p/them")
NOWHERE = PeerUnreachable("nothing answers")


@pytest.mark.parametrize(
    ("direct", "daemon", "winner", "after_s"),
    [
        ((0.01, "direct"), (0.0, "stream"), "direct", 0.01),
        ((0.6, "direct"), (10.0, "stream"), "direct", 0.6),  # a loaded machine: both are slow, neither begins anew
        ((3600.0, "direct"), (0.2, "stream"), "stream", 0.5),  # a stale address that swallows packets
        ((0.02, NOWHERE), (0.2, "stream"), "stream", 0.22),  # a stale address that refuses
        ((0.6, "direct"), (0.05, NOWHERE), "direct", 0.6),
        ((3600.0, "direct"), (0.05, NOWHERE), "", multi.MultiTransportPolicy().direct_timeout_s),
        ((3600.0, "direct"), (3.0, NOWHERE), "", multi.MultiTransportPolicy().direct_timeout_s),
    ],
)
def test_the_transports_race(direct: Plan, daemon: Plan, winner: str, after_s: float) -> None:
    async def race() -> None:
        straight, universal = Stub(*direct), Stub(*daemon)
        transport = MultiTransport(universal, straight, "")  # type: ignore[arg-type]
        upgraded: list[Connection] = []

        async def found(_: Connection, better: Connection) -> None:
            upgraded.append(better)

        transport.on_upgrade(found)
        try:
            stream = await transport.dial("them", ADDRESSES)
        except PeerUnreachable:
            assert not winner
            assert now() == pytest.approx(after_s)
        else:
            assert now() == pytest.approx(after_s)
            assert stream.name == winner  # type: ignore[attr-defined]
            await asyncio.sleep(4.0)
            assert [s.gone for s in (*straight.streams, *universal.streams)].count(False) == 1 + len(upgraded)
        await transport.close()
        assert straight.dialled == ADDRESSES[:1]
        assert universal.dialled in ((), ADDRESSES[1:])

    run(race())
