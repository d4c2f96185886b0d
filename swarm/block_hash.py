"""Block hashes for prefix caching: hops look up cached prefixes by hash, without receiving the tokens.

Owns the hash and the block size. A block's hash covers all tokens before it too, so equal hashes mean equal prefixes
(vLLM's `hash_block_tokens`). What a hop computes depends on the hops before it as well, so a client salts the hashes
that it sends to a hop by those. Does not know who caches what.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

HASH_BLOCK_TOKENS = 32  # a multiple of the KV cache's block size
HASH_BYTES = 8  # short: only one client's sessions are compared, so a collision cannot be forged by another


def block_hashes(tokens: Sequence[int]) -> list[bytes]:
    """One hash for each whole block of `tokens`: the i-th covers the first `(i + 1) * HASH_BLOCK_TOKENS` of them."""
    hashes: list[bytes] = []
    parent = b""
    for start in range(0, len(tokens) - HASH_BLOCK_TOKENS + 1, HASH_BLOCK_TOKENS):
        block = array("I", tokens[start : start + HASH_BLOCK_TOKENS]).tobytes()
        parent = hashlib.blake2b(parent + block, digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes


def salted(hashes: Sequence[bytes], salt: bytes) -> list[bytes]:
    """The hashes of the same blocks under `salt`, of up to 64 bytes; as they are if it is empty."""
    if not salt:
        return list(hashes)
    return [hashlib.blake2b(one, digest_size=HASH_BYTES, key=salt).digest() for one in hashes]
