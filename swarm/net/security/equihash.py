"""Equihash: a proof of work that takes memory to find and microseconds to check.

Biryukov and Khovratovich, "Equihash: Asymmetric Proof-of-Work Based on the Generalized Birthday Problem", NDSS 2016;
k = 5: of 2^(bits + 1) hashes of six words of `bits` bits, find 32 whose XOR is zero, such that at every level of the
binary tree over them one more word is zero, which is what Wagner's algorithm finds and nothing else finds sooner. (The
words are cut from whole bytes, so a hash is 6 x 3 bytes; else as in the paper.) Owns the search and the check. Knows
no peers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

WORDS = 6
LEAVES = 32
_WORD_BYTES = 3
_HASH_BYTES = WORDS * _WORD_BYTES
_PER_DIGEST = 3  # hashes cut from one digest of 54 bytes

_Indices = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Equihash:
    """`bits` of a word, 4 to 23: twice the memory and the time for each. 18 is Equihash(108, 5)."""

    bits: int

    def solutions(self, seed: bytes) -> Iterator[tuple[int, ...]]:
        """The solutions for `seed`, two of them on average. With 18 bits some 60 MB."""
        rows = self._hashes(seed)
        levels: list[tuple[_Indices, _Indices]] = []
        for word in range(WORDS - 1):
            key = rows[:, 0] if word < WORDS - 2 else rows[:, 0].astype(np.int64) << self.bits | rows[:, 1]
            left, right = _equal_pairs(key)
            levels.append((left, right))
            if word < WORDS - 2:
                rows = rows[left, 1:] ^ rows[right, 1:]
                distinct = rows.any(axis=1)  # the same hashes twice: a solution of nothing
                rows, levels[-1] = rows[distinct], (left[distinct], right[distinct])
        for pair in range(len(levels[-1][0])):
            indices = _leaves(levels, len(levels) - 1, pair)
            if len(set(indices)) == LEAVES:
                yield indices

    def is_solution(self, seed: bytes, indices: Sequence[int]) -> bool:
        """Some 50 µs."""
        if len(indices) != LEAVES or len(set(indices)) != LEAVES:
            return False
        if not all(0 <= index < 1 << (self.bits + 1) for index in indices):
            return False
        mask = int.from_bytes(((1 << self.bits) - 1).to_bytes(_WORD_BYTES, "little") * WORDS, "little")
        nodes = [(_hash(seed, index) & mask, index) for index in indices]
        for level in range(1, WORDS):
            zero = (1 << 8 * _WORD_BYTES * level) - 1 if level < WORDS - 1 else -1
            pairs = zip(nodes[::2], nodes[1::2], strict=True)
            nodes = []
            for (left, first), (right, second) in pairs:
                both = left ^ right
                if both & zero or first > second:
                    return False
                nodes.append((both, first))
        return True

    def _hashes(self, seed: bytes) -> NDArray[np.int32]:
        """[2^(bits + 1), WORDS]"""
        count = 1 << (self.bits + 1)
        digests = b"".join(_digest(seed, number) for number in range(-(-count // _PER_DIGEST)))
        raw = np.frombuffer(digests, np.uint8)[: count * _HASH_BYTES].reshape(count, WORDS, _WORD_BYTES)
        words = raw[:, :, 0].astype(np.int32)
        for byte in range(1, _WORD_BYTES):
            words |= raw[:, :, byte].astype(np.int32) << 8 * byte
        words &= (1 << self.bits) - 1
        return words


def _equal_pairs(key: NDArray[Any]) -> tuple[_Indices, _Indices]:
    """All pairs (i, j), i != j, with `key[i] == key[j]`, each once."""
    order = np.argsort(key, kind="stable").astype(np.int32)
    ordered = key[order]
    lefts, rights = [], []
    for distance in range(1, len(key)):
        (at,) = np.nonzero(ordered[distance:] == ordered[:-distance])
        if not len(at):
            break
        lefts.append(order[at])
        rights.append(order[at + distance])
    empty = [order[:0]]
    return np.concatenate(lefts or empty), np.concatenate(rights or empty)


def _leaves(levels: list[tuple[_Indices, _Indices]], level: int, row: int) -> tuple[int, ...]:
    """The hashes below a node of the tree, the subtree with the smaller first index on the left."""
    if level < 0:
        return (row,)
    left, right = (_leaves(levels, level - 1, int(side[row])) for side in levels[level])
    return left + right if left[0] < right[0] else right + left


def _hash(seed: bytes, index: int) -> int:
    number, part = divmod(index, _PER_DIGEST)
    start = part * _HASH_BYTES
    return int.from_bytes(_digest(seed, number)[start : start + _HASH_BYTES], "little")


def _digest(seed: bytes, number: int) -> bytes:
    return hashlib.blake2b(seed + number.to_bytes(4, "little"), digest_size=_PER_DIGEST * _HASH_BYTES).digest()
