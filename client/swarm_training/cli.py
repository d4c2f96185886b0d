"""`swarm-draft`: train a small draft, or Medusa heads for the tail, of a model, and evaluate them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from swarm.command_line import program
from swarm.errors import SwarmError, UsageError

if TYPE_CHECKING:  # torch takes seconds, which --help need not wait for
    from swarm_training.distill.recipes import Recipe

app = typer.Typer(
    no_args_is_help=True,
    help="Train a drafter for speculative decoding of a model, and evaluate it.",
    **program.SETTINGS,
)
app.callback()(program.options_of_all)

_MODEL = typer.Option(help="A Hugging Face folder or id, a .gguf file, or a built-in name.")


class Kind(StrEnum):
    DRAFT = "draft"
    EAGLE = "eagle3"
    HEADS = "heads"


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="Output file, a few MB; rewritten every few minutes.")],
    minutes: Annotated[float, typer.Option(help="Total time, for writing chats and training.")],
    model: Annotated[str, _MODEL] = "smollm2-135m",
    work: Annotated[
        Path | None,
        typer.Option(help="Folder of chats and checkpoint; a run resumes from there. By default beside --out."),
    ] = None,
    kind: Annotated[
        Kind,
        typer.Option(
            help="A draft of tokens alone or of hidden states too (eagle3), which clients run, or Medusa heads, which "
            "the node of the last layers runs."
        ),
    ] = Kind.DRAFT,
    heads: Annotated[int, typer.Option(help="Number of Medusa heads: tokens predicted ahead.")] = 4,
    base: Annotated[int, typer.Option(help="First layers of the model that the draft uses unchanged.")] = 0,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Layers of the model that the draft's own begin as; by default the first, of eagle3 the last."
        ),
    ] = None,
    taps: Annotated[
        str | None, typer.Option(help="Layers whose hidden states eagle3 reads, the last being the output.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of chats to write before training.")] = 300_000,
    writing: Annotated[float, typer.Option(help="Fraction of the time for writing chats.")] = 0.5,
    vocabulary: Annotated[
        int, typer.Option(help="Size of the draft vocabulary; a draft adds the tokens of its text.")
    ] = 8192,
    batch: Annotated[int, typer.Option(help="Chats written in one batch.")] = 48,
    threads: Annotated[int | None, typer.Option(help="CPU threads; by default all.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default a GPU if there is one.")] = None,
) -> None:
    """Let the model write chats with itself, distill a draft or Medusa heads from them, and save these to a file."""

    def run_command() -> None:
        from swarm_kernels.models.open import open_model
        from swarm_training.distill.run import TrainingPlan
        from swarm_training.distill.run import train as run

        recipe = _recipe(kind, heads, base, layers, taps)
        where = _device(device, threads)
        folder = work or out.with_suffix(".work")
        plan = TrainingPlan(minutes, out, folder, recipe, tokens, writing, vocabulary, batch=batch, device=where)
        with _ProgressBar() as bar:
            card = run(open_model(model), plan, bar.report)
        _print(json.dumps(card.evaluation))

    _exit_on_error(run_command)


def _recipe(kind: Kind, heads: int, base: int, layers: str | None, taps: str | None) -> Recipe:
    """Raises UsageError."""
    from swarm_training.distill.recipes import HeadsRecipe, LayersRecipe, TappedRecipe

    if kind is Kind.HEADS:
        return HeadsRecipe(heads)
    if kind is Kind.DRAFT:
        return LayersRecipe(base, _layer_list(layers or "0"))
    return TappedRecipe(_layer_list(taps) if taps else (), _layer_list(layers) if layers else ())


def _device(device: str | None, threads: int | None) -> str:
    """Which one, having set the threads of its processor."""
    import torch

    from swarm_kernels.ops import dispatch

    if threads is not None:
        dispatch.set_threads(threads)
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


@app.command("eval")
def evaluate(
    draft: Annotated[Path | None, typer.Option(help="The draft's file; by default the bundled one.")] = None,
    heads: Annotated[Path | None, typer.Option(help="A file of Medusa heads, instead of a draft or with it.")] = None,
    model: Annotated[str, _MODEL] = "smollm2-135m",
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 96,
    depths: Annotated[int, typer.Option(help="Levels below the committed text.")] = 4,
    nodes: Annotated[int, typer.Option(help="Tree nodes per step.")] = 16,
    threads: Annotated[int | None, typer.Option(help="CPU threads; by default all.")] = None,
) -> None:
    """N-gram drafter, draft or heads, and mixtures on held-out prompts: top-1, 4 and 8 by depth, tokens per step
    by kind of prompt. One JSON object."""

    def run_command() -> None:
        from swarm_kernels.models.open import open_model
        from swarm_kernels.ops import dispatch
        from swarm_training.evaluation.evaluate import evaluate

        if threads is not None:
            dispatch.set_threads(threads)
        with _ProgressBar() as bar:
            figures = evaluate(open_model(model), draft, heads, tokens, depths, nodes, bar.report)
        _print(json.dumps(figures))

    _exit_on_error(run_command)


class _ProgressBar:
    """A progress bar on stderr; one plain line every few percent if it is not a terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description:>9}"), BarColumn(), TextColumn("{task.fields[note]}"))
        self._progress = Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal)
        self._plain = not console.is_terminal
        self._tasks: dict[str, TaskID] = {}
        self._last_printed: tuple[str, int] = ("", -1)

    def __enter__(self) -> _ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def report(self, phase: str, fraction: float, note: str) -> None:
        if phase not in self._tasks:
            self._tasks[phase] = self._progress.add_task(phase, total=1.0, note=note)
        self._progress.update(self._tasks[phase], completed=fraction, note=note)
        step = (phase, int(fraction * 50))
        if self._plain and step != self._last_printed:
            self._last_printed = step
            print(f"{phase} {fraction:.0%} {note}", file=sys.stderr, flush=True)  # noqa: T201


def _layer_list(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"'{text}' is not a list of layers; write --layers 0,29") from None


def _exit_on_error(work: Callable[[], None]) -> None:
    """Report a SwarmError as one line on stderr and its exit code."""
    try:
        work()
    except SwarmError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def main() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    app()


if __name__ == "__main__":
    main()
