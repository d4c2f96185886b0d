"""Wire messages of record gossip: peers tell each other the node records that they hold, beside the DHT.

Owns their fields and bounds. The records are the same signed bytes as in the DHT (`records`); who asks whom, and what
is answered, is decided in `net.gossip` and `record_book`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta

from swarm.wire_types import MAX_RECORD, Message, Serial

MAX_RECORDS = 64  # in one answer
MAX_LISTED = 256  # in one query
MAX_SLICES = 64
RECORD_KEY_BYTES = 8  # the start of SHA-256 of a peer id: enough that nobody computes a second peer with the same
_LISTED = struct.Struct(f">{RECORD_KEY_BYTES}sQ")  # whose record, milliseconds since the epoch when it was published

RecordBytes = Annotated[bytes, Meta(min_length=1, max_length=MAX_RECORD)]


class RecordsQuery(Message, frozen=True, tag="records_query"):
    """Asks a node for records of `model`. Answered with Records, or not at all when asked too often.

    `listed`: records that the sender has (`pack_listed`); it wants newer ones of these peers, and those of all peers
    that it does not list and whose key is in slice number `slice` of `slices`. `own`: the sender's record, if it is a
    node: so that a node which nobody can dial is known as well.
    """

    nonce: Serial
    model: Annotated[str, Meta(min_length=1, max_length=128)]
    listed: Annotated[bytes, Meta(max_length=MAX_LISTED * _LISTED.size)] = b""
    slice: Annotated[int, Meta(ge=0, lt=MAX_SLICES)] = 0
    slices: Annotated[int, Meta(ge=1, le=MAX_SLICES)] = 1
    own: Annotated[bytes, Meta(max_length=MAX_RECORD)] = b""


class Records(Message, frozen=True, tag="records"):
    """The answer to the RecordsQuery of this nonce; `more`: there are others, which did not fit."""

    nonce: Serial
    records: Annotated[list[RecordBytes], Meta(max_length=MAX_RECORDS)] = []
    more: bool = False


def pack_listed(entries: Iterable[tuple[bytes, int]]) -> bytes:
    """(key of a peer, milliseconds since the epoch) of each record -> `RecordsQuery.listed`."""
    return b"".join(_LISTED.pack(key, at_ms) for key, at_ms in entries)


def unpack_listed(listed: bytes) -> dict[bytes, int]:
    """`pack_listed` undone; an incomplete last entry is ignored."""
    return dict(_LISTED.iter_unpack(listed[: len(listed) // _LISTED.size * _LISTED.size]))
