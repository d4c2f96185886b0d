"""`swarm-draft` on the command line: every mistake is one sentence and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarm_client.draft_cli import app


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "--out", "OUT", "--minutes", "1", "--model", "/no/such/model.gguf"], "/no/such/model.gguf"),
        (["train", "--out", "OUT", "--minutes", "1", "--layers", "first"], "'first' is not a list of layers"),
        (["eval", "--model", "/no/such/model.gguf"], "/no/such/model.gguf"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    arguments = [str(tmp_path / "d.draft") if a == "OUT" else a for a in arguments]
    result = CliRunner().invoke(app, arguments, env={"SWARM_HOME": str(tmp_path)})
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_help_names_both_commands() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "train" in result.stdout
    assert "eval" in result.stdout
