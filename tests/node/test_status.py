"""What `swarm-node status` prints for a snapshot."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from swarm.types import ExpertShare, LayerSpan, NodeProfile, NodeState, Snapshot
from swarm_node.commands.status import layers_of, to_json, to_text, waits_for


def node(peer: str, span: LayerSpan | None, state: NodeState = NodeState.SERVING) -> NodeProfile:
    return NodeProfile(
        peer=peer,
        name=f"name of {peer}",
        state=state,
        dtype="bf16",
        weight_hash="h",
        layer_capacity=4,
        span=span,
        layer_ms=(0.5,) * len(span) if span else (),
        kv_capacity_tokens=100,
        kv_free_tokens=60,
        sessions=2,
    )


def shown(snapshot: Snapshot) -> str:
    stream = io.StringIO()
    Console(file=stream, width=140).print(*to_text(snapshot), sep="\n", markup=False)
    return stream.getvalue()


def test_a_whole_swarm() -> None:
    snapshot = Snapshot("toy", 4, (node("aaaa", LayerSpan(0, 3)), node("bbbb", LayerSpan(2, 4))))
    text = shown(snapshot)
    assert "name of aaaa" in text
    assert "0:3" in text
    assert "0.500" in text
    assert "60/100" in text
    assert "Every layer is served, by 1 or more nodes." in text
    fields = to_json(snapshot)
    assert fields["coverage"] == [1, 1, 2, 1]
    assert fields["missing"] == []
    assert [(n["peer"], n["start"], n["end"]) for n in fields["nodes"]] == [("aaaa", 0, 3), ("bbbb", 2, 4)]


def test_layers_that_nobody_serves_and_records_that_were_ignored() -> None:
    nodes = (node("aaaa", LayerSpan(1, 2)), node("bbbb", None, NodeState.JOINING))
    snapshot = Snapshot("toy", 4, nodes, rejected_records={"bad_signature": 3})
    text = shown(snapshot)
    assert "Nobody serves layers 0:1, 2:4." in text
    assert "joining" in text
    assert "3 records ignored: bad_signature" in text
    assert to_json(snapshot)["missing"] == [[0, 1], [2, 4]]


def test_nobody_at_all() -> None:
    assert "No node of toy is known" in shown(Snapshot("toy", 0, ()))


def test_status_says_who_holds_which_experts_and_what_a_leader_waits_for() -> None:
    share = ExpertShare(LayerSpan(3, 4), 0, 64, 128)
    led = replace(node("aaaa", share.layers, NodeState.WAITING), experts=share, name="boss")
    held = replace(node("bbbb", None), experts=replace(share, first=64, end=100))
    snapshot = Snapshot("m", 4, (led, held))
    assert layers_of(led) == "3:4, experts 0:64 of 128"
    assert layers_of(held) == "experts 64:100 of 128 in 3:4"
    assert waits_for(led, snapshot) == "boss leads layers 3:4 and waits: nobody holds experts 100:128."
    assert waits_for(held, snapshot) == ""
    assert waits_for(replace(led, state=NodeState.SERVING), snapshot) == ""
    assert "waits" in str(to_text(snapshot)[2])
