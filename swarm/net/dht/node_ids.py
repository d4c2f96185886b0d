"""A peer's place in the DHT follows from its peer id, and is not the peer's to choose.

Owns that rule and the form of a peer id in hivemind's messages. Everybody who routes or stores computes the id of a
peer that the connection has authenticated; what the peer says of itself is only compared. Finding a peer id whose place
is near a given key still takes an attacker no more than as many keys as the swarm has nodes: the rule ends free choice,
the longest-known peers that a lookup asks besides (`routing_table`) do the rest.
"""

from __future__ import annotations

import functools

from swarm.net.libp2p._hivemind import DHTID, PeerID

_ED25519_PREFIX = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])  # the identity multihash of a public key's protobuf
_LENGTH = len(_ED25519_PREFIX) + 32


@functools.lru_cache(maxsize=4096)
def dht_id(peer: PeerID) -> DHTID:
    return DHTID.generate(source=peer.to_base58())


def claimed_id(node_id: bytes, peer: PeerID) -> DHTID | None:
    """The place of `peer` if that is what it claims; None for another claim or none, as that of a client."""
    derived = dht_id(peer)
    return derived if node_id == derived.to_bytes() else None


def peer_of(raw: bytes) -> PeerID | None:
    """The peer whose id these bytes are; None if they are not the id of an Ed25519 key."""
    return PeerID(raw) if len(raw) == _LENGTH and raw.startswith(_ED25519_PREFIX) else None
