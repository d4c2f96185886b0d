"""Proofs of work: what is found is accepted, what was not worked for is not, and a node keeps its own."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest

from swarm.net.security import proof_of_work
from swarm.net.security.equihash import Equihash
from swarm.net.security.identity import Identity
from swarm.net.security.proof_of_work import PROOF_BYTES, OwnProof, ProofPolicy, epoch_of, find_proof, proof_bits

SMALL = ProofPolicy(word_bits=8, difficulty_bits=2, start_after_s=0.0)
PEER, OTHER = (Identity.from_seed(bytes([i]) * 32).peer for i in (1, 2))
NOW = 1_800_000_000.0


@pytest.mark.parametrize("bits", [8, 10, 12])
def test_all_that_is_found_are_solutions_about_two_a_seed(bits: int) -> None:
    equihash = Equihash(bits)
    found = [(seed, indices) for seed in (bytes([i]) for i in range(24)) for indices in equihash.solutions(seed)]
    assert 12 <= len(found) <= 100
    assert len(set(found)) == len(found)
    for seed, indices in found:
        assert equihash.is_solution(seed, indices)
        assert not equihash.is_solution(seed + b"x", indices)


def test_what_only_looks_like_a_solution_is_none() -> None:
    equihash = Equihash(8)
    seed, indices = next((bytes([i]), found) for i in range(99) for found in equihash.solutions(bytes([i])))
    swapped = (*indices[16:], *indices[:16])
    twice = (*indices[:16], *indices[:16])
    for wrong in ((), indices[:31], (*indices, 1), swapped, twice, (1 << 20, *indices[1:]), (-1, *indices[1:])):
        assert not equihash.is_solution(seed, wrong)
    rng = random.Random(5)
    for _ in range(200):
        shuffled = tuple(rng.sample(indices, 32))
        assert shuffled == indices or not equihash.is_solution(seed, shuffled)
        assert not equihash.is_solution(seed, tuple(rng.sample(range(512), 32)))


def test_a_proof_is_of_one_peer_and_two_months() -> None:
    epoch = epoch_of(NOW, SMALL)
    proof = find_proof(PEER, epoch, SMALL)
    assert proof_bits(PEER, proof, NOW, SMALL) >= 3
    assert proof_bits(PEER, proof, NOW + SMALL.epoch_s, SMALL) >= 3
    assert proof_bits(PEER, proof, NOW + 2 * SMALL.epoch_s, SMALL) == 0
    assert proof_bits(PEER, proof, NOW - SMALL.epoch_s, SMALL) == 0
    assert proof_bits(OTHER, proof, NOW, SMALL) == 0
    assert proof_bits(PEER, proof, NOW) == 0
    assert proof_bits(PEER, proof, NOW, ProofPolicy(word_bits=8, difficulty_bits=40)) == 0


def test_no_bytes_but_a_proof_are_worth_anything() -> None:
    epoch = epoch_of(NOW, SMALL)
    proof = find_proof(PEER, epoch, SMALL)
    rng = random.Random(1)
    for i in range(len(proof)):
        assert proof_bits(PEER, proof[:i], NOW, SMALL) == 0
        changed = bytearray(proof)
        changed[i] ^= 1 << rng.randrange(8)
        assert proof_bits(PEER, bytes(changed), NOW, SMALL) == 0
    for _ in range(300):
        assert proof_bits(PEER, proof[:4] + rng.randbytes(len(proof) - 4), NOW, SMALL) == 0


def test_a_real_proof() -> None:
    """One run of the real size, by hand; a whole proof takes several."""
    equihash = Equihash(proof_of_work.POLICY.word_bits)
    seed, indices = next((bytes([i]), found) for i in range(9) for found in equihash.solutions(bytes([i])))
    assert equihash.is_solution(seed, indices)
    packed = proof_of_work._pack(indices, proof_of_work.POLICY)
    assert 8 + len(packed) == PROOF_BYTES
    assert proof_of_work._unpack(packed, proof_of_work.POLICY) == indices


def own_files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


async def test_a_node_makes_its_proof_once_and_keeps_it(tmp_path: Path) -> None:
    own = OwnProof(PEER, tmp_path / "identity", SMALL)
    making = asyncio.create_task(own.run())
    async with asyncio.timeout(60):
        await own.found.wait()
    making.cancel()
    assert proof_bits(PEER, own.current, time.time(), SMALL)
    again = OwnProof(PEER, tmp_path / "identity", SMALL)
    again.load()
    assert again.current == own.current
    assert own_files(tmp_path) == ["identity.proof"]
    for damaged in (b"", own.current[:-1], own.current + b"x", bytes(1000)):
        write(tmp_path / "identity.proof", damaged)
        fresh = OwnProof(PEER, tmp_path / "identity", SMALL)
        fresh.load()
        assert not fresh.current
