"""`swarm-draft` on the command line: every mistake is one sentence and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarm_kernels.draft.card import DraftMetadata
from swarm_kernels.models import open
from swarm_training.cli import app
from swarm_training.distill import run
from swarm_training.distill.recipes import HeadsRecipe, LayersRecipe, Recipe
from swarm_training.distill.run import TrainingPlan


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


@pytest.mark.parametrize(
    ("options", "recipe"),
    [
        ([], LayersRecipe(0, (0,))),
        (["--base", "2", "--layers", "3,5"], LayersRecipe(2, (3, 5))),
        (["--kind", "heads"], HeadsRecipe(4)),
        (["--kind", "heads", "--heads", "3"], HeadsRecipe(3)),
    ],
)
def test_kinds_share_everything_but_their_shape(
    options: list[str], recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[TrainingPlan] = []

    def train(source: object, plan: TrainingPlan, report: object) -> DraftMetadata:
        plans.append(plan)
        return DraftMetadata("tiny", "a" * 32, 0, 1, evaluation={"held_out_places": 7})

    monkeypatch.setattr(run, "train", train)
    monkeypatch.setattr(open, "open_model", lambda name: None)
    out = tmp_path / "made"
    result = CliRunner().invoke(app, ["train", "--out", str(out), "--minutes", "2", *options])
    assert result.exit_code == 0, result.stderr
    assert result.stdout == '{"held_out_places": 7}\n'
    assert plans == [TrainingPlan(2.0, out, tmp_path / "made.work", recipe)]
