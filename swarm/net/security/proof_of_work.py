"""A cost to an identity: a proof of work bound to a peer id and a month, carried in the peer's record.

A record without a proof is as good as any while there is room; where there are too many, those with one go first
(`swarm.record_admission`). Owns what a proof is, its bytes, and where a node keeps its own.

What it costs: about 4 runs of Equihash(108, 5), each 1 s of one 2020s server core and 90 MB; an estimated 20 s on a
phone, at the lowest priority. So 1,000 identities cost an attacker about an hour of one core and 10,000 half a day,
again every month: enough that nobody makes them in passing, no barrier to somebody who rents machines. A GPU is faster
still: the working set of some 20 MB fits its cache or its memory's bandwidth; how much faster was not measured, and two
orders of magnitude must be expected, as of GPU miners of this family. Which is why a proof is one order of several, and
more of it earns nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import itertools
import logging
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from swarm.net.security.equihash import LEAVES, Equihash
from swarm.types import PeerId

logger = logging.getLogger(__name__)

PROOF_BYTES = 84
_CONTEXT = b"swarm identity proof 1\0"
_EPOCH_BYTES, _NONCE_BYTES = 4, 4


@dataclass(frozen=True, slots=True)
class ProofPolicy:
    """What a proof costs, and when a node makes its own."""

    word_bits: int = 18  # of Equihash: memory, which is what phones have and hashing machines have not
    difficulty_bits: int = 3  # zero bits of a solution's hash: the time in halves or doubles
    epoch_s: float = 30 * 86_400.0  # a proof counts in its epoch and the next: what a hoard of them is worth
    start_after_s: float = 30.0  # of a node's life: who only passes by makes none
    retry_s: float = 600.0


POLICY = ProofPolicy()


def epoch_of(now: float, policy: ProofPolicy = POLICY) -> int:
    return int(now // policy.epoch_s)


def find_proof(peer: PeerId, epoch: int, policy: ProofPolicy = POLICY) -> bytes:
    """Takes seconds and about 90 MB; see above."""
    equihash = Equihash(policy.word_bits)
    for nonce in itertools.count():
        head = epoch.to_bytes(_EPOCH_BYTES, "big") + nonce.to_bytes(_NONCE_BYTES, "big")
        for indices in equihash.solutions(_seed(peer, head)):
            proof = head + _pack(indices, policy)
            if _zero_bits(peer, proof) >= policy.difficulty_bits:
                return proof
    raise AssertionError("unreachable")


def proof_bits(peer: PeerId, proof: bytes, now: float, policy: ProofPolicy = POLICY) -> int:
    """What `proof` is worth for `peer` at `now`: 0 if nothing, else 1 and its bits of difficulty. At most 60 µs."""
    head, packed = proof[: _EPOCH_BYTES + _NONCE_BYTES], proof[_EPOCH_BYTES + _NONCE_BYTES :]
    if len(packed) != _packed_bytes(policy):
        return 0
    if epoch_of(now, policy) - int.from_bytes(head[:_EPOCH_BYTES], "big") not in (0, 1):
        return 0
    return _bits(peer, proof, policy)


@functools.lru_cache(maxsize=4096)
def _bits(peer: PeerId, proof: bytes, policy: ProofPolicy) -> int:
    """Cached: a proof comes with every record of its peer."""
    if (difficulty := _zero_bits(peer, proof)) < policy.difficulty_bits:
        return 0  # a microsecond, before what takes longer
    head, packed = proof[: _EPOCH_BYTES + _NONCE_BYTES], proof[_EPOCH_BYTES + _NONCE_BYTES :]
    indices = _unpack(packed, policy)
    return difficulty + 1 if Equihash(policy.word_bits).is_solution(_seed(peer, head), indices) else 0


class OwnProof:
    """This node's proof: kept beside its identity's file, made in a child process when there is none for this month.

    `current` is empty until there is one. A node without such a file makes one in every life that is long enough.
    """

    def __init__(self, peer: PeerId, identity_file: Path | None, policy: ProofPolicy = POLICY) -> None:
        self.current = b""
        self.found = asyncio.Event()
        self._peer = peer
        self._path = identity_file.with_name(f"{identity_file.name}.proof") if identity_file is not None else None
        self._policy = policy

    async def run(self) -> None:
        """Until cancelled."""
        self.load()
        await asyncio.sleep(self._policy.start_after_s)
        while True:
            epoch = epoch_of(time.time(), self._policy)
            if int.from_bytes(self.current[:_EPOCH_BYTES], "big") != epoch:
                await self._make(epoch)
            await asyncio.sleep(self._policy.retry_s)

    def load(self) -> None:
        if self._path is not None:
            with contextlib.suppress(OSError), self._path.open("rb") as file:
                proof = file.read(PROOF_BYTES + 1)
                if proof_bits(self._peer, proof, time.time(), self._policy):
                    self.current = proof

    async def _make(self, epoch: int) -> None:
        arguments = (self._peer, str(epoch), str(self._policy.word_bits), str(self._policy.difficulty_bits))
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__, *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
        )
        try:
            output, _ = await child.communicate()
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        proof = bytes.fromhex(output.decode(errors="replace").strip()) if child.returncode == 0 else b""
        if proof_bits(self._peer, proof, time.time(), self._policy):
            self.current = proof
            self._save()
            self.found.set()
        else:
            logger.warning("no proof of work for our identity was found; it goes last where records are too many")

    def _save(self) -> None:
        """Written whole or not at all; not secret, and the next start makes another if it is lost."""
        if self._path is None:
            return
        try:
            descriptor, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
            with os.fdopen(descriptor, "wb") as file:
                file.write(self.current)
            os.replace(temporary, self._path)
        except OSError as error:
            logger.warning("cannot keep the proof of work %s: %s", self._path, error.strerror)


def _seed(peer: PeerId, head: bytes) -> bytes:
    return hashlib.blake2b(_CONTEXT + head + peer.encode(), digest_size=32).digest()


def _zero_bits(peer: PeerId, proof: bytes) -> int:
    digest = hashlib.blake2b(proof, digest_size=8, key=peer.encode()[:64]).digest()
    return 64 - int.from_bytes(digest, "big").bit_length()


def _packed_bytes(policy: ProofPolicy) -> int:
    return -(-LEAVES * (policy.word_bits + 1) // 8)


def _pack(indices: tuple[int, ...], policy: ProofPolicy) -> bytes:
    number = 0
    for index in reversed(indices):
        number = number << (policy.word_bits + 1) | index
    return number.to_bytes(_packed_bytes(policy), "little")


def _unpack(packed: bytes, policy: ProofPolicy) -> tuple[int, ...]:
    number, width = int.from_bytes(packed, "little"), policy.word_bits + 1
    return tuple(number >> width * i & (1 << width) - 1 for i in range(LEAVES))


def _main(peer: str, epoch: str, word_bits: str, difficulty_bits: str) -> None:
    """In the child process."""
    os.nice(19)
    policy = ProofPolicy(int(word_bits), int(difficulty_bits))
    sys.stdout.write(find_proof(peer, int(epoch), policy).hex())


if __name__ == "__main__":
    _main(*sys.argv[1:])
