"""What a person and a program see while weights come from a hub."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from swarm_node.owner.event_log import FETCHING_EVENT_S, HumanEventReporter, JsonEventReporter


def test_json_lines_are_few_and_end_with_all() -> None:
    now = 0.0
    stream = io.StringIO()
    reporter = JsonEventReporter(0.0, stream, clock=lambda: now)
    for step in range(1001):
        now = step * FETCHING_EVENT_S / 100
        reporter.fetching(step * 10**7, 10**10)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert 10 <= len(lines) <= 12
    assert all(line["event"] == "fetching" for line in lines)
    assert (lines[-1]["bytes"], lines[-1]["total"]) == (10**10, 10**10)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_is_for_terminals(terminal: bool) -> None:
    stream = io.StringIO()
    with HumanEventReporter(stream) as reporter:
        reporter._console = Console(file=stream, force_terminal=terminal, width=120)
        reporter.fetching(5 * 10**8, 10**9)
        reporter.fetching(10**9, 10**9)
        reporter.loading(0.5)
        reporter.loading(1.0)
    text = stream.getvalue()
    assert ("fetching weights" in text) == terminal
    assert ("loading weights" in text) == terminal
    assert ("1.0" in text or "0.5" in text) == terminal
