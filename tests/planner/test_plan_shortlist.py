"""Whatever an attacker invents: who answers is searched first, and honest nodes are among the first that are tried."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from toy_swarm import node

from swarm.planner.trust.shortlist import POLICY, Contact, Sources, answering, covers, doubtful, to_try
from swarm.types import NodeProfile

LAYERS = 30
K = 48  # pings, of which each honest node must be one
SPANS = ((0, 10), (0, 10), (10, 20), (20, 30), (20, 30))


def at(found: NodeProfile, ip: str) -> NodeProfile:
    return replace(found, addresses=(f"/ip4/{ip}/tcp/1/tls/p2p/{found.peer}",))


def honest() -> list[NodeProfile]:
    return [at(node(f"h{number}", 10, span), f"{60 + number}.1.0.2") for number, span in enumerate(SPANS)]


def invented(count: int, rng: random.Random, block: str | None = "45.66") -> list[NodeProfile]:
    """Perfect nodes of one /16, or each of a block of its own."""
    found = []
    for number in range(count):
        ip = f"{rng.randrange(11, 120)}.{rng.randrange(256)}" if block is None else block
        peer = f"{rng.choice('abcxyz')}{number:05d}"
        found.append(at(node(peer, LAYERS, (0, LAYERS)), f"{ip}.{rng.randrange(256)}.{rng.randrange(1, 255)}"))
    return found


def tried(nodes: list[NodeProfile], sources: Sources, alive: set[str], rounds: int = K // 4) -> list[str]:
    """The peers in the order of the pings, four at a time, of which `alive` answer."""
    contacts: dict[str, Contact] = {}
    order: list[str] = []
    for now in range(rounds):
        for one in to_try(nodes, contacts, sources, float(now), 4):
            order.append(one.peer)
            ip = one.addresses[0].split("/")[2] if one.addresses else ""
            block = ".".join(ip.split(".")[:2]) + ".0.0/16"
            contacts[one.peer] = Contact(one.peer in alive, int(one.peer not in alive), float(now), block)
    return order


@pytest.mark.parametrize("count", [0, 50, 1000, 5000])
@pytest.mark.parametrize("seed", range(3))
def test_any_number_of_identities_of_one_block_delay_nobody(count: int, seed: int) -> None:
    """All come by the directory, in any order."""
    rng = random.Random(seed)
    real, fake = honest(), invented(count, rng)
    nodes = sorted([*real, *fake], key=lambda one: one.peer)
    told = {one.peer: ("", rng.randrange(10_000)) for one in nodes}
    alive = {one.peer for one in real}
    assert alive <= set(tried(nodes, Sources(told=told), alive)[: 4 * len(real)])


@pytest.mark.parametrize("seed", range(5))
def test_who_is_vouched_for_by_nodes_that_answer_is_found_among_a_thousand_blocks(seed: int) -> None:
    """One bootstrap peer; each node has measured the next hop. The invented claim blocks as they like, and name the
    honest ones as if these were theirs."""
    rng = random.Random(seed)
    real, fake = honest(), invented(1000, rng, None)
    links = {"h0": ("h2",), "h1": ("h2",), "h2": ("h3", "h4"), "h3": ("h0", "h1"), "h4": ("h0", "h1")}
    real = [replace(one, link_ms=dict.fromkeys(links[one.peer], 5.0)) for one in real]
    fake = [replace(one, link_ms={fake[number - 1].peer: 0.01}) for number, one in enumerate(fake)]
    nodes = sorted([*real, *fake], key=lambda one: one.peer)
    told = {one.peer: ("", rng.randrange(10_000)) for one in nodes}
    alive = {one.peer for one in real}
    assert alive <= set(tried(nodes, Sources({"h0"}, told), alive))


@pytest.mark.parametrize("liars", [1, 5])
def test_who_tells_of_many_gains_nothing_over_who_tells_of_few(liars: int) -> None:
    rng = random.Random(liars)
    real, fake = honest(), invented(1000, rng, None)
    told = {one.peer: ("friend", number) for number, one in enumerate(real)}
    told |= {one.peer: (f"liar{number % liars}", number // liars) for number, one in enumerate(fake)}
    alive = {one.peer for one in real}
    order = tried([*fake, *real], Sources(told=told), alive)
    assert alive <= set(order[: (liars + 1) * len(real) + 4])


def test_nodes_with_layers_that_are_lacking_come_first() -> None:
    real = honest()
    contacts = {peer: Contact(answered=True, at=0.0) for peer in ("h0", "h3")}
    first = to_try(real, contacts, Sources(), 1.0, 1)
    assert [one.peer for one in first] == ["h2"]


def test_silent_nodes_are_not_asked_again_soon_and_a_silent_block_comes_last() -> None:
    rng = random.Random(1)
    fake = invented(20, rng)
    silent = Contact(misses=1, at=0.0, block="45.66.0.0/16")
    contacts = {one.peer: silent for one in fake[:5]}
    late = [*fake[:5], at(node("z", 10, (0, 30)), "60.1.1.1")]
    assert [one.peer for one in to_try(late, contacts, Sources(), 1.0, 9)] == ["z"]
    assert len(to_try(late, contacts, Sources(), POLICY.retry_s, 9)) == 6
    twice = {peer: replace(one, misses=2) for peer, one in contacts.items()}
    assert len(to_try(late, twice, Sources(), POLICY.retry_s, 9)) == 1
    told = {one.peer: ("", number) for number, one in enumerate([*fake, late[-1]])}
    assert to_try([*fake, late[-1]], contacts, Sources(told=told), 1.0, 1)[0].peer == "z"


def test_chains_are_searched_among_those_that_answer_and_blocks_share_what_is_unproven() -> None:
    rng = random.Random(2)
    real, fake = honest(), invented(500, rng)
    contacts = {one.peer: Contact(answered=True) for one in fake}
    found = {one.peer for one in answering([*fake, *real], contacts, set())}
    assert len(found) == POLICY.max_unproven
    contacts |= {one.peer: Contact(answered=True) for one in real}
    found = {one.peer for one in answering([*fake, *real], contacts, {"h0"})}
    assert {one.peer for one in real} <= found
    assert len(found) == POLICY.max_unproven + 1
    contacts["h2"] = Contact(answered=True, misses=POLICY.max_misses)
    kept = answering(real, contacts, set())
    assert not covers(kept, LAYERS)
    wider = doubtful(real, contacts, set(), strangers=False)
    assert [one.peer for one in wider] == ["h2"]
    assert covers([*kept, *wider], LAYERS)
    assert len(doubtful([*fake, *real], {}, {"h3"}, strangers=True)) == POLICY.max_unproven + 1


def test_covering_needs_one_build_and_room() -> None:
    full = [replace(node("a", 10, (0, 10), kv=1000), kv_free_tokens=5), node("b", 10, (10, 20), kv=0)]
    assert covers(full, 20, 5)
    assert not covers(full, 20, 6)
    assert not covers([full[0], replace(full[1], weight_hash="other")], 20)
    assert not covers([], 20)
