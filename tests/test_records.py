"""Node records: round trips; invalid ones are rejected and counted."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm import records
from swarm.errors import ProtocolError
from swarm.net.security.identity import Identity, verify
from swarm.records import MAX_LIFETIME_S, MAX_OWNERS, MAX_RECORD, InvalidRecord, owner_tag
from swarm.types import UNMEASURED, CostCurve, ExpertShare, LayerSpan, NodeProfile, NodeState, OfferedDrafter

NOW = 1_700_000_000.0
MODEL = "smollm2-135m"
ALICE, BOB = Identity.from_seed(b"a" * 32), Identity.from_seed(b"b" * 32)


def profile(identity: Identity = ALICE, **changes: Any) -> NodeProfile:
    full = NodeProfile(
        peer=identity.peer,
        name="kitchen",
        state=NodeState.SERVING,
        dtype="bf16",
        weight_hash="ab" * 16,
        layer_capacity=20,
        span=LayerSpan(10, 30),
        addresses=("/ip4/10.0.0.1/tcp/4001/p2p/" + identity.peer,),
        layer_ms=tuple(1.0 + i / 8 for i in range(20)),
        cost=CostCurve((1, 4, 16), (1.0, 1.5, 2.5)),
        kv_capacity_tokens=4096,
        kv_free_tokens=1000,
        sessions=3,
        region="eu",
        network_coordinate=(1.5, -2.25),
        link_ms={BOB.peer: 12.5},
        version="0.1.0",
        published_at=NOW,
    )
    return replace(full, **changes)


def record(identity: Identity = ALICE, **changes: Any) -> bytes:
    return records.encode(profile(identity, **changes), MODEL, 30, 12.0, identity.sign)[0]


def signed(payload: dict[str, Any], identity: Identity = ALICE) -> bytes:
    """A record of any content, properly signed."""
    data = msgspec.msgpack.encode(payload)
    return msgspec.msgpack.encode([data, identity.sign(b"swarm node record 1\0" + data)])


def forged(**changes: Any) -> bytes:
    """Alice's record with payload fields changed, and signed by her."""
    payload = msgspec.msgpack.decode(msgspec.msgpack.decode(record())[0])
    return signed({**payload, **changes})


def reason(data: bytes, peer: str = ALICE.peer, now: float = NOW) -> str:
    with pytest.raises(InvalidRecord) as caught:
        records.decode(data, peer, MODEL, now, verify)
    return caught.value.reason


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"state": NodeState.JOINING, "span": None, "layer_ms": ()},
        {"layer_ms": (2.0,) * 20},
        {"layer_ms": ()},
        {"cost": UNMEASURED},
        {"addresses": (), "link_ms": {}, "network_coordinate": (), "region": "", "name": ""},
        {"owners": tuple(owner_tag(ALICE.peer, f"client {i}") for i in range(MAX_OWNERS))},
        {"drafter": OfferedDrafter("eagle", "x" * 64, b"f" * 16, (2, 15, 30), 3.25)},
        {"drafter": OfferedDrafter("mtp", "", b"f" * 16, (30,))},
    ],
)
def test_profiles_round_trip(changes: dict[str, Any]) -> None:
    data, until = records.encode(profile(**changes), MODEL, 30, 12.0, ALICE.sign)
    assert until == NOW + 12.0
    back = records.decode(data, ALICE.peer, MODEL, NOW + 1, verify)
    assert records.to_profile(back) == profile(**changes)
    assert back.layers == 30
    assert len(data) <= 1024


def test_a_large_record_drops_optional_fields_until_it_fits() -> None:
    peers = [Identity.from_seed(hashlib.sha256(bytes([i])).digest()).peer for i in range(64)]
    rich = profile(
        span=LayerSpan(0, 120),
        layer_ms=tuple(1.0 + i / 7 for i in range(120)),
        link_ms={peer: float(i) for i, peer in enumerate(peers)},
        owners=tuple(owner_tag(ALICE.peer, f"client {i}") for i in range(2 * MAX_OWNERS)),
        drafter=OfferedDrafter("eagle", "x" * 64, b"f" * 16, (2, 60, 120), 3.0),
        addresses=tuple(f"/ip4/10.0.0.{i}/udp/4001/quic-v1/p2p/{ALICE.peer}" for i in range(8)),
        cost=CostCurve(tuple(range(1, 17)), tuple(float(i) for i in range(16))),
    )
    data, _ = records.encode(rich, MODEL, 120, 12.0, ALICE.sign)
    assert len(data) <= MAX_RECORD
    back = records.to_profile(records.decode(data, ALICE.peer, MODEL, NOW, verify))
    assert back.span == rich.span
    assert set(back.link_ms) <= set(peers[:24]), "the nearest links are kept"
    assert sum(back.layer_ms) == pytest.approx(sum(rich.layer_ms), rel=1e-3)


def test_a_record_that_cannot_fit_is_an_error() -> None:
    with pytest.raises(ProtocolError):
        records.encode(profile(weight_hash="x" * 5000, layer_ms=(), link_ms={}), MODEL, 30, 12.0, ALICE.sign)


def test_owners_are_marked_for_those_who_know_them_and_bounded() -> None:
    assert owner_tag(ALICE.peer, "me") != owner_tag(BOB.peer, "me"), "marks of several nodes link nothing"
    assert len(records.decode(record(owners=(b"t" * 16,) * 9), ALICE.peer, MODEL, NOW, verify).owners) == MAX_OWNERS
    for owners in ([b"t" * 15], [b"t" * 17], [b"t" * 16] * (MAX_OWNERS + 1), ["t" * 16], [7], b"t" * 16):
        assert reason(forged(owners=owners)) == "malformed"


def test_lifetimes_are_capped_by_the_writer_too() -> None:
    _, until = records.encode(profile(), MODEL, 30, 1e9, ALICE.sign)
    assert until == NOW + MAX_LIFETIME_S


def test_why_records_are_rejected() -> None:
    good = record()
    assert records.decode(good, ALICE.peer, MODEL, NOW, verify).peer == ALICE.peer
    assert reason(good, now=NOW + 12.0) == "late"
    assert reason(good, now=NOW - 4.0) == "from_the_future"
    assert reason(good, peer=BOB.peer) == "wrong_subkey"
    assert reason(forged(model="another")) == "wrong_model"
    assert reason(forged(until=NOW + 3600.0)) == "over_lived"
    assert reason(forged(until=NOW + 1.0, at=NOW + 2.0)) == "over_lived"
    assert reason(signed({**msgspec.msgpack.decode(msgspec.msgpack.decode(good)[0])}, BOB)) == "bad_signature"
    assert reason(good[:-1] + bytes([good[-1] ^ 1])) == "bad_signature"
    assert reason(good + b"\0") == "malformed"
    assert reason(bytes(MAX_RECORD + 1)) == "malformed"


@pytest.mark.parametrize(
    "changes",
    [
        {"span": [20, 10]},
        {"span": [10, 10]},
        {"span": [0, 31]},
        {"span": [-1, 5]},
        {"span": [1, 2, 3]},
        {"span": None},
        {"layers": 0},
        {"layers": 1 << 40},
        {"layer_us": [1, 2, 3]},
        {"layer_us": [-1]},
        {"cost_w": [4, 1], "cost_us": [1, 1]},
        {"cost_w": [0], "cost_us": [1]},
        {"cost_w": [1, 2], "cost_us": [1]},
        {"coord": [math.nan]},
        {"coord": [1e300]},
        {"links": {BOB.peer: math.inf}},
        {"links": {BOB.peer: math.nan}},
        {"links": {BOB.peer: -1.0}},
        {"links": {str(i): 1.0 for i in range(50)}},
        {"at": math.nan},
        {"until": math.inf},
        {"until": "soon"},
        {"state": "exalted"},
        {"capacity": -1},
        {"sessions": 1 << 60},
        {"addrs": ["x" * 500]},
        {"peer": 5},
        {"experts": [10, 30, 4, 2, 8]},
        {"experts": [10, 30, 0, 9, 8]},
        {"experts": [10, 30, 0, 4, 1 << 20]},
        {"experts": [10, 29, 0, 4, 8]},  # not those of its span
        {"experts": [10, 31, 0, 4, 8], "span": None, "layer_us": []},
        {"experts": [20, 20, 0, 4, 8], "span": None, "layer_us": []},
        {"experts": [10, 30, 4, 4, 8], "span": None, "layer_us": []},  # none of them, for nobody
        {"experts": [10, 30, 0, 4]},
        {"state": "waiting", "span": None, "layer_us": []},
        {"room": [1 << 20, 0]},
        {"room": [0, -2]},
        {"drafter": ["eagle", "x", b"f" * 16, [2, 2], 1]},
        {"drafter": ["eagle", "x", b"f" * 16, [2, 31], 1]},
        {"drafter": ["eagle", "x", b"f" * 16, [], 1]},
        {"drafter": ["eagle", "x", b"f" * 16, list(range(9)), 1]},
        {"drafter": ["oracle", "x", b"f" * 16, [2], 1]},
        {"drafter": ["eagle", "x" * 65, b"f" * 16, [2], 1]},
        {"drafter": ["eagle", "x", b"f", [2], 1]},
        {"drafter": ["eagle", "x", b"f" * 16, [2], -1]},
        {"drafter": ["eagle", "x", b"f" * 16, [2], 1], "span": [0, 29], "layer_us": []},
    ],
)
def test_malformed_fields(changes: dict[str, Any]) -> None:
    assert reason(forged(**changes)) == "malformed"


@pytest.mark.parametrize(
    "changes",
    [
        {"experts": ExpertShare(LayerSpan(10, 30), 0, 0, 128), "state": NodeState.WAITING},
        {"experts": ExpertShare(LayerSpan(10, 30), 64, 128, 128)},
        {"experts": ExpertShare(LayerSpan(3, 4), 0, 64, 128), "span": None, "layer_ms": ()},
        {"expert_room": 40, "lead_room": 12, "span": None, "layer_ms": (), "state": NodeState.JOINING},
    ],
)
def test_shares_of_experts_survive(changes: dict[str, Any]) -> None:
    decoded = records.decode(record(**changes), ALICE.peer, MODEL, NOW, verify)
    assert records.to_profile(decoded) == profile(**changes)
    assert records.to_profile(decoded).serving == (changes.get("span", 1) is not None and "state" not in changes)


def test_fields_of_later_versions_are_ignored() -> None:
    assert records.decode(forged(future={"x": [1]}), ALICE.peer, MODEL, NOW, verify).peer == ALICE.peer


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes(data: bytes) -> None:
    assert reason(data) == "malformed"


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_records(data: st.DataObject) -> None:
    bad = bytearray(record())
    bad[data.draw(st.integers(0, len(bad) - 1))] ^= data.draw(st.integers(1, 255))
    assert reason(bytes(bad))


def test_snapshot() -> None:
    carol, dave, eve = (Identity.from_seed(bytes([i]) * 32) for i in (3, 4, 5))
    found = {
        ALICE.peer: record(),
        BOB.peer: record(BOB, state=NodeState.LOADING),
        carol.peer: record(),  # Alice's, under Carol's subkey
        dave.peer: records.encode(profile(dave), MODEL, 32, 12.0, dave.sign)[0],
        eve.peer: b"rubbish",
    }
    snapshot = records.to_snapshot(found, MODEL, NOW + 1, verify)
    assert [n.peer for n in snapshot.nodes] == sorted((ALICE.peer, BOB.peer))
    assert snapshot.num_layers == 30
    assert snapshot.model == MODEL
    assert snapshot.observed_at == NOW + 1
    assert snapshot.rejected_records == {"wrong_subkey": 1, "wrong_depth": 1, "malformed": 1}
    assert snapshot.missing() == ((0, 10),)
    given = records.to_snapshot(found, MODEL, NOW + 1, verify, num_layers=32)
    assert [n.peer for n in given.nodes] == [dave.peer]
    assert records.to_snapshot({}, MODEL, NOW, verify).num_layers == 0
    assert records.to_snapshot({}, MODEL, NOW, verify, 30).missing() == ((0, 30),)
    assert records.to_snapshot(found, MODEL, NOW + 100, verify).nodes == ()
