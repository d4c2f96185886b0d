"""How every program is set up: its version, and the flags for help."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from swarm import __version__

SETTINGS: dict[str, Any] = {
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
"""Arguments of each program's `typer.Typer`; commands inherit the names of the help flag."""


def _print_version(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        typer.echo(f"{ctx.find_root().info_name} {__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
]
"""A parameter of a program with one command, or of the callback of one with several (`options_of_all`)."""


def options_of_all(version: Version = False) -> None:
    """Register with `app.callback()` in a program of several commands."""
