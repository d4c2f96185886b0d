"""How much more of a node a client gets under load because its own nodes have worked for this node's owner.

Priority, never currency: nothing is spent, owed or passed on, whoever is alone gets everything, and nobody gets less
than `1 / max_weight` of an equal part. Only work counts that the owner's clients have measured themselves. What a node
has given is shared by all clients that its record marks as its owner's, and it counts in proportion up to `full`, so
that no number of nodes or clients makes more of the same work:

    sum of (weight - 1) over any clients  <=  (max_weight - 1) * layer-rows of all their nodes / full

Pure: times and evidence are handed in.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swarm.planner.trust.belief import is_proven
from swarm.planner.trust.evidence import PeerEvidence
from swarm.records import owner_tag
from swarm.types import PeerId, Snapshot


@dataclass(frozen=True, slots=True)
class ContributionPolicy:
    """More thanks to helpers against less for those who have nothing to give."""

    max_weight: float = 4.0  # of a client, against 1
    full: float = 1e6  # rows times layers for which it has the most: some 16,000 tokens through 64 layers
    half_life_s: float = 30 * 86400.0  # since it worked for us last
    max_contributors: int = 256  # nodes that count, those that gave most first; each is looked for in a client's name


POLICY = ContributionPolicy()


@dataclass(frozen=True, slots=True)
class Contributor:
    """`credit`: for each of the clients that `owners` mark, from 0 to 1."""

    node: PeerId
    owners: frozenset[bytes]
    credit: float


def credits(
    memories: Iterable[Mapping[PeerId, PeerEvidence]], now: float, policy: ContributionPolicy = POLICY
) -> dict[PeerId, float]:
    """node -> what its work for us is worth, up to 1. `memories`: what our clients have seen; `now`: as theirs, in
    seconds since the epoch. Whoever failed us last, or an audit ever, has none."""
    worth: defaultdict[PeerId, float] = defaultdict(float)
    out: set[PeerId] = set()
    for memory in memories:
        for peer, evidence in memory.items():
            if evidence.audits_failed:
                out.add(peer)
            elif is_proven(evidence):
                faded = 0.5 ** (max(0.0, now - evidence.last_at) / policy.half_life_s)
                worth[peer] += evidence.layer_rows * faded / policy.full
    largest = sorted((-min(1.0, value), peer) for peer, value in worth.items() if value > 0.0 and peer not in out)
    return {peer: -value for value, peer in largest[: policy.max_contributors]}


def contributors(snapshot: Snapshot, worth: Mapping[PeerId, float]) -> tuple[Contributor, ...]:
    """Those nodes of `worth` that name clients of their owner, by records that were checked."""
    return tuple(
        Contributor(node.peer, frozenset(node.owners), worth[node.peer] / len(node.owners))
        for node in snapshot.nodes
        if node.owners and node.peer in worth
    )


def client_weight(client: PeerId, nodes: Iterable[Contributor], policy: ContributionPolicy = POLICY) -> float:
    """From 1 to `max_weight`."""
    credit = math.fsum(node.credit for node in nodes if owner_tag(node.node, client) in node.owners)
    return 1.0 + (policy.max_weight - 1.0) * min(1.0, credit)
