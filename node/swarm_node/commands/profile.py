"""`swarm-node profile`: where the time of a step goes on the nodes of this machine, stage by stage.

Owns the look and the table. The sums are the nodes' own (`planner.scheduling.stage_times`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from swarm.errors import UsageError
from swarm.planner.scheduling.stage_times import STAGES, StageTimes
from swarm_node.owner import control_socket
from swarm_node.owner.node_metrics import NodeMetrics

PIPE_WIDTH = 140  # columns, where there is no terminal


@dataclass(frozen=True, slots=True)
class NodeTimes:
    """What a node did within `seconds`."""

    node: NodeMetrics
    seconds: float
    times: StageTimes
    tokens: int  # sampled, by a node with the last layer

    @classmethod
    def between(cls, before: NodeMetrics, after: NodeMetrics, seconds: float) -> NodeTimes:
        return cls(after, seconds, after.times - before.times, after.tokens - before.tokens)

    def to_json(self) -> dict[str, Any]:
        stages = {f"{stage}_ms": round(ms, 4) for stage, ms in self.times.per_step().items()}
        return {
            "node": self.node.pid,
            "name": self.node.name,
            "start": self.node.start,
            "end": self.node.end,
            "seconds": round(self.seconds, 3),
            "steps": self.times.steps,
            "rows": self.times.rows,
            "tokens": self.tokens,
            **stages,
        }


async def show(seconds: float, stop: asyncio.Event, as_json: bool) -> None:
    """Look for `seconds`, or until `stop`. Raises UsageError where no node runs, and where none ran a step."""
    before, begun = await _metrics(), time.monotonic()
    if not before:
        raise UsageError("no node runs on this machine under this user; start some with `swarm-node local`")
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
    after, took = await _metrics(), time.monotonic() - begun
    seen = [NodeTimes.between(before[pid], node, took) for pid, node in after.items() if pid in before]
    if not any(one.times.steps for one in seen):
        raise UsageError(f"none of the {len(seen)} nodes here ran a step in {took:.0f} s; ask them something meanwhile")
    if as_json:
        sys.stdout.write(json.dumps({"stages": STAGES, "nodes": [one.to_json() for one in seen]}) + "\n")
        return
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    Console(highlight=False, width=width).print(table_of(seen), *notes_of(seen), sep="\n", markup=False)


async def _metrics() -> Mapping[int, NodeMetrics]:
    return {found.metrics.pid: found.metrics for found in await control_socket.find()}


def table_of(seen: Sequence[NodeTimes]) -> Table:
    """A row a node, in the order of their layers; times in ms a step."""
    table = Table(title=f"ms a step, over {seen[0].seconds:.0f} s", title_justify="left")
    table.add_column("process")
    for column in ("layers", "steps", "rows", *STAGES, "in all"):
        table.add_column(column, justify="right")
    for one in sorted(seen, key=lambda one: (one.node.start is None, one.node.start)):
        times, per_step = one.times, one.times.per_step()
        where = f"{one.node.start}:{one.node.end}" if one.node.start is not None else "-"
        cells = [f"{ms:.2f}" for ms in (*per_step.values(), times.total / times.steps)] if per_step else []
        rows = f"{times.rows / times.steps:.1f}" if times.steps else "-"
        table.add_row(f"{one.node.pid} {one.node.name}".strip(), where, str(times.steps), rows, *cells)
    return table


def notes_of(seen: Sequence[NodeTimes]) -> list[str]:
    """What the stages are; of a chain that lies on this machine as a whole, what is between the nodes."""
    notes = [f"{stage}: {words}" for stage, words in STAGES.items()]
    ran = [one for one in seen if one.times.steps]
    tokens = sum(one.tokens for one in ran)
    steps = {one.times.steps for one in ran}
    inside = sum(one.times.total / one.times.steps for one in ran)
    if tokens and max(steps) - min(steps) <= 1 and max(steps) > 1:
        each = ran[0].seconds * 1e3 / max(steps)
        notes.append(
            f"A step passed all of these nodes, {inside:.2f} ms in all, one every {each:.2f} ms: if one session ran "
            f"all the time, one step at once, links and its client took the other {max(0.0, each - inside):.2f} ms."
        )
    return notes
