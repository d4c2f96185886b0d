"""What a node reads of its people's clients' memories, and what their helpers get for it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from record_makers import identity

from swarm.config import NodeConfig
from swarm.errors import UsageError
from swarm.planner.trust.contribution import POLICY
from swarm.planner.trust.evidence import MAX_FILE, UNKNOWN, PeerEvidence, PeerFile, finished, met
from swarm.records import MAX_OWNERS, owner_tag
from swarm.types import LayerSpan, NodeProfile, NodeState, PeerId, Snapshot
from swarm_hop.sharing.contributors import ContributorPolicy, Contributors
from swarm_hop.sharing.shares import SharePlaces, SharePolicy
from swarm_node.membership.accounts import Accounts

HELPER, CLIENT = "node of a friend", "the friend"


def snapshot(*owners: tuple[PeerId, PeerId]) -> Snapshot:
    nodes = tuple(
        NodeProfile(n, n, NodeState.SERVING, "fp32", "h", 4, LayerSpan(0, 4), owners=(owner_tag(n, client),))
        for n, client in owners
    )
    return Snapshot("m", 4, nodes)


def gave(part: float) -> PeerEvidence:
    return finished(met(UNKNOWN, 1e6), part * POLICY.full / 4, 4)


def write(folder: Path, name: str, **known: PeerEvidence) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.seen"
    file.write_bytes(msgspec.msgpack.encode(PeerFile(1, known)))
    return file


def reader(folder: Path, seen: Snapshot, **policy: int) -> Contributors:
    return Contributors(folder, lambda: there(seen), lambda: 1e6, ContributorPolicy(**policy))


async def there(seen: Snapshot) -> Snapshot:
    return seen


async def look(contributors: Contributors) -> Contributors:
    await contributors.update()
    return contributors


async def test_work_for_any_model_counts_and_is_read_again_when_it_changes(tmp_path: Path) -> None:
    seen = snapshot((HELPER, CLIENT))
    contributors = await look(reader(tmp_path / "none yet", seen))
    assert (contributors.weight(CLIENT), len(contributors)) == (1.0, 0)
    contributors = await look(reader(tmp_path, seen))
    first = write(tmp_path, "one", **{HELPER: gave(0.25)})
    write(tmp_path, "two", **{HELPER: gave(0.25)})
    assert (await look(contributors)).weight(CLIENT) == pytest.approx(1.0 + (POLICY.max_weight - 1.0) / 2)
    assert (contributors.weight("somebody"), len(contributors)) == (1.0, 1)
    write(tmp_path, "one", **{HELPER: gave(1.0)})
    os.utime(first, ns=(1, 1))
    assert (await look(contributors)).weight(CLIENT) == POLICY.max_weight
    first.unlink()
    assert (await look(contributors)).weight(CLIENT) < POLICY.max_weight


async def test_files_that_are_no_memories_count_for_nothing_and_few_are_read(tmp_path: Path) -> None:
    seen = snapshot((HELPER, CLIENT))
    write(tmp_path, "good", **{HELPER: gave(1.0)})
    for number, data in enumerate((b"", b"\x91" * 1000, b"\0" * (MAX_FILE + 1), os.urandom(500))):
        (tmp_path / f"bad{number}.seen").write_bytes(data)
    (tmp_path / "folder.seen").mkdir()
    assert (await look(reader(tmp_path, seen))).weight(CLIENT) == POLICY.max_weight
    for number in range(5):
        os.utime(write(tmp_path, f"new{number}"), ns=(2**62, 2**62))
    assert (await look(reader(tmp_path, seen, max_files=5))).weight(CLIENT) == 1.0


def test_a_helper_has_a_share_of_its_own_behind_the_relay_of_a_flood() -> None:
    places = SharePlaces(weight=lambda peer: {"helper": 2.5, "little": 1.5}.get(peer, 1.0))
    crowd = {places.of(f"x{i}", "").block for i in range(100)}
    assert crowd == {places.of("little", "").block}
    helper = places.of("helper", "")
    assert helper.block not in crowd
    assert (helper.weight, places.of("helper", "8.8.8.8")) == (
        2.5,
        helper.__class__(("8.8.8.0/24", "helper"), "helper"),
    )
    assert len({places.of(f"y{i}", "").member for i in range(100)}) <= SharePolicy().own_places + 1


def test_owners_go_first_and_a_record_marks_a_few_of_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path))
    owners = tuple(identity(number).peer for number in range(MAX_OWNERS + 2))
    accounts = Accounts(NodeConfig(owner=(*owners, owners[0])), "me", lambda: there(snapshot()), lambda: 0.0)
    assert all(accounts.places.of(peer, "8.8.8.8").first for peer in owners)
    assert not accounts.places.of(identity(99).peer, "8.8.8.8").first
    assert accounts.owner_tags == tuple(owner_tag("me", peer) for peer in owners[:MAX_OWNERS])
    with pytest.raises(UsageError):
        Accounts(NodeConfig(owner=("nobody",)), "me", lambda: there(snapshot()), lambda: 0.0)
