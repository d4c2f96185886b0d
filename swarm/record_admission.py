"""Which records stay when there are more than a store or a reader keeps, as one pure function.

Anybody makes any number of identities at once, so no single order of them is safe: by arrival, whoever comes first in
bulk keeps the rest out; by expiry or at random, whoever has most wins. As in Bitcoin's choice of which connections to
close (Heilman et al., "Eclipse Attacks on Bitcoin's Peer-to-Peer Network", USENIX Security 2015), the places are
divided among several orders, each dear to forge in another way: connections that we hold, how long we have known a
peer, a proof of work, and a draw among the proven. Within each, one block of addresses gets a share while others
wait. Filling one part leaves the other parts as they were.

Owns that choice. Knows no clock, network or records; who calls it says what it knows of each peer.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from swarm.address_blocks import UNKNOWN_BLOCK, spread
from swarm.types import PeerId


@dataclass(frozen=True, slots=True)
class RecordCandidate:
    """What is known of a peer whose record wants a place. No field is a peer's own claim."""

    peer: PeerId
    first_seen: float  # seconds, by the caller's clock
    proof_bits: int = 0  # of its verified proof of work; 0 without one
    address_block: str = UNKNOWN_BLOCK  # where it was seen to be (`swarm.address_blocks`)
    is_connected: bool = False  # on a link that we hold, not one that it merely opened


@dataclass(frozen=True, slots=True)
class RecordAdmissionPolicy:
    """How places are divided. The shares are of all places; what they leave is for the draw."""

    connected_share: float = 0.25  # what a reader loses last: peers it talks to
    known_share: float = 0.25  # the oldest: an attacker must have been there as long
    proven_share: float = 0.25  # proof of work, then age: an attacker must have paid, and waited
    block_share: float = 0.125  # of each part, for one address block while others wait; more for one large campus
    unknown_block_share: float = 0.5  # of the last two parts, for all whom nobody here has seen, as behind relays
    same_age_s: float = 60.0  # ages up to this are alike, then in doubling steps: a second's lead earns nothing
    enough_proof_bits: int = 1  # more earns nothing: a farm of GPUs does not outbid a phone


_Order = Callable[[RecordCandidate], tuple[object, ...]]
_Part = tuple[Collection[RecordCandidate], _Order, float, float]
"""Who may have a place, in which order; the share of all places, and that of unknown blocks among these."""


def admit(
    candidates: Collection[RecordCandidate],
    limit: int,
    now: float,
    salt: bytes = b"",
    policy: RecordAdmissionPolicy = RecordAdmissionPolicy(),
) -> list[RecordCandidate]:
    """At most `limit` of `candidates`, the most worth keeping first; all of them if they fit. O(n log n).

    The orders take turns, so that whoever reads only the first of them finds the same shares there.

    `salt`: the caller's secret for the draw. Peers with different salts keep different newcomers, so that all of them
    together know many more than one does; with the same salt, the choice is the same every time.
    """
    lots = {candidate.peer: _lot(salt, candidate.peer) for candidate in candidates}
    ages = {candidate.peer: _age_class(now - candidate.first_seen, policy) for candidate in candidates}
    proofs = {candidate.peer: min(candidate.proof_bits, policy.enough_proof_bits) for candidate in candidates}

    def oldest(candidate: RecordCandidate) -> tuple[object, ...]:
        return -ages[candidate.peer], -proofs[candidate.peer], lots[candidate.peer]

    def proven(candidate: RecordCandidate) -> tuple[object, ...]:
        return -proofs[candidate.peer], -ages[candidate.peer], lots[candidate.peer]

    def drawn(candidate: RecordCandidate) -> tuple[object, ...]:
        return -proofs[candidate.peer], lots[candidate.peer]

    connected = [candidate for candidate in candidates if candidate.is_connected]
    parts: tuple[_Part, ...] = (
        (connected, oldest, policy.connected_share, 1.0),
        (candidates, oldest, policy.known_share, 1.0),  # who is old need not be seen to be believed
        (candidates, proven, policy.proven_share, policy.unknown_block_share),
        (candidates, drawn, 1.0, policy.unknown_block_share),
    )
    admitted: set[PeerId] = set()
    ranked: list[tuple[float, int, RecordCandidate]] = []
    for number, (choice, order, share, unknown_share) in enumerate(parts):
        places = min(math.ceil(limit * share), limit - len(admitted))
        waiting = sorted((candidate for candidate in choice if candidate.peer not in admitted), key=order)
        chosen = _by_block(waiting, places, policy.block_share, unknown_share)
        admitted.update(candidate.peer for candidate in chosen)
        ranked += (((i + 0.5) / len(chosen), number, candidate) for i, candidate in enumerate(chosen))
    return [candidate for _, _, candidate in sorted(ranked, key=lambda item: item[:2])]


def _by_block(
    waiting: Iterable[RecordCandidate], places: int, block_share: float, unknown_share: float
) -> list[RecordCandidate]:
    def most(block: str) -> float:
        return places * (unknown_share if block == UNKNOWN_BLOCK else block_share)

    return spread(waiting, places, lambda candidate: candidate.address_block, most)


def _age_class(age_s: float, policy: RecordAdmissionPolicy) -> int:
    return int(math.log2(max(age_s / policy.same_age_s, 1.0)))


def _lot(salt: bytes, peer: PeerId) -> bytes:
    return hashlib.blake2b(peer.encode(), digest_size=8, key=salt[:64]).digest()
