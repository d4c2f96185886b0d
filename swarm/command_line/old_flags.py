"""Deprecated flags on a command line, by the names in `swarm.old_names`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand

from swarm.old_names import NAMES, SWITCHES, current


def arguments(given: Iterable[str]) -> list[str]:
    """A command line in the current spelling."""
    words: list[str] = []
    left = iter(given)
    for word in left:
        if word == "--":
            return [*words, word, *left]
        flag, joined, value = word.partition("=")
        name = flag.removeprefix("--")
        if name == flag or name not in NAMES:
            words.append(word)
        elif name in SWITCHES:
            words.append(f"--{NAMES[name]}{joined}{value}")
        elif joined or (value := next(left, "")):
            name, value = current(name, value)
            words += [f"--{name}", value]
        else:
            words.append(f"--{NAMES[name]}")
    return words


class CommandWithOldNames(TyperCommand):
    """A command that also accepts the deprecated flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, arguments(args))
