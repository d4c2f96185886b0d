"""What `swarm-node profile` makes of the stages of steps that nodes have run."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from test_executor import WHOLE, ToyEngine, arrival, session
from test_top import metrics

from swarm.errors import UsageError
from swarm.planner.scheduling.stage_times import STAGES, StageTimes
from swarm_hop.serving.compute_device import ThreadDevice
from swarm_hop.serving.executor import Executor
from swarm_hop.serving.session_runner import Counters
from swarm_node.commands import profile
from swarm_node.commands.profile import NodeTimes
from swarm_node.owner import control_socket
from swarm_node.owner.control_socket import LocalNode
from swarm_node.owner.node_metrics import NodeMetrics

BEFORE = StageTimes(steps=1, rows=1, total=9.0, queue=1.0, plan=1.0, kernels=5.0, handover=1.0, send=0.5)
ADDED = StageTimes(steps=4, rows=8, total=40.0, queue=4.0, plan=2.0, kernels=20.0, handover=6.0, send=4.0)


def node(times: StageTimes, pid: int = 7, tokens: int = 0) -> NodeMetrics:
    start = 10 * (pid - 7)
    return msgspec.structs.replace(metrics(tokens=tokens), times=times, pid=pid, start=start, end=start + 10)


def test_stages_add_up_to_the_whole() -> None:
    per_step = (BEFORE + ADDED - BEFORE).per_step()
    assert list(per_step) == list(STAGES)
    assert sum(per_step.values()) == pytest.approx(40.0 / 4)
    assert per_step["other"] == pytest.approx(1.0)
    assert StageTimes().per_step() == {}


async def test_an_executor_tells_plan_kernels_and_handover_apart() -> None:
    executor, counters = Executor(ToyEngine(WHOLE), ThreadDevice(), 512), Counters()
    outcome = await executor.run(session(0), arrival())
    await executor.close()
    parts = (outcome.plan_ms, outcome.compute_ms, outcome.handover_ms)
    assert all(ms > 0 for ms in parts)
    counters.took(1, outcome, send_s=0.001, total_s=0.002 + (outcome.queue_ms + sum(parts)) / 1e3)
    times = counters.times
    assert (times.steps, times.rows, times.send) == (1, 1, pytest.approx(1.0))
    assert (times.plan, times.kernels, times.handover) == parts
    assert times.queue == pytest.approx(max(0.0, outcome.queue_ms - outcome.plan_ms))


def test_the_table_has_a_row_a_node_and_what_lies_between_them() -> None:
    seen = [NodeTimes.between(node(BEFORE, pid), node(BEFORE + ADDED, pid, tokens=4), 0.1) for pid in (8, 7)]
    console = Console(file=io.StringIO(), width=140, highlight=False, color_system=None)
    console.print(profile.table_of(seen), *profile.notes_of(seen), sep="\n")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    first, second = (line for line in text.splitlines() if "mine" in line)
    assert "0:10" in first
    assert "10:20" in second
    shown = [cell.strip() for cell in first.split("│")[5:12]]
    assert shown == ["1.00", "0.50", "5.00", "1.50", "1.00", "1.00", "10.00"]
    assert "20.00 ms in all, one every 25.00 ms" in text
    assert "the other 5.00 ms" in text


def test_a_chain_that_lies_elsewhere_in_part_is_not_added_up() -> None:
    seen = [
        NodeTimes.between(node(BEFORE, 7), node(BEFORE + ADDED, 7), 0.1),
        NodeTimes.between(node(BEFORE, 8), node(BEFORE, 8), 0.1),
    ]
    assert not any("in all, one every" in note for note in profile.notes_of(seen))


async def test_looking(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    looks: Iterator[list[NodeMetrics]] = iter(())

    async def find() -> list[LocalNode]:
        return [LocalNode(Path(), one) for one in next(looks)]

    monkeypatch.setattr(control_socket, "find", find)
    looks = iter([[]])
    with pytest.raises(UsageError, match="no node runs on this machine"):
        await profile.show(0.01, asyncio.Event(), as_json=False)
    looks = iter([[node(BEFORE)], [node(BEFORE)]])
    with pytest.raises(UsageError, match="none of the 1 nodes here ran a step"):
        await profile.show(0.01, asyncio.Event(), as_json=False)
    looks = iter([[node(BEFORE)], [node(BEFORE + ADDED), node(ADDED, 9)]])
    await profile.show(0.01, asyncio.Event(), as_json=True)
    (shown,) = json.loads(capsys.readouterr().out)["nodes"]
    assert (shown["steps"], shown["kernels_ms"]) == (4, 5.0)
