"""What `swarm-node top` shows of a swarm, in terminals of any size."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable

import pytest
from rich.console import Console

from swarm.errors import NetworkError
from swarm.overview import SwarmOverview
from swarm.types import LayerSpan, NodeProfile, NodeState, Snapshot
from swarm_node.commands import top
from swarm_node.commands.top_screen import SHOWN_HAPPENINGS, TopScreen, coverage_lines
from swarm_node.owner.node_metrics import NodeMetrics

LAYERS = 30


def node(peer: str, span: tuple[int, int] | None, name: str | None = None, sessions: int = 0) -> NodeProfile:
    return NodeProfile(
        peer=peer,
        name=f"name-{peer}" if name is None else name,
        state=NodeState.SERVING if span else NodeState.JOINING,
        dtype="bf16",
        weight_hash="h",
        layer_capacity=LAYERS,
        span=LayerSpan(*span) if span else None,
        layer_ms=(1.25,) if span else (),
        kv_capacity_tokens=1000,
        kv_free_tokens=750,
        sessions=sessions,
        region="eu-west",
        version="1.0",
    )


def overview(*nodes: NodeProfile, layers: int = LAYERS) -> SwarmOverview:
    return SwarmOverview.of(Snapshot("toy", layers, nodes, 1000.0), 1003.0)


def metrics(sent_bytes: int = 0, tokens: int = 0, paused: tuple[str, ...] = ()) -> NodeMetrics:
    zeros = ("layer_ms", "layer_capacity", "kv_capacity_tokens", "kv_free_tokens", "up_s", "tasks", "sessions")
    counts = ("refused", "failed", "steps", "protocol_errors", "moves", "daemon_restarts")
    numbers = dict.fromkeys((*zeros, *counts), 0)
    texts = {"address": "", "model": "toy", "dtype": "bf16", "version": "1.0", "state": "serving"}
    own = {"pid": 7, "name": "mine", "peer": "a", "start": 0, "end": 10, "open_sessions": 2, "max_sessions": 64}
    return NodeMetrics(**numbers, **texts, **own, sent_bytes=sent_bytes, tokens=tokens, paused=paused)  # type: ignore[arg-type]


def shown(screen: TopScreen, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, color_system=None)
    console.print(screen)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    return str(text)


def looked(*nodes: NodeProfile) -> TopScreen:
    screen = TopScreen()
    screen.look(overview(*nodes), (), 0.0)
    return screen


def test_a_whole_swarm() -> None:
    text = shown(looked(node("a", (0, 20), sessions=3), node("b", (10, 30)), node("c", None)))
    assert "toy, 30 layers: 2 nodes serve, 3 sessions. Every layer is served by 1 or more." in text
    assert "▁" * 10 + "█" * 10 + "▁" * 10 in text
    assert "at most 2" in text
    rows = [line.split() for line in text.splitlines() if "name-" in line]
    assert [row[1:3] for row in rows] == [["name-a", "0:20"], ["name-b", "10:30"], ["name-c", "-"]]
    assert rows[0][3:11] == ["█" * 14 + "·" * 6, "serving", "1.250", "3", "25%", "bf16", "eu-west", "1.0"]


def test_layers_that_nobody_serves() -> None:
    text = shown(looked(node("a", (0, 10)), node("b", (20, 30))))
    assert "Nobody serves layers 10:20." in text
    assert "█" * 10 + "×" * 10 + "█" * 10 in text


def test_nobody_at_all() -> None:
    assert "No node is known to these peers." in shown(looked())


@pytest.mark.parametrize("width", [20, 40, 69, 70, 99, 100, 130, 200])
def test_any_width(width: int) -> None:
    screen = looked(*(node(f"p{i:02}", (i, i + 1), "ノード" * 15) for i in range(LAYERS)))
    screen.here = (metrics(),)
    text = shown(screen, width)
    assert "0:1" in text
    assert "layers" in text


def test_a_narrow_bar_hides_no_gap() -> None:
    spans = [(0, 511), (512, 1000)]
    nodes = [node(f"{i}", span) for i, span in enumerate(spans)]
    bar, scale = coverage_lines(overview(*nodes, layers=1000), 40)
    assert len(bar.plain) == 40
    assert bar.plain.count("×") == 1
    assert "layers 0 to 999" in scale.plain


def test_what_peers_call_themselves_is_no_markup() -> None:
    text = shown(looked(node("a", (0, 30), "[red]boss[/red][/]\x1b[2J"), node("b", (0, 30), "[link=x]")))
    assert "[red]boss[/red][/]" in text
    assert "[link=x]" in text
    assert "\x1b" not in text


def test_who_joined_left_and_moved() -> None:
    screen = looked(node("a", (0, 20)), node("b", (10, 30)), node("c", None))
    screen.look(overview(node("a", (0, 15)), node("c", (15, 30)), node("d", (0, 30))), (), 1.0)
    text = shown(screen)
    for sentence in (
        "name-d joined with layers 0:30",
        "name-b left",
        "name-a moved from 0:20 to 0:15",
        "name-c moved from no layers to 15:30",
    ):
        assert sentence in text
    for i in range(200):
        screen.look(overview(node(f"x{i}", (0, 30))), (), 2.0 + i)
    assert text.count("joined") == 1
    assert shown(screen).count("joined") + shown(screen).count("left") == SHOWN_HAPPENINGS


def test_the_nodes_of_this_machine() -> None:
    screen = TopScreen()
    swarm = overview(node("a", (0, 30)))
    screen.look(swarm, [metrics()], 10.0)
    assert "0.00 MB/s" in shown(screen)
    screen.look(swarm, [metrics(3_000_000, 50, ("the owner asked",))], 12.0)
    text = shown(screen)
    assert "1.50 MB/s, 3.0 MB" in text
    assert "25.0" in text
    assert "2/64" in text
    assert "paused: the owner asked" in text


def test_sorting_and_scrolling_in_a_low_terminal() -> None:
    screen = looked(*(node(f"p{i:02}", (i, i + 1), sessions=i) for i in range(LAYERS)))
    screen.rows = 20
    assert "name-p00" in shown(screen)
    assert len(shown(screen).splitlines()) <= 20
    screen.scroll(10)
    assert "name-p00" not in shown(screen)
    assert "name-p10" in shown(screen)
    screen.scroll(1000)
    assert "name-p29" in shown(screen)
    screen.scroll(-1000)
    while screen.sort != "sessions":
        screen.next_sort()
    assert shown(screen).index("name-p29") < shown(screen).index("name-p28")


class FakeReader:
    """No node at all; the second look fails, and the fourth ends it."""

    def __init__(self, stop: asyncio.Event, problem: Callable[[], str]) -> None:
        self.looks = 0
        self.stop = stop
        self.problem = problem
        self.problems: list[str] = []
        self.book = self
        self.model = "toy"

    async def snapshot(self) -> Snapshot:
        self.looks += 1
        self.problems.append(self.problem())
        if self.looks == 2:
            raise NetworkError("no peer answers")
        if self.looks == 4:
            self.stop.set()
        return Snapshot("toy", 0, ())


async def test_a_look_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nobody(model: str | None) -> list[NodeMetrics]:
        return []

    monkeypatch.setattr(top, "PERIOD_S", 0.01)
    monkeypatch.setattr(top, "_here", nobody)
    stop, screen = asyncio.Event(), looked(node("a", (0, 30)))
    reader = FakeReader(stop, lambda: screen.problem)
    async with asyncio.timeout(5.0):
        await top.watch(reader, screen, stop)  # type: ignore[arg-type]
    assert reader.problems == ["", "", "cannot read the swarm now: no peer answers", ""]
    assert screen.overview is not None
    assert screen.overview.nodes == ()
