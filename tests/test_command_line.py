"""What all programs have in common: a version, and -h."""

from __future__ import annotations

import importlib

import pytest
from typer.testing import CliRunner

from swarm import __version__

PROGRAMS = {
    "swarm-node": "swarm_node.commands.cli",
    "swarm-chat": "swarm_client.cli.chat",
    "swarm-gateway": "swarm_gateway.server.cli",
    "swarm-plan": "swarm.planner.cli.main",
    "swarm-draft": "swarm_training.cli",
    "swarm-privacy": "swarm_privacy.cli",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_says_its_version_and_helps(name: str) -> None:
    app = importlib.import_module(PROGRAMS[name]).app
    said = CliRunner().invoke(app, ["--version"], prog_name=name)
    assert (said.exit_code, said.output) == (0, f"{name} {__version__}\n")
    for flag in ("-h", "--help"):
        helped = CliRunner().invoke(app, [flag], prog_name=name)
        assert helped.exit_code == 0
        assert "--version" in helped.output
