"""`swarm-draft`: train a small draft, or heads for the tail, of a model, and measure them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from swarm.errors import SwarmError, UsageError

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Train what guesses ahead for a model, and measure it."
)

_MODEL = typer.Option(help="A Hugging Face folder or id, a .gguf file, or a built-in name.")


class Kind(StrEnum):
    DRAFT = "draft"
    HEADS = "heads"


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="Where it goes, a few MB; it is renewed every few minutes.")],
    minutes: Annotated[float, typer.Option(help="How long to write and learn, in all.")],
    model: Annotated[str, _MODEL] = "smollm2-135m",
    work: Annotated[
        Path | None, typer.Option(help="Chats and checkpoint; a run goes on from there. By default beside --out.")
    ] = None,
    kind: Annotated[
        Kind, typer.Option(help="A draft, which clients run, or Medusa heads, which the node of the last layers runs.")
    ] = Kind.DRAFT,
    heads: Annotated[int, typer.Option(help="Heads, if it is to be heads: tokens they guess ahead.")] = 4,
    base: Annotated[int, typer.Option(help="First layers of the model that the draft uses as they are.")] = 0,
    layers: Annotated[str, typer.Option(help="Layers of the model that the draft's own start as.")] = "0",
    tokens: Annotated[int, typer.Option(help="Tokens of chats to write before learning.")] = 300_000,
    writing: Annotated[float, typer.Option(help="Part of the time that writing may take.")] = 0.5,
    vocabulary: Annotated[int, typer.Option(help="Tokens it can say; a draft those of the text, too.")] = 8192,
    batch: Annotated[int, typer.Option(help="Chats written side by side.")] = 48,
    threads: Annotated[int | None, typer.Option(help="CPU threads; by default all.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Let the model write chats with itself, teach a draft or heads what it says, and keep them in a file."""

    def work_on() -> None:
        from swarm_kernels.models.open import open_model
        from swarm_kernels.ops import dispatch
        from swarm_training.distill.recipes import HeadsRecipe, LayersRecipe
        from swarm_training.distill.run import TrainingPlan
        from swarm_training.distill.run import train as run

        if threads is not None:
            dispatch.set_threads(threads)
        plan = TrainingPlan(
            minutes,
            out,
            work or out.with_suffix(".work"),
            HeadsRecipe(heads) if kind is Kind.HEADS else LayersRecipe(base, _layer_list(layers)),
            tokens,
            writing,
            vocabulary,
            batch,
            device,
        )
        with _Bar() as bar:
            card = run(open_model(model), plan, bar.report)
        _say(json.dumps(card.evaluation))

    _guarded(work_on)


@app.command("eval")
def evaluate(
    draft: Annotated[
        Path | None, typer.Option(help="The draft's file; by default the one that came with swarm.")
    ] = None,
    heads: Annotated[Path | None, typer.Option(help="A file of Medusa heads, instead of a draft or beside it.")] = None,
    model: Annotated[str, _MODEL] = "smollm2-135m",
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 96,
    depths: Annotated[int, typer.Option(help="Levels below the certain text.")] = 4,
    nodes: Annotated[int, typer.Option(help="Tree nodes a round.")] = 16,
    threads: Annotated[int | None, typer.Option(help="CPU threads; by default all.")] = None,
) -> None:
    """Look-up, draft or heads, and both together on prompts nobody trained on: top-1, 4 and 8 by depth, tokens a round
    by kind of prompt. One JSON object."""

    def work_on() -> None:
        from swarm_kernels.models.open import open_model
        from swarm_kernels.ops import dispatch
        from swarm_training.evaluation.evaluate import evaluate

        if threads is not None:
            dispatch.set_threads(threads)
        with _Bar() as bar:
            figures = evaluate(open_model(model), draft, heads, tokens, depths, nodes, bar.report)
        _say(json.dumps(figures))

    _guarded(work_on)


class _Bar:
    """A progress bar on stderr; one plain line every few percent where that is no terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description:>9}"), BarColumn(), TextColumn("{task.fields[note]}"))
        self._progress = Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal)
        self._plain = not console.is_terminal
        self._tasks: dict[str, TaskID] = {}
        self._said: tuple[str, int] = ("", -1)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def report(self, phase: str, share: float, note: str) -> None:
        if phase not in self._tasks:
            self._tasks[phase] = self._progress.add_task(phase, total=1.0, note=note)
        self._progress.update(self._tasks[phase], completed=share, note=note)
        step = (phase, int(share * 50))
        if self._plain and step != self._said:
            self._said = step
            print(f"{phase} {share:.0%} {note}", file=sys.stderr, flush=True)  # noqa: T201


def _layer_list(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"'{text}' is not a list of layers; write --layers 0,29") from None


def _guarded(work: Callable[[], None]) -> None:
    """Every mistake is one sentence on stderr and exit code 2."""
    try:
        work()
    except SwarmError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def main() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    app()


if __name__ == "__main__":
    main()
