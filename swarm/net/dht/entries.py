"""The entries of our DHT: what is signed, how they travel, and decoding as many of a reply as the bounds allow.

An entry is a value of a peer under a key, signed by that peer with the key and the time when it expires, so that nobody
can change it, move it or prolong it. A reply is entries one after another: what follows a malformed one is lost, what
came before is not. Owns these formats. Knows neither hivemind nor the contents of the records (`swarm.records`).
"""

from __future__ import annotations

from typing import NamedTuple

import msgpack
import msgspec

from swarm.net.security.identity import Identity, signed_by
from swarm.records import MAX_CLOCK_SKEW_S, MAX_LIFETIME_S, MAX_RECORD
from swarm.types import PeerId

SIGNATURE = 64
MAX_VALUE = MAX_RECORD + 128  # a sealed record and its signature
MAX_PEER = 64  # characters
MAX_REPLY = 1 << 20  # bytes of entries; a libp2p call takes 2 MiB
MAX_REPLY_ENTRIES = 1024
_CONTEXT = b"swarm dht entry 2\0"
_pack = msgspec.msgpack.Encoder().encode


class Entry(NamedTuple):
    """`value`: what was published, and the peer's signature."""

    peer: PeerId
    value: bytes
    expires_at: float

    @property
    def payload(self) -> bytes:
        return self.value[:-SIGNATURE]


def sign(identity: Identity, key: bytes, payload: bytes, expires_at: float) -> Entry:
    signed = _signed(key, identity.peer, payload, expires_at)
    return Entry(identity.peer, payload + identity.sign(signed), expires_at)


def is_plausible(entry: Entry, now: float) -> bool:
    """All that can be checked in under a microsecond: bounds, and a lifetime that is allowed. False for NaN."""
    return (
        now < entry.expires_at <= now + MAX_LIFETIME_S + MAX_CLOCK_SKEW_S
        and SIGNATURE <= len(entry.value) <= MAX_VALUE
        and len(entry.peer) <= MAX_PEER
    )


def is_signed(key: bytes, entry: Entry) -> bool:
    """Some 100 µs."""
    payload, signature = entry.payload, entry.value[-SIGNATURE:]
    return signed_by(entry.peer, _signed(key, entry.peer, payload, entry.expires_at), signature)


def pack(entry: Entry) -> bytes:
    return _pack(entry)


def unpack(data: bytes, most: int = MAX_REPLY_ENTRIES) -> list[Entry]:
    """The first `most` entries of a reply, or those before the first malformed one."""
    unpacker = msgpack.Unpacker(
        use_list=False,
        raw=False,
        max_buffer_size=max(len(data), 1),
        max_str_len=MAX_PEER,
        max_bin_len=MAX_VALUE,
        max_array_len=3,
        max_map_len=0,
        max_ext_len=0,
    )
    entries: list[Entry] = []
    try:
        unpacker.feed(data)
        while len(entries) < most:
            peer, value, expires_at = unpacker.unpack()
            if type(peer) is not str or type(value) is not bytes or type(expires_at) is not float:
                break
            entries.append(Entry(peer, value, expires_at))
    except (ValueError, TypeError, msgpack.UnpackException):
        pass  # it ends here, or is malformed from here on
    return entries


def _signed(key: bytes, peer: PeerId, payload: bytes, expires_at: float) -> bytes:
    """The bytes that an entry's signature is for."""
    return b"".join((_CONTEXT, _pack((key, peer, expires_at)), payload))
