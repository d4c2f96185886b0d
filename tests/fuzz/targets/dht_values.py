"""Entries of the DHT as a reply or a store brings them, and the list of records that a gossiping peer says it has."""

from __future__ import annotations

from collections.abc import Iterator

from swarm.gossip_messages import pack_listed, unpack_listed
from swarm.net.dht.entries import MAX_REPLY_ENTRIES, Entry, is_plausible, is_signed, pack, sign, unpack
from swarm.net.security.identity import Identity

INSTRUMENT = ("swarm.net.dht.entries", "swarm.gossip_messages", "swarm.net.security.identity")
_identity = Identity.generate()


def run(data: bytes) -> None:
    entries = unpack(data)
    assert len(entries) <= MAX_REPLY_ENTRIES
    assert unpack(b"".join(map(pack, entries))) == entries or any(e.expires_at != e.expires_at for e in entries)
    for entry in entries[:4]:
        assert isinstance(entry, Entry)
        if is_plausible(entry, 1000.0):
            assert not is_signed(b"another key", entry), "a signature that nobody made"
    listed = unpack_listed(data)
    assert unpack_listed(pack_listed(listed.items())) == listed


def seeds() -> Iterator[bytes]:
    entry = sign(_identity, b"key", b"x" * 100, 1010.0)
    yield pack(entry)
    yield pack(entry) * 2 + pack(Entry("b", b"y" * 64, 1020.5)) + b"\xc1"
    yield pack_listed([(b"a" * 8, 5), (b"b" * 8, 7)])
