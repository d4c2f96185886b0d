"""Which records stay when there are too many: what newcomers in bulk, proofs and address blocks can and cannot do."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter

import pytest

from swarm.address_blocks import UNKNOWN_BLOCK, block_of_ip, block_of_multiaddr
from swarm.record_admission import RecordAdmissionPolicy, RecordCandidate, admit

NOW = 1e6
DAY = 86_400.0


def peers(name: str, count: int, age_s: float, proof_bits: int = 0, blocks: int = 0) -> list[RecordCandidate]:
    """`count` peers first seen `age_s` ago, in so many address blocks (0: nobody has seen them)."""
    return [
        RecordCandidate(
            f"{name}{i}", NOW - age_s, proof_bits, f"{name} block {i % blocks}" if blocks else UNKNOWN_BLOCK
        )
        for i in range(count)
    ]


def names(admitted: list[RecordCandidate]) -> set[str]:
    return {candidate.peer for candidate in admitted}


def test_all_stay_while_they_fit() -> None:
    candidates = peers("a", 20, DAY) + peers("b", 44, 0.0, blocks=1)
    assert sorted(admit(candidates, 64, NOW), key=lambda c: c.peer) == sorted(candidates, key=lambda c: c.peer)
    assert admit(candidates, 0, NOW) == []
    assert admit([], 5, NOW) == []


@pytest.mark.parametrize("proof_bits", [0, 1, 40])
@pytest.mark.parametrize("blocks", [0, 1, 10_000])
def test_ten_thousand_newcomers_push_out_nobody_who_is_long_known(proof_bits: int, blocks: int) -> None:
    """Whether they paid for proofs, or come from as many networks as they are."""
    honest = peers("honest", 60, DAY)
    admitted = admit(honest + peers("sybil", 10_000, 1.0, proof_bits, blocks), 256, NOW)
    assert len(admitted) == 256
    assert names(honest) <= names(admitted)


def test_attackers_who_were_here_first_keep_out_no_proven_newcomer() -> None:
    honest = peers("honest", 60, 0.0, proof_bits=1)
    assert names(honest) <= names(admit(peers("sybil", 10_000, 30 * DAY) + honest, 256, NOW))


def test_more_proof_than_enough_earns_nothing() -> None:
    honest = peers("honest", 10, 10 * DAY, proof_bits=1)
    sybils = peers("sybil", 1000, 9 * DAY, proof_bits=60)
    kept = [len(names(admit([*honest, *sybils], 100, NOW, salt=bytes([i]))) & names(honest)) for i in range(50)]
    modest = peers("sybil", 1000, 9 * DAY, proof_bits=1)
    assert kept == [len(names(admit([*honest, *modest], 100, NOW, salt=bytes([i]))) & names(honest)) for i in range(50)]


def test_a_second_earlier_is_no_older_but_a_day_is() -> None:
    policy = RecordAdmissionPolicy()
    first = peers("first", 500, 50.0)
    later = peers("later", 500, 5.0)
    kept = Counter(candidate.peer[:5] for candidate in admit(first + later, 200, NOW, b"salt", policy))
    assert 70 < kept["later"] < 130
    kept = Counter(candidate.peer[:5] for candidate in admit(peers("older", 500, DAY) + later, 200, NOW))
    assert kept["older"] >= 200 * (policy.known_share + policy.proven_share)


def test_what_we_are_connected_to_stays() -> None:
    mine = [RecordCandidate(f"mine{i}", NOW, is_connected=True) for i in range(20)]
    crowd = peers("old", 1000, 100 * DAY, proof_bits=1, blocks=50)
    assert names(mine) <= names(admit(crowd + mine, 100, NOW))


def test_one_address_block_gets_a_share_while_others_wait() -> None:
    """Even older and better proven ones of one block; without others, they get all."""
    policy = RecordAdmissionPolicy()
    block = peers("block", 1000, 10 * DAY, proof_bits=1, blocks=1)
    others = peers("other", 300, 0.0, blocks=100)
    admitted = names(admit(block + others, 160, NOW))
    assert sum(peer.startswith("block") for peer in admitted) <= 160 * policy.block_share + 4
    assert len(admit(block, 160, NOW)) == 160
    few = peers("few", 30, 0.0, blocks=30)
    admitted = names(admit(block + few, 160, NOW))
    assert names(few) <= admitted
    assert len(admitted) == 160


def test_unseen_peers_share_too() -> None:
    unseen = peers("unseen", 1000, 10 * DAY, proof_bits=1)
    seen = peers("seen", 1000, 0.0, blocks=500)
    kept = Counter(candidate.peer[:4] for candidate in admit(unseen + seen, 200, NOW))
    assert kept["unse"] == 50 + 75  # of the oldest, all; of the rest, half


def test_the_draw_differs_between_nodes_and_not_in_time() -> None:
    crowd = peers("a", 2000, 0.0)
    first, second = (names(admit(crowd, 100, NOW, salt)) for salt in (b"one", b"two"))
    assert first == names(admit(random.Random(3).sample(crowd, len(crowd)), 100, NOW, b"one"))
    assert len(first & second) < 20
    everywhere = set(itertools.chain(*(names(admit(crowd, 100, NOW, bytes([i]))) for i in range(20))))
    assert len(everywhere) > 1000


def test_any_beginning_of_the_choice_is_shared_alike() -> None:
    """A reader of the first of them finds the long-known there, and the proven, and some of the rest."""
    old, proven, crowd = peers("old", 64, DAY), peers("proven", 64, 0.0, 1), peers("crowd", 5000, 0.0)
    kept = Counter(candidate.peer[:3] for candidate in admit([*crowd, *old, *proven], 256, NOW)[:32])
    assert min(kept.values()) >= 8
    assert set(kept) == {"old", "pro", "cro"}


def test_a_clock_that_went_back_is_no_error() -> None:
    assert len(admit(peers("a", 5, -DAY), 3, NOW)) == 3


def test_ten_thousand_take_little_longer_than_ten_times_a_thousand() -> None:
    def seconds(count: int) -> float:
        crowd = peers("a", count, 5.0, 1, 300) + peers("b", count, DAY, 0, 2)
        started = time.process_time()
        admit(crowd, 512, NOW)
        return time.process_time() - started

    small, large = (min(seconds(count) for _ in range(3)) for count in (500, 5000))
    assert large < 30 * small


@pytest.mark.parametrize(
    ("ip", "block"),
    [
        ("198.41.0.7", "198.41.0.0/24"),
        ("::ffff:198.41.0.7", "198.41.0.0/24"),
        ("2a01:4f8:1:2::3", "2a01:4f8:1::/48"),
        ("127.0.0.1", "127.0.0.1"),
        ("192.168.1.9", "192.168.1.9"),
        ("100.64.3.4", "100.64.3.4"),
        ("fe80::1%eth0", "fe80::1"),
        ("nonsense", UNKNOWN_BLOCK),
        ("", UNKNOWN_BLOCK),
    ],
)
def test_blocks_of_ips(ip: str, block: str) -> None:
    assert block_of_ip(ip) == block


def test_blocks_of_multiaddrs() -> None:
    assert block_of_multiaddr("/ip4/198.41.0.7/tcp/4001") == "198.41.0.0/24"
    assert block_of_multiaddr("/ip6/2a01:4f8:1:2::3/udp/4001/quic-v1") == "2a01:4f8:1::/48"
    assert block_of_multiaddr("/ip4/198.41.0.7/tcp/1/p2p/12D3/p2p-circuit/p2p/12D3") == UNKNOWN_BLOCK
    assert block_of_multiaddr("/dns4/example.org/tcp/1") == UNKNOWN_BLOCK
    assert block_of_multiaddr("nonsense") == UNKNOWN_BLOCK
