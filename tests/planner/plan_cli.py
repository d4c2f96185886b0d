"""`swarm-plan` in this process, and the examples of its documentation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from swarm.planner.cli.commands import COMMANDS
from swarm.planner.cli.main import app

DOCS = Path(__file__).resolve().parents[2] / "docs" / "guide" / "planner.md"


def documented() -> list[tuple[str, Any, Any]]:
    """(command, request, result) of every example in docs/guide/planner.md."""
    found = []
    for section in re.split(r"^## ", DOCS.read_text(encoding="utf-8"), flags=re.M)[1:]:
        command = section.split("\n", 1)[0].strip()
        blocks = re.findall(r"```json\n(.*?)```", section, flags=re.S)
        found += [(command, json.loads(a), json.loads(b)) for a, b in zip(blocks[::2], blocks[1::2], strict=True)]
    return found


EXAMPLES = documented()
COMMAND = {command.name: command for command in COMMANDS}
RUNNER = CliRunner()


def plan(command: str, request: Any, *flags: str) -> tuple[int, dict[str, Any]]:
    text = request if isinstance(request, str | bytes) else json.dumps(request)
    result = RUNNER.invoke(app, [command, "-", *flags], input=text)
    return result.exit_code, json.loads(result.stdout)
