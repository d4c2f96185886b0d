"""Whom a client pings: never all that records name, and no longer than a chain needs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from virtual_clock import virtual_time

from swarm.errors import PeerUnreachable
from swarm.planner.trust.shortlist import Sources, answering, covers
from swarm.types import LayerSpan, NodeProfile, NodeState
from swarm_client.routing.contacts import ContactPolicy, PeerContacts

POLICY = ContactPolicy()
LAYERS = 30


class Streets:
    """A pool where the honest answer after `delay_s`, and nobody else ever does."""

    def __init__(self, honest: Sequence[NodeProfile], delay_s: float = 0.01) -> None:
        self.alive = {node.peer for node in honest}
        self.delay_s = delay_s
        self.asked: list[str] = []
        self.open = self.most_open = 0

    async def rtt(self, peer: str, addresses: Sequence[str] = (), timeout_s: float = 5.0) -> float:
        self.asked.append(peer)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            await asyncio.sleep(self.delay_s if peer in self.alive else timeout_s)
        finally:
            self.open -= 1
        if peer not in self.alive:
            raise PeerUnreachable(peer)
        return self.delay_s * 1e3


def profile(peer: str, start: int, end: int, ip: str, **changes: object) -> NodeProfile:
    addresses = (f"/ip4/{ip}/tcp/1/tls/p2p/{peer}",)
    found = NodeProfile(peer, "", NodeState.SERVING, "bf16", "w", end - start, LayerSpan(start, end), addresses)
    return replace(found, **changes)


def honest() -> list[NodeProfile]:
    spans = ((0, 10), (10, 20), (20, 30))
    return [
        profile(f"h{number}", start, end, f"60.{number}.0.2", link_ms={f"h{(number + 1) % 3}": 5.0})
        for number, (start, end) in enumerate(spans)
    ]


def invented(count: int) -> list[NodeProfile]:
    """Each in a block of its own, with all layers."""
    rng = random.Random(count)
    return [profile(f"x{n:04d}", 0, LAYERS, f"{rng.randrange(11, 120)}.{n % 256}.0.1") for n in range(count)]


def contacts_of(pool: Streets, sources: Sources) -> PeerContacts:
    return PeerContacts(pool, lambda: sources)  # type: ignore[arg-type]


def enough(nodes: Sequence[NodeProfile], contacts: PeerContacts) -> Callable[[], bool]:
    return lambda: covers(answering(nodes, contacts.all, set()), LAYERS)


@virtual_time
async def test_a_fresh_client_finds_the_chain_among_a_thousand_that_never_answer() -> None:
    real, fake = honest(), invented(1000)
    pool = Streets(real)
    contacts = contacts_of(pool, Sources({"h0"}))
    nodes = [*fake, *real]
    loop = asyncio.get_running_loop()
    begun = loop.time()
    await contacts.reach(nodes, enough(nodes, contacts))
    assert enough(nodes, contacts)()
    assert loop.time() - begun < 1.0
    assert set(contacts.client_ms) == {node.peer for node in real}
    assert pool.most_open <= POLICY.max_open
    assert len(set(pool.asked)) <= 2 * POLICY.max_open
    await contacts.close()


@virtual_time
async def test_with_a_chain_strangers_are_met_beside_the_work_and_few_at_a_time() -> None:
    real, fake = honest(), invented(1000)
    pool = Streets(real)
    contacts = contacts_of(pool, Sources({"h0"}))
    await contacts.reach(real, enough(real, contacts))
    pool.asked.clear()
    nodes = [*fake, *real]
    loop = asyncio.get_running_loop()
    begun = loop.time()
    for _ in range(200):  # answers, ten a second
        before = loop.time()
        await contacts.reach(nodes, enough(nodes, contacts))
        assert loop.time() - before <= POLICY.ping_timeout_s
        await asyncio.sleep(0.1)
    lasted = loop.time() - begun
    strangers = [peer for peer in pool.asked if peer[0] == "x"]
    assert 0 < len(strangers) <= POLICY.max_beside * (lasted / POLICY.beside_interval_s + 1)
    assert len(strangers) == len(set(strangers))  # nobody silent is asked again at once
    await contacts.close()


@virtual_time
async def test_a_search_among_the_dead_ends_and_names_nobody() -> None:
    fake = invented(500)
    pool = Streets([])
    contacts = contacts_of(pool, Sources())
    loop = asyncio.get_running_loop()
    begun = loop.time()
    await contacts.reach(fake, enough(fake, contacts))
    assert loop.time() - begun <= POLICY.search_s + POLICY.ping_timeout_s
    assert not contacts.client_ms
    assert len(pool.asked) <= POLICY.max_open * (POLICY.search_s / POLICY.ping_timeout_s + 1)
    await contacts.close()


@virtual_time
async def test_who_answered_once_and_falls_silent_is_no_more_built_on() -> None:
    real = honest()
    pool = Streets(real)
    contacts = contacts_of(pool, Sources())
    await contacts.reach(real, enough(real, contacts))
    pool.alive.discard("h1")
    await asyncio.sleep(POLICY.link_age_s)
    for _ in range(2):
        await contacts.reach(real, lambda: False)
        await asyncio.sleep(2 * POLICY.beside_interval_s)
    assert {node.peer for node in answering(real, contacts.all, set())} == {"h0", "h2"}
    pool.alive.add("h1")
    await asyncio.sleep(60.0)
    await contacts.reach(real, enough(real, contacts))
    assert covers(answering(real, contacts.all, set()), LAYERS)
    await contacts.close()


@virtual_time
async def test_contacts_are_bounded_and_those_that_answer_stay() -> None:
    real = honest()
    pool = Streets(real)
    sources = Sources()
    contacts = PeerContacts(pool, lambda: sources, ContactPolicy(max_contacts=64))  # type: ignore[arg-type]
    await contacts.reach(real, enough(real, contacts))
    await contacts.ask(invented(200))
    assert len(contacts.all) <= 64
    assert set(contacts.client_ms) == {"h0", "h1", "h2"}
    await contacts.close()


@virtual_time
async def test_two_that_look_for_a_chain_at_once_wait_for_the_same_pings() -> None:
    real = honest()
    pool = Streets(real, delay_s=0.2)
    contacts = contacts_of(pool, Sources({"h0"}))
    suffice = enough(real, contacts)
    first = asyncio.create_task(contacts.reach(real, suffice))
    await asyncio.sleep(0.01)
    await contacts.reach(real, suffice)
    assert suffice(), "the second one has nobody left to ping, and yet may not give up"
    await first
    assert sorted(pool.asked) == sorted(node.peer for node in real for _ in range(2)), "a ping and one that dials"
