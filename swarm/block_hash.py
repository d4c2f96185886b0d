"""Names for the beginnings of texts, so that hops can find what they hold already without being told the tokens.

Owns the digests and the blocks they name. A digest covers everything before it, so equal digests mean equal beginnings.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

HASH_BLOCK_TOKENS = 32  # tokens; a whole number of the cache's pages
HASH_BYTES = 8  # only a client's own sessions are compared, so nobody else can forge one


def block_hashes(tokens: Sequence[int]) -> list[bytes]:
    """One digest for each whole block of `tokens`: the i-th names the first `(i + 1) * BLOCK` of them."""
    found: list[bytes] = []
    before = b""
    for start in range(0, len(tokens) - HASH_BLOCK_TOKENS + 1, HASH_BLOCK_TOKENS):
        block = array("I", tokens[start : start + HASH_BLOCK_TOKENS]).tobytes()
        before = hashlib.blake2b(before + block, digest_size=HASH_BYTES).digest()
        found.append(before)
    return found
