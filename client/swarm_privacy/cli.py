"""`swarm-privacy`: the command line. Owns the flags and the table that is printed."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from swarm.command_line import program
from swarm.errors import SwarmError, UsageError

app = typer.Typer(no_args_is_help=True, help="What hidden states give away of a text.", **program.SETTINGS)


app.callback()(program.options_of_all)


@app.command()
def measure(
    text: Annotated[list[Path], typer.Option(help="A text that is attacked, which nobody trained on; repeatable.")],
    train: Annotated[list[Path], typer.Option(help="Another text, which the attacker trains on; repeatable.")],
    model: Annotated[str, typer.Option(help="A Hugging Face folder or id, a .gguf file, or a built-in name.")] = (
        "smollm2-135m"
    ),
    depth: Annotated[
        list[int] | None, typer.Option(help="After so many layers; repeatable. Default: 0, 1, 2, 4 ...")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the texts that are attacked.")] = 2048,
    searched: Annotated[int, typer.Option(help="... by forward search, which takes a while for each.")] = 128,
    dtype: Annotated[str, typer.Option(help="Of the weights, as the nodes serve them.")] = "bf16",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a depth.")] = False,
) -> None:
    """Attack our own hidden states, and print the share of tokens that is recovered after so many layers."""
    try:
        _measure(text, train, model, depth, tokens, searched, dtype, as_json)
    except SwarmError as error:
        sys.stderr.write(f"swarm-privacy: {error}\n")
        raise typer.Exit(error.exit_code) from None


def _measure(
    text: list[Path],
    train: list[Path],
    model: str,
    depth: list[int] | None,
    tokens: int,
    searched: int,
    dtype: str,
    as_json: bool,
) -> None:
    from swarm.types import LayerSpan
    from swarm_kernels.device.device import parse_dtype
    from swarm_kernels.models.open import open_model
    from swarm_kernels.runtime.load import load_span
    from swarm_kernels.tokenizer.tokenizer import load_tokenizer
    from swarm_privacy.measure import DEPTHS, Leak
    from swarm_privacy.measure import measure as run

    if {path.resolve() for path in text} & {path.resolve() for path in train}:
        raise UsageError("a text is both attacked and trained on; the result would say nothing")
    with closing(open_model(model)) as source:
        num_layers = source.config.num_layers
        depths = depth or [*(at for at in DEPTHS if at < num_layers), num_layers]
        if any(not 0 <= at <= num_layers for at in depths):
            raise UsageError(f"the model has {num_layers} layers; --depth is from 0 to that")
        tokenizer = load_tokenizer(source)
        span = load_span(source, LayerSpan(0, num_layers), parse_dtype(dtype))
    known, attacked = ([token for path in paths for token in tokenizer.encode(_read(path))] for paths in (train, text))

    def show(leak: Leak) -> None:
        if as_json:
            sys.stdout.write(json.dumps(asdict(leak)) + "\n")
        else:
            shares = (leak.nearest, leak.linear, leak.transformer, leak.search)
            sys.stdout.write(f"{leak.depth:6d}  " + "  ".join(f"{share:>17.1%}" for share in shares) + "\n")
        sys.stdout.flush()

    if not as_json:
        sys.stdout.write(
            f"{len(known)} tokens to train on, {min(tokens, len(attacked))} attacked, of which {searched} by search\n"
        )
        sys.stdout.write("layers  nearest embedding     learned linear  small transformer     forward search\n")
    run(span, known, attacked[:tokens], depths, searched, report=show)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None


def main() -> None:
    with program.packages_of_nodes("swarm-privacy"):
        app()


if __name__ == "__main__":
    main()
