"""Replies of DHT nodes: entries one after another, of which those before the first malformed one are read."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from swarm.net.dht import entries
from swarm.net.dht.entries import MAX_PEER, MAX_REPLY_ENTRIES, MAX_VALUE, Entry
from swarm.net.security.identity import Identity

INSTRUMENT = ("swarm.net.dht", "swarm.net.security.identity")
NOW, KEY = 1000.0, b"k" * 20
_identity = Identity.generate()


def run(data: bytes) -> None:
    read = entries.unpack(data)
    assert len(read) <= MAX_REPLY_ENTRIES
    for entry in read:
        assert len(entry.peer) <= MAX_PEER
        assert len(entry.value) <= MAX_VALUE
        if entries.is_plausible(entry, NOW):
            assert not entries.is_signed(KEY, entry), "an entry without its peer's signature is taken"
    again = entries.unpack(b"".join(map(entries.pack, read)))
    assert msgspec.msgpack.encode(again) == msgspec.msgpack.encode(read)  # NaN is not equal to itself


def seeds() -> Iterator[bytes]:
    signed = entries.sign(_identity, b"another key", b"x" * 80, NOW + 10)
    yield entries.pack(signed)
    yield entries.pack(signed) + entries.pack(Entry("b", bytes(64), NOW + 20.5)) + b"\xc1"
    yield entries.pack(Entry(_identity.peer, bytes(64), NOW + 5))
    yield msgspec.msgpack.encode(("a", b"", float("nan")))
