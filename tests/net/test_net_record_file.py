"""The file of known nodes: bounds, damage, and a swarm found again."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import msgspec
import pytest
from record_makers import MODEL, forged, identity, record_at
from test_net_gossip import address_of, peers, village, within
from virtual_clock import virtual_time, wall_clock

from swarm.net.gossip.policy import RecordFilePolicy
from swarm.net.gossip.record_file import RecordFile

NOW = 1_700_000_000.0


def test_what_is_saved_is_read_again_by_its_owner_alone(tmp_path: Path) -> None:
    file = RecordFile.of(tmp_path / "deep" / "records", MODEL, [address_of(1)])
    assert file.load() == []
    file.save([])
    assert not file.path.exists()
    file.save([(record_at(1, NOW), NOW), (record_at(2, NOW), NOW - 5)])
    assert file.load() == [(record_at(1, NOW), NOW), (record_at(2, NOW), NOW - 5)]
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]  # no temporary file stays
    assert file.addresses(MODEL, 1) == (address_of(1),)


def test_every_swarm_has_a_file_of_its_own() -> None:
    folder = Path("x")
    given = {
        RecordFile.of(folder, MODEL, [address_of(1)]).path,
        RecordFile.of(folder, MODEL, [address_of(2)]).path,
        RecordFile.of(folder, "other", [address_of(1)]).path,
        RecordFile.of(folder, MODEL, [address_of(1)], network="home").path,
        RecordFile.of(folder, MODEL, [address_of(1)], secret="long enough to be one").path,
    }
    assert len(given) == 5
    moved = f"/ip4/10.0.0.9/tcp/1/p2p/{identity(1).peer}"  # the same peer elsewhere
    assert RecordFile.of(folder, MODEL, [moved]).path in given


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1garbage",
        bytes(400_000),
        msgspec.msgpack.encode([[b"x" * 3000, 1.0]]),
        msgspec.msgpack.encode({"a": 1}),
        b"\x91" * 100_000,
    ],
)
def test_a_damaged_file_is_ignored_with_a_sentence(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = RecordFile(tmp_path / "a.records")
    file.path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert file.load() == []
        assert file.addresses(MODEL, 8) == ()
    assert "ignored" in caplog.text


def test_records_that_nobody_signed_give_no_addresses(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "a.records")
    file.save([(forged(record_at(1, NOW)), NOW), (record_at(2, NOW, model="other"), NOW), (record_at(3, NOW), NOW)])
    assert file.addresses(MODEL, 8) == (address_of(3),)


def test_old_files_are_removed_and_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = RecordFilePolicy(max_files=3)
    for number in range(6):
        RecordFile(tmp_path / f"{number}.records", policy).save([(record_at(1, NOW), NOW)])
    assert len(list(tmp_path.glob("*.records"))) == 3
    RecordFile(tmp_path / "5.records" / "under a file").save([(record_at(1, NOW), NOW)])
    assert "cannot write" in caplog.text


@virtual_time
async def test_a_client_whose_given_peer_is_gone_finds_the_swarm_by_its_file(tmp_path: Path) -> None:
    path = tmp_path / "a.records"
    RecordFile(path).save([(record_at(number, wall_clock() - 500.0), wall_clock() - 900.0) for number in (7, 2, 8)])
    async with village() as made:
        await made.node(1)
        two = await made.node(2, 1)
        await within(6.0, two.seen, peers(1, 2))
        client = await made.node(50, 99, is_node=False)  # nobody is there
        client.reader._file = RecordFile(path)
        before = wall_clock()
        assert await client.seen() == peers(1, 2)
        assert wall_clock() - before < 2.0
        await client.reader.close()
        assert RecordFile(path).load()[0][0] not in (record_at(7, wall_clock() - 500.0),)
