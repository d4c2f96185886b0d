"""What readers see of a swarm: its figures, what changed, and nothing that a stranger could do with its text."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest

from swarm.overview import (
    MAX_LINKS_SHOWN,
    MAX_TEXT,
    SMALL_SWARM,
    MoveOverview,
    NodeOverview,
    OverviewChange,
    SwarmOverview,
    changes,
    plain_text,
)
from swarm.types import LayerSpan, NodeProfile, NodeState, Snapshot

LAYERS = 12


def node(peer: str, start: int = 0, end: int = 4, **fields: object) -> NodeProfile:
    span = LayerSpan(start, end)
    profile = NodeProfile(
        peer=peer,
        name=f"name-{peer}",
        state=NodeState.SERVING,
        dtype="bf16",
        weight_hash="h",
        layer_capacity=LAYERS,
        span=span,
        layer_ms=tuple(0.5 + 0.1 * layer for layer in span),
        kv_capacity_tokens=1000,
        kv_free_tokens=600,
        sessions=2,
        region="eu",
        version="1.0",
        published_at=90.0,
    )
    return replace(profile, **fields)  # type: ignore[arg-type]


def overview(*nodes: NodeProfile, now: float = 100.0) -> SwarmOverview:
    return SwarmOverview.of(Snapshot("toy", LAYERS, nodes, now), now)


def test_the_json_of_an_overview() -> None:
    whole = overview(node("a", 0, 8, link_ms={"b": 3.456, "elsewhere": 1.0}), node("b", 4, 10))
    fields = msgspec.json.decode(msgspec.json.encode(whole))
    assert fields["coverage"] == [1] * 4 + [2] * 4 + [1] * 2 + [0] * 2
    assert fields["missing"] == [[10, 12]]
    assert (fields["model"], fields["num_layers"], fields["observed_at"], fields["answers"]) == ("toy", 12, 100.0, [])
    assert fields["nodes"][0] == {
        "peer": "a",
        "name": "name-a",
        "state": "serving",
        "start": 0,
        "end": 8,
        "layer_ms": 0.85,
        "kv_capacity_tokens": 1000,
        "kv_free_tokens": 600,
        "sessions": 2,
        "region": "eu",
        "version": "1.0",
        "dtype": "bf16",
        "pinned": False,
        "age_s": 10.0,
        "links": {"b": 3.46},  # to a node of the overview; what else a record names is not shown
    }


def test_a_large_swarm_shows_the_nearest_links() -> None:
    peers = [f"p{i:03}" for i in range(200)]
    links = {peer: float(200 - i) for i, peer in enumerate(peers)}
    small = overview(*(node(peer, link_ms=links) for peer in peers[:SMALL_SWARM]))
    large = overview(*(node(peer, link_ms=links) for peer in peers))
    assert small.nodes[0].links == {peer: links[peer] for peer in peers[:SMALL_SWARM]}
    assert large.nodes[0].links == {peer: links[peer] for peer in peers[-MAX_LINKS_SHOWN:]}


def test_a_node_without_layers() -> None:
    shown = overview(node("a", span=None, layer_ms=(), state=NodeState.JOINING)).nodes[0]
    assert (shown.start, shown.end, shown.layer_ms, shown.state) == (None, None, 0.0, "joining")


def test_what_strangers_write_is_bounded_and_has_no_control_characters() -> None:
    hostile = "\x1b[2J\x1b]0;owned\x07<script>\u202egnp\r\n" + "x" * 500
    shown = overview(node("a", name=hostile, region=hostile, version=hostile, dtype=hostile)).nodes[0]
    for text in (shown.name, shown.region, shown.version, shown.dtype):
        assert len(text) <= MAX_TEXT
        assert text.isprintable()
        assert "<script>" in text  # markup is for the page to escape
    assert plain_text("Zürich ノード") == "Zürich ノード"


def test_joined_left_moved_updated() -> None:
    before = overview(node("a"), node("b", 4, 8), node("c", 8, 12), node("d"))
    after = overview(node("b", 7, 11), node("c", 8, 12, sessions=3), node("d"), node("e", 0, 12), now=101.0)
    change = changes(before, after)
    assert [n.peer for n in change.joined] == ["e"]
    assert change.left == ("a",)
    assert change.moved == (MoveOverview("b", (4, 8), (7, 11)),)
    assert [(n.peer, n.sessions) for n in change.updated] == [("b", 2), ("c", 3)]  # b's layers take longer
    fields = msgspec.json.decode(msgspec.json.encode(change))
    assert fields["moved"] == [{"peer": "b", "from": [4, 8], "to": [7, 11]}]
    assert set(fields) == set(OverviewChange.__struct_fields__)


@pytest.mark.parametrize(
    ("fields", "noticed"),
    [
        ({"published_at": 99.0}, False),
        ({"kv_free_tokens": 590}, False),
        ({"kv_free_tokens": 500}, True),
        ({"sessions": 3}, True),
        ({"state": NodeState.LEAVING}, True),
        ({"layer_ms": (0.66, 0.66, 0.66, 0.66)}, False),  # the mean was 0.65
        ({"layer_ms": (0.9, 0.9, 0.9, 0.9)}, True),
        ({"link_ms": {"b": 10.5}}, False),
        ({"link_ms": {"b": 14.0}}, True),
        ({"link_ms": {}}, True),
        ({"name": "another"}, True),
    ],
)
def test_only_noticeable_changes_are_told(fields: dict[str, object], noticed: bool) -> None:
    other = node("b", 4, 12)
    before = overview(node("a", link_ms={"b": 10.0}), other)
    after = overview(node("a", **{"link_ms": {"b": 10.0}, **fields}), other)
    assert bool(changes(before, after).updated) is noticed


def test_slow_drift_is_told_in_the_end() -> None:
    told, updates = overview(node("a", kv_free_tokens=1000)), 0
    for free in range(1000, 800, -2):
        change = changes(told, overview(node("a", kv_free_tokens=free)))
        told = told.apply(change)
        updates += len(change.updated)
        assert abs(told.nodes[0].kv_free_tokens - free) <= 20
    assert 5 <= updates <= 12


def random_swarm(rng: random.Random, now: float) -> SwarmOverview:
    nodes = []
    for i in sorted(rng.sample(range(40), rng.randint(0, 30))):
        start = rng.randrange(LAYERS)
        fields: dict[str, object] = {"sessions": rng.randrange(3), "kv_free_tokens": rng.randrange(1000)}
        fields["link_ms"] = {f"p{rng.randrange(40):02}": rng.uniform(0, 50) for _ in range(rng.randrange(5))}
        profile = node(f"p{i:02}", start, rng.randint(start + 1, LAYERS), **fields)
        if rng.random() < 0.1:
            profile = replace(profile, span=None, layer_ms=(), state=NodeState.JOINING)
        nodes.append(profile)
    return overview(*nodes, now=now)


def exact(nodes: tuple[NodeOverview, ...]) -> list[tuple[object, ...]]:
    """What changes tell exactly, however little it changed."""
    return [(n.peer, n.start, n.end, n.state, n.sessions, set(n.links)) for n in nodes]


def test_changes_applied_are_the_next_overview() -> None:
    rng = random.Random(7)
    told = random_swarm(rng, 0.0)
    for step in range(200):
        current = random_swarm(rng, float(step))
        change = changes(told, current)
        told = told.apply(msgspec.json.decode(msgspec.json.encode(change), type=OverviewChange))
        assert exact(told.nodes) == exact(current.nodes)
        assert (told.coverage, told.missing, told.observed_at) == (
            current.coverage,
            current.missing,
            current.observed_at,
        )
        for shown, real in zip(told.nodes, current.nodes, strict=True):
            assert abs(shown.kv_free_tokens - real.kv_free_tokens) <= 20
            assert shown.layer_ms == pytest.approx(real.layer_ms, rel=0.1)
    assert changes(told, told).updated == ()
