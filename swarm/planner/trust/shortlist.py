"""Which nodes of a snapshot a client builds on, and whom it tries next: those that answer, before all that only claim.

A record proves that somebody holds a key, not that a node exists, and anybody makes any number of them. So a chain is
searched among nodes that have answered this client at the address they gave. The others are pinged a few at a time,
each source of names in turn, so that who names many gains nothing over who names few:

    chosen      peers this client was started with, holds links to, or was served by
    vouched     peers that a node which has answered says, in its own record, that it has measured itself
    told        peers that others passed on: one of each teller in turn, the longest known first
    found       the rest, from the directory: one of each block of claimed addresses in turn

Within a source, blocks of claimed addresses take turns as well, and one in which several were silent and nobody
answered comes last. Nobody who was silent is tried again soon. Pure: what happened and the time are handed in.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from swarm.address_blocks import UNKNOWN_BLOCK, claimed_block
from swarm.types import NodeProfile, PeerId, coverage

FOUND = ""
"""The teller of nodes that came by the directory."""


@dataclass(frozen=True, slots=True)
class ShortlistPolicy:
    """More nodes find better chains in large swarms; fewer cost less when most are invented."""

    max_unproven: int = 64  # nodes in the search that have answered and not yet served: blocks take turns for these
    max_misses: int = 2  # pings in a row, after which a node that answered once does so no more
    retry_s: float = 30.0  # before a silent node is tried again; doubled by each further silence ...
    max_retry_s: float = 3600.0  # ... up to this
    silent_block: int = 3  # silent nodes of a block of which nobody answered, before all others come first


POLICY = ShortlistPolicy()


@dataclass(frozen=True, slots=True)
class Contact:
    """What became of this client's pings to one peer. `at`: when it was last asked, by the client's clock."""

    answered: bool = False  # ever
    misses: int = 0  # in a row, the last ones
    at: float = float("-inf")
    block: str = UNKNOWN_BLOCK  # of the addresses that it claimed

    def answers(self, policy: ShortlistPolicy = POLICY) -> bool:
        return self.answered and self.misses < policy.max_misses

    def may_be_tried(self, now: float, policy: ShortlistPolicy = POLICY) -> bool:
        """Whether it has never answered, and was not asked just now."""
        wait_s = policy.retry_s * 2.0 ** min(self.misses - 1, 16) if self.misses else 0.0
        return not self.answered and now >= self.at + min(wait_s, policy.max_retry_s)


NEVER = Contact()


@dataclass(frozen=True, slots=True)
class Sources:
    """By whom nodes came to be known. `told`: peer -> (who told of it first or FOUND, as its how-manieth)."""

    chosen: Collection[PeerId] = frozenset()
    told: Mapping[PeerId, tuple[str, int]] = field(default_factory=dict)


def answering(
    nodes: Iterable[NodeProfile],
    contacts: Mapping[PeerId, Contact],
    proven: Collection[PeerId],
    policy: ShortlistPolicy = POLICY,
) -> list[NodeProfile]:
    """The nodes to search for a chain: those that answer, of the unproven a bounded number."""
    answered = [node for node in nodes if contacts.get(node.peer, NEVER).answers(policy)]
    unproven = [node for node in answered if node.peer not in proven]
    if len(unproven) <= policy.max_unproven:
        return answered
    kept = {node.peer for node in itertools.islice(_blocks_in_turn(unproven), policy.max_unproven)}
    return [node for node in answered if node.peer in proven or node.peer in kept]


def doubtful(
    nodes: Iterable[NodeProfile],
    contacts: Mapping[PeerId, Contact],
    proven: Collection[PeerId],
    *,
    strangers: bool,
    policy: ShortlistPolicy = POLICY,
) -> list[NodeProfile]:
    """Whom to build on when those that answer do not suffice: those that have served or answered once; with
    `strangers` also a bounded number that never did, but may only be slow to answer: the least silent first."""
    others = [node for node in nodes if not contacts.get(node.peer, NEVER).answers(policy)]
    met = [node for node in others if node.peer in proven or contacts.get(node.peer, NEVER).answered]
    if not strangers:
        return met
    unmet = {node.peer: node for node in others}
    for node in met:
        del unmet[node.peer]
    turns = sorted(_blocks_in_turn(unmet.values()), key=lambda node: contacts.get(node.peer, NEVER).misses)
    return met + turns[: policy.max_unproven]


def covers(nodes: Iterable[NodeProfile], num_layers: int, min_free_tokens: int = 0) -> bool:
    """Whether some of `nodes` with the same weights and dtype hold all layers, with room for a session."""
    groups: dict[tuple[str, str], list[NodeProfile]] = {}
    for node in nodes:
        if node.serving and (not node.kv_capacity_tokens or node.kv_free_tokens >= min_free_tokens):
            groups.setdefault((node.weight_hash, node.dtype), []).append(node)
    return any(all(coverage((n.span for n in of if n.span), num_layers)) for of in groups.values())


def to_try(
    nodes: Sequence[NodeProfile],
    contacts: Mapping[PeerId, Contact],
    sources: Sources,
    now: float,
    count: int,
    policy: ShortlistPolicy = POLICY,
) -> list[NodeProfile]:
    """The next `count` to ping of those that have not answered. Nodes with layers that nobody who has answered holds
    come first. `nodes`: all that serve. The source of a node is the best that names it."""
    waiting = {n.peer: n for n in nodes if contacts.get(n.peer, NEVER).may_be_tried(now, policy)}
    if not waiting:
        return []
    held = {layer for n in nodes if n.span and contacts.get(n.peer, NEVER).answers(policy) for layer in n.span}
    adding = {peer: node for peer, node in waiting.items() if not held.issuperset(node.span or ())}
    tired = _silent_blocks(contacts.values(), policy)
    chosen: dict[PeerId, NodeProfile] = {}
    for some in (adding, waiting):
        by_source = _by_source(nodes, some, contacts, sources)
        for node in _in_turn([list(_blocks_in_turn(of, tired)) for of in by_source]):
            if len(chosen) == count:
                break
            chosen[node.peer] = node
    return list(chosen.values())


def _by_source(
    nodes: Sequence[NodeProfile],
    waiting: Mapping[PeerId, NodeProfile],
    contacts: Mapping[PeerId, Contact],
    sources: Sources,
) -> list[list[NodeProfile]]:
    """Of each source, whom it names, in its own order."""
    chosen = [waiting[peer] for peer in sorted(sources.chosen) if peer in waiting]
    vouchers = _blocks_in_turn(n for n in nodes if n.link_ms and contacts.get(n.peer, NEVER).answered)
    vouched = _in_turn(
        [[waiting[peer] for peer in sorted(n.link_ms, key=n.link_ms.__getitem__) if peer in waiting] for n in vouchers]
    )
    tellers: dict[str, list[tuple[int, PeerId]]] = {}
    for peer in waiting:
        teller, serial = sources.told.get(peer, (FOUND, 0))
        tellers.setdefault(teller, []).append((serial, peer))
    asked = Counter(sources.told[peer][0] for peer in contacts if peer in sources.told)
    lists = {teller: [waiting[peer] for _, peer in sorted(of)] for teller, of in tellers.items()}
    found = lists.pop(FOUND, [])
    told = _in_turn([lists[teller] for teller in sorted(lists, key=lambda teller: (asked[teller], teller))])
    return [chosen, list({node.peer: node for node in vouched}.values()), list(told), found]


def _silent_blocks(contacts: Iterable[Contact], policy: ShortlistPolicy) -> frozenset[str]:
    """In which several were asked, and nobody ever answered."""
    silent: Counter[str] = Counter()
    spoken: set[str] = set()
    for one in contacts:
        if one.answered:
            spoken.add(one.block)
        elif one.misses and one.block != UNKNOWN_BLOCK:
            silent[one.block] += 1
    return frozenset(b for b, count in silent.items() if count >= policy.silent_block and b not in spoken)


def _blocks_in_turn(nodes: Iterable[NodeProfile], last: Collection[str] = frozenset()) -> Iterator[NodeProfile]:
    """One of each block of claimed addresses, then the second of each, and so on; the blocks of `last` at the end."""
    blocks: dict[str, list[NodeProfile]] = {}
    for node in nodes:
        blocks.setdefault(claimed_block(node.addresses), []).append(node)
    first = [of for block, of in blocks.items() if block not in last]
    return itertools.chain(_in_turn(first), _in_turn([of for block, of in blocks.items() if block in last]))


def _in_turn(lists: Sequence[Sequence[NodeProfile]]) -> Iterator[NodeProfile]:
    for row in itertools.zip_longest(*lists):
        yield from (node for node in row if node is not None)
