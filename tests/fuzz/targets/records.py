"""Signed node records, as they come from the DHT and from peers: a valid one becomes a profile and can be sent on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import msgspec
from fuzz_values import filled

from swarm import records
from swarm.records import InvalidRecord, NodeRecord
from swarm.types import NodeState

INSTRUMENT = ("swarm.records", "swarm.types")
NOW = 1000.0


def run(data: bytes) -> None:
    """`data`: the payload of a record that is signed as it should be, or all of one."""
    signed = msgspec.msgpack.encode([data, bytes(64)])
    for whole in (data, signed):
        snapshot = records.to_snapshot({"a": whole}, "a", NOW, lambda *_: True)
        assert len(snapshot.nodes) + sum(snapshot.rejected_records.values()) == 1
    try:
        record = records.decode(signed, "a", "a", NOW, lambda *_: True)
    except InvalidRecord:
        return
    profile = records.to_profile(record)
    packed, _ = records.encode(profile, "a", record.layers, 10.0, lambda _: bytes(64))
    again = records.to_profile(records.decode(packed, "a", "a", record.at, lambda *_: True))
    assert dataclasses.replace(again, layer_ms=(), link_ms={}, addresses=(), network_coordinate=()) == (
        dataclasses.replace(profile, layer_ms=(), link_ms={}, addresses=(), network_coordinate=())
    )


def seeds() -> Iterator[bytes]:
    whole = msgspec.structs.replace(
        filled(NodeRecord), peer="a", model="a", layers=4, at=999.0, until=1010.0, span=(0, 2), layer_us=(5, 6),
        cost_w=(1, 2), cost_us=(3, 4), state=NodeState.SERVING,
    )  # fmt: skip
    yield msgspec.msgpack.encode(whole)
    yield msgspec.msgpack.encode(msgspec.structs.replace(whole, span=None, layer_us=(), state=NodeState.JOINING))
    yield msgspec.msgpack.encode([msgspec.msgpack.encode(whole), bytes(64)])
