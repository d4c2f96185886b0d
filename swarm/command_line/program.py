"""How every program is set up: its version, the flags for help, and what is said where packages are missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from swarm import __version__
from swarm.extras import NODE_PACKAGES, needs

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


@contextmanager
def packages_of_nodes(name: str) -> Iterator[None]:
    """In a program that cannot do without them: one sentence if one is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in NODE_PACKAGES:
            raise
        missing = needs(package, "it")
        sys.stderr.write(f"{name}: {missing}\n")
        raise SystemExit(missing.exit_code) from None
