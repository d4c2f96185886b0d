"""What a client remembers of peers, and its file."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from swarm.errors import ConnectionLost, NetworkError, NodeBusy, ProtocolError, RemoteError
from swarm.planner.trust.evidence import MAX_FILE, MAX_PEERS, UNKNOWN, FailureKind
from swarm_client.trust.failures import HopStalled, ReportedLost, StragglerEvicted, failure_kind
from swarm_client.trust.peer_memory import PeerMemory


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (NodeBusy("full"), None),
        (RemoteError("gone", "log_lost"), None),
        (ReportedLost("another says so"), None),
        (RemoteError("no", "bad_model"), FailureKind.REFUSED),
        (HopStalled("no further"), FailureKind.STALLED),
        (StragglerEvicted("slow"), FailureKind.SLOW),
        (ProtocolError("nonsense"), FailureKind.WRONG),
        (ConnectionLost("silence"), FailureKind.SILENT),
    ],
)
def test_which_failures_are_evidence(cause: NetworkError, kind: FailureKind | None) -> None:
    assert failure_kind(cause) is kind
    memory = PeerMemory()
    memory.failed("p", cause, 1.0)
    memory.failed("p", cause, 2.0)  # the same failure, reported again
    assert memory.of("p").failure is kind
    assert memory.of("p").strikes == (kind is not None)


async def test_what_was_seen_outlives_the_client(tmp_path: Path) -> None:
    file = tmp_path / "peers" / "model.seen"
    memory = PeerMemory(file)
    memory.served("good", 50, 5.0, "45.66.0.0/16")
    memory.took("good", 1.0, 2.0, 6.0)
    memory.failed("hole", HopStalled("x"), 7.0)
    memory.audited("cheat", False, 8.0)
    await memory.save()
    again = PeerMemory(file)
    assert again.known == memory.known
    assert (again.of("good").rows, again.of("good").ratio, again.of("hole").strikes) == (50.0, 2.0, 1)
    assert again.of("nobody") == UNKNOWN
    assert [path.name for path in file.parent.iterdir()] == ["model.seen"]


async def test_the_memory_is_bounded_and_forgets_cheats_last(tmp_path: Path) -> None:
    memory = PeerMemory(tmp_path / "m")
    memory.audited("cheat", False, 0.0)
    for i in range(2 * MAX_PEERS):
        memory.failed(f"{'x' * 100}{i}", ConnectionLost("x"), float(i), "b" * 64)
    assert len(memory.known) <= MAX_PEERS
    assert "cheat" in memory.known
    assert len(memory._causes) <= MAX_PEERS
    await memory.save()
    assert (tmp_path / "m").stat().st_size <= MAX_FILE
    assert PeerMemory(tmp_path / "m").known == memory.known


async def test_a_damaged_or_hostile_file_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "m"
    memory = PeerMemory(file)
    memory.served("good", 50, 5.0)
    await memory.save()
    whole = file.read_bytes()
    rng = random.Random(3)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 5)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        file.write_bytes(data[: rng.randrange(len(data) + 1)])
        for evidence in PeerMemory(file).known.values():
            assert 0.0 <= evidence.ratio <= 1e12
    encode = msgspec.msgpack.encode
    record = [*msgspec.to_builtins(memory.of("good"))]
    hostile = [
        b"",
        b"\0" * (MAX_FILE + 1),
        b"\x91" * 100_000,
        encode({"version": 2, "peers": {}}),
        encode({"version": 1, "peers": {"p": [float("nan")] * len(record)}}),
        encode({"version": 1, "peers": {"p": [*record[:3], -1, *record[4:]]}}),
        encode({"version": 1, "peers": {"p": [*record[:4], float("inf"), *record[5:]]}}),
        encode({"version": 1, "peers": {str(i): record for i in range(MAX_PEERS + 1)}}),
    ]
    for data in hostile:
        file.write_bytes(data)
        assert PeerMemory(file).known == {}
    file.unlink()
    file.mkdir()
    assert PeerMemory(file).known == {}
    await memory.save()  # it cannot be written: no error


def test_a_missing_file_is_no_memory(tmp_path: Path) -> None:
    assert PeerMemory(tmp_path / "none").known == {}
