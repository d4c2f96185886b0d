"""`swarm-node models`: which models are on the disk, what one needs, and freeing what it takes.

Owns flags and format. The figures are `membership.model_inventory`'s.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarm.errors import UsageError
from swarm_node.commands.runner import exit_on_error

if TYPE_CHECKING:
    from swarm_node.membership.model_inventory import CachedModel, ModelNeeds

_REMOVE = "rm"

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[MODEL | rm MODEL]", help="What this model needs; rm: delete what was fetched of it."),
]
MaxMemory = Annotated[
    str | None, typer.Option(metavar="BYTES", help="Memory to fit it into, as in 6GB. [most of what is free]")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")]


def add_to(app: typer.Typer) -> None:
    app.command()(models)


def models(words: Words = None, max_memory: MaxMemory = None, as_json: Json = False) -> None:
    """List the models on this machine's disk; show what a model needs and what of it fits here; free a model's disk."""
    with exit_on_error(as_json):
        given = words or []
        if len(given) > 2 or (len(given) == 2 and given[0] != _REMOVE) or given == [_REMOVE]:
            raise UsageError("give nothing, a model, or rm and a model")
        from swarm.config import parse_bytes
        from swarm_node.membership import model_inventory as inventory  # torch: seconds

        if len(given) == 2:
            freed = inventory.remove(given[1])
            _print({"removed": given[1], "bytes": freed}, [f"{given[1]} is deleted, {_size(freed)} freed"], as_json)
        elif given:
            found = inventory.needs(given[0], parse_bytes(max_memory) if max_memory else None)
            _print(found, _needs_text(found), as_json)
        else:
            listed = inventory.cached_models()
            _print({"models": listed}, _list_text(listed), as_json)


def _print(content: Any, text: Sequence[Any], as_json: bool) -> None:
    if as_json:
        import msgspec

        sys.stdout.write(msgspec.json.encode(content).decode() + "\n")
        return
    from rich.console import Console

    width = None if sys.stdout.isatty() else 140  # a pipe has no width
    Console(highlight=False, width=width).print(*text, sep="\n", markup=False)


def _list_text(models: Sequence[CachedModel]) -> list[Any]:
    from rich.table import Table

    if not models:
        return ["No models have been fetched."]
    table = Table("model", "size", "layers", "folder")
    for model in models:
        held = _ranges(model.layers) if model.layers else "none whole"
        layers = f"{held} of {model.num_layers}" if model.num_layers else "-"
        table.add_row(model.name, _size(model.nbytes), layers, model.folder)
    return [table, f"{_size(sum(model.nbytes for model in models))} in all"]


def _needs_text(found: ModelNeeds) -> list[Any]:
    from rich.table import Table

    title = f"{found.name}, {found.num_layers} layers, {_size(found.stored_bytes)} of weights"
    table = Table("dtype", "a layer", "embedding", "head", "whole", "fits here", "to fetch", title=title)
    table.title_justify = "left"
    for entry in found.dtypes:
        fits = "whole" if entry.fits == found.num_layers else f"{entry.fits} layers"
        sizes = (_size(size) for size in (entry.layer, entry.embedding, entry.head, entry.whole))
        table.add_row(entry.dtype, *sizes, fits, _size(entry.fetch_bytes) if entry.fits else "-")
    here = f"layers {_ranges(found.layers_here)}" if found.layers_here else "no whole layer"
    lines = [f"On this disk: {here}; {_size(found.missing_bytes)} are missing, {_size(found.free_disk)} are free."]
    lines.append(f"Fits: into {_size(found.budget)} of memory, with keys and values of open sessions.")
    return [table, *lines]


def _ranges(ranges: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{start}:{end}" for start, end in ranges)


def _size(count: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"
