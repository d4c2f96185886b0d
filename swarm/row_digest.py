"""Digests of the rows that cross an edge, and of token ids: two peers that hold the same bytes get the same digests.

Owns the hash and what stands for "not known". Sixteen bytes a row: whoever sends a row has bound itself to it, since
finding two useful rows with one digest takes 2^64 tries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

DIGEST_BYTES = 16
UNKNOWN = bytes(DIGEST_BYTES)
"""The digest of a row that its holder did not see, such as one from a prefix cache."""


def digest(row: bytes | memoryview) -> bytes:
    return hashlib.blake2b(row, digest_size=DIGEST_BYTES).digest()


def row_digests(body: bytes | bytearray | memoryview, rows: int) -> list[bytes]:
    """One digest for each of the equally long rows of a step's body."""
    view = memoryview(body)
    size = len(view) // rows
    return [digest(view[at : at + size]) for at in range(0, rows * size, size)]


def token_digests(tokens: Iterable[int]) -> list[bytes]:
    """A token id counts as a row of four bytes, little-endian."""
    return [digest(token.to_bytes(4, "little")) for token in tokens]
