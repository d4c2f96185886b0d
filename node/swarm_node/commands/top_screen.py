"""What `swarm-node top` shows, as rich renderables: coverage, the nodes of this machine, all nodes, what happened.

Owns the layout and what is remembered between two looks; reads nothing and knows no terminal. What peers call
themselves is shown as plain text, never as markup.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from swarm.overview import NodeOverview, OverviewChange, SwarmOverview, changes
from swarm_node.owner.node_metrics import NodeMetrics

MAX_HAPPENINGS = 50
SHOWN_HAPPENINGS = 5
LEAST_ROWS = 3  # of the table of nodes, however low the terminal is
_LEVELS = "▁▂▃▄▅▆▇█"

SORTS: dict[str, Callable[[NodeOverview], tuple[object, ...]]] = {
    "layers": lambda n: (n.span is None, n.span or (0, 0), n.peer),
    "name": lambda n: (n.name, n.peer),
    "ms/layer": lambda n: (n.layer_ms, n.peer),
    "sessions": lambda n: (-n.sessions, n.peer),
    "KV used": lambda n: (-_kv_used(n), n.peer),
}


@dataclass(slots=True)
class OwnRates:
    """Of one node on this machine, a second, between the last two looks."""

    sent_bytes: float = 0.0
    tokens: float = 0.0


@dataclass(slots=True)
class TopScreen:
    """Renders the last look. `rows`: lines of the terminal; None: everything (`--once`, a pipe)."""

    overview: SwarmOverview | None = None
    here: Sequence[NodeMetrics] = ()
    rows: int | None = None
    sort: str = "layers"
    offset: int = 0  # of the first node shown
    problem: str = ""  # why the last look failed
    happenings: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=MAX_HAPPENINGS))
    _rates: dict[int, OwnRates] = field(default_factory=dict)
    _looked: float = 0.0

    def look(self, overview: SwarmOverview, here: Sequence[NodeMetrics], now: float) -> None:
        """`now`: seconds, of any clock."""
        if self.overview is not None:
            change = changes(self.overview, overview)
            names = {node.peer: _called(node) for node in (*self.overview.nodes, *overview.nodes)}
            for sentence in _sentences(change, names):
                self.happenings.appendleft((overview.observed_at, sentence))
        before, passed = {node.pid: node for node in self.here}, now - self._looked
        self._rates = {
            node.pid: OwnRates(
                max(0.0, node.sent_bytes - before[node.pid].sent_bytes) / passed,
                max(0.0, node.tokens - before[node.pid].tokens) / passed,
            )
            for node in here
            if node.pid in before and passed > 0
        }
        self.overview, self.here, self._looked, self.problem = overview, here, now, ""

    def next_sort(self) -> None:
        names = list(SORTS)
        self.sort = names[(names.index(self.sort) + 1) % len(names)]

    def scroll(self, lines: int) -> None:
        count = len(self.overview.nodes) if self.overview is not None else 0
        self.offset = max(0, min(self.offset + lines, count - 1))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        overview, width = self.overview, options.max_width
        if overview is None:
            yield Text(self.problem or "reading the swarm ...")
            return
        above: list[Text | Table] = [headline(overview), *coverage_lines(overview, width), Text("")]
        if self.here:
            above += [self._own_table(width), Text("")]
        below = [Text(""), *self._lately()] if self.happenings else []
        if self.problem:
            below.append(Text(self.problem, "red"))
        if self.rows is not None:
            below.append(Text(f"q quit   s sort: {self.sort}   ↑ ↓ scroll", "dim", no_wrap=True, overflow="ellipsis"))
        yield from above
        used = sum(len(console.render_lines(part, options)) for part in (*above, *below))
        room = None if self.rows is None else max(LEAST_ROWS, self.rows - used - 3)  # the table's head, and the rest
        yield self._node_table(overview, width, room)
        yield from below

    def _own_table(self, width: int) -> Table:
        table = _table("On this machine")
        columns = ("name", "state", "layers", "sessions", "upload", "tokens/s", *(("KV free",) if width >= 90 else ()))
        for column in columns:
            table.add_column(column, no_wrap=True, overflow="ellipsis")
        for node in self.here:
            rates = self._rates.get(node.pid, OwnRates())
            cells = [
                node.name or str(node.pid),
                "paused: " + "; ".join(node.paused) if node.paused else node.state,
                f"{node.start}:{node.end}" if node.start is not None else "-",
                f"{node.open_sessions}/{node.max_sessions}",
                f"{rates.sent_bytes / 1e6:.2f} MB/s" + (f", {node.sent_bytes / 1e6:.1f} MB" if width >= 80 else ""),
                f"{rates.tokens:.1f}",
            ]
            if width >= 90:
                cells.append(f"{node.kv_free_tokens}/{node.kv_capacity_tokens}")
            table.add_row(*map(Text, cells))
        return table

    def _node_table(self, overview: SwarmOverview, width: int, room: int | None) -> Table:
        ordered = sorted(overview.nodes, key=SORTS[self.sort])
        self.offset = max(0, min(self.offset, len(ordered) - (room or len(ordered))))
        shown = ordered[self.offset : None if room is None else self.offset + room]
        rest = f", {self.offset + 1} to {self.offset + len(shown)}" if len(shown) < len(ordered) else ""
        table = _table(f"{len(ordered)} nodes{rest}")
        columns = _columns(width)
        for column in columns:
            limit = max(6, width // 4) if column == "name" else None  # the only long one; else rich shrinks them all
            table.add_column(column, no_wrap=True, overflow="ellipsis", max_width=limit)
        own = {node.peer for node in self.here}
        for node in shown:
            cells = _cells(node, overview.num_layers)
            style = "bold" if node.peer in own else "dim" if node.state not in ("serving", "leaving") else ""
            table.add_row(*(Text(cells[column], style) for column in columns))
        return table

    def _lately(self) -> Iterator[Text]:
        for at, sentence in list(self.happenings)[:SHOWN_HAPPENINGS]:
            clock = time.strftime("%H:%M:%S", time.localtime(at))
            yield Text(f"{clock}  {sentence}", no_wrap=True, overflow="ellipsis")


def headline(overview: SwarmOverview) -> Text:
    serving = sum(node.state in ("serving", "leaving") for node in overview.nodes)
    sessions = sum(node.sessions for node in overview.nodes)
    text = Text(f"{overview.model}, {overview.num_layers} layers: {serving} nodes serve, {sessions} sessions. ", "bold")
    if not overview.nodes:
        return text.append("No node is known to these peers.", "red")
    if overview.missing:
        ranges = ", ".join(f"{start}:{end}" for start, end in overview.missing)
        return text.append(f"Nobody serves layers {ranges}.", "red")
    least = min(overview.coverage, default=0)
    return text.append(f"Every layer is served by {least} or more.", "green" if least > 1 else "yellow")


def coverage_lines(overview: SwarmOverview, width: int) -> list[Text]:
    """One column for a layer, or for several where the terminal is narrower than the model is deep: then the least
    replicas among them are shown, so that no gap is hidden."""
    coverage = overview.coverage
    if not coverage:
        return []
    columns = max(1, min(len(coverage), width))
    cuts = [len(coverage) * column // columns for column in range(columns + 1)]
    least = [min(coverage[a:b]) for a, b in itertools.pairwise(cuts)]
    most = max(1, max(coverage))
    bar = Text(no_wrap=True)
    for replicas in least:
        level = 0 if most == 1 else (replicas - 1) * (len(_LEVELS) - 1) // (most - 1)
        style = "red" if replicas == 0 else "yellow" if replicas == 1 else "green"
        bar.append("×" if replicas == 0 else _LEVELS[level] if most > 1 else _LEVELS[-1], style)
    scale = Text(f"replicas of layers 0 to {len(coverage) - 1}, at most {most}", "dim", no_wrap=True)
    return [bar, scale]


def _table(title: str) -> Table:
    return Table(title=Text(title), title_justify="left", box=None, pad_edge=False, header_style="dim")


def _columns(width: int) -> tuple[str, ...]:
    """Those that a terminal of `width` has room for."""
    wide = ("name", "layers", "span", "state", "ms/layer", "sessions", "KV used")
    if width >= 130:
        return ("peer", *wide, "dtype", "region", "version", "record")
    if width >= 100:
        return ("peer", *wide, "region")
    if width >= 70:
        return wide
    return ("name", "layers", "state", "sessions") if width >= 40 else ("name", "layers")


def _cells(node: NodeOverview, num_layers: int) -> dict[str, str]:
    return {
        "peer": node.peer[-8:],
        "name": _called(node),
        "layers": f"{node.start}:{node.end}" if node.span else "-",
        "span": _span_bar(node, num_layers),
        "state": node.state + (", pinned" if node.pinned else ""),
        "ms/layer": f"{node.layer_ms:.3f}" if node.layer_ms else "-",
        "sessions": str(node.sessions),
        "KV used": f"{_kv_used(node):.0%}",
        "dtype": node.dtype,
        "region": node.region,
        "version": node.version,
        "record": f"{node.age_s:.0f} s old",
    }


def _span_bar(node: NodeOverview, num_layers: int, width: int = 20) -> str:
    if node.start is None or node.end is None or num_layers <= 0:
        return "·" * width
    first = min(width - 1, node.start * width // num_layers)
    last = max(first + 1, min(width, -(-node.end * width // num_layers)))
    return "·" * first + "█" * (last - first) + "·" * (width - last)


def _kv_used(node: NodeOverview) -> float:
    return 1 - node.kv_free_tokens / node.kv_capacity_tokens if node.kv_capacity_tokens else 0.0


def _called(node: NodeOverview) -> str:
    return node.name or node.peer[-8:]


def _sentences(change: OverviewChange, names: dict[str, str]) -> Iterator[str]:
    for node in change.joined:
        yield f"{names[node.peer]} joined" + (f" with layers {node.start}:{node.end}" if node.span else "")
    for peer in change.left:
        yield f"{names[peer]} left"
    for move in change.moved:
        before, after = (f"{span[0]}:{span[1]}" if span else "no layers" for span in (move.before, move.after))
        yield f"{names[move.peer]} moved from {before} to {after}"
