"""Deprecated aliases of flags, settings and values: accepted for one release, hidden from help.

Owns the old spellings only; the settings are in `swarm.config`. Names are written as flags without dashes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand

NAMES = {
    "carrier": "transport",
    "transport": "transport",  # its old values say which libp2p, see VALUES
    "via": "relay-via",
    "relays": "relay-via",
    "relay": "relay-server",
    "heads": "medusa-heads",
    "share": "model-fraction",
    "wait": "join-timeout",
    "wait-s": "join-timeout",
    "schedule": "active-hours",
    "max-upload": "upload-limit",
    "draft": "drafter",
    "drafter": "drafter",
    "strategy": "decoding",
    "decoding": "decoding",
    "point-strategy": "point-decoding",
    "point-decoding": "point-decoding",
    "once": "prompt",
    # [limits]
    "silence-s": "ping-timeout-s",
    "stall-s": "stall-timeout-s",
    "edge-timeout-s": "next-hop-dial-timeout-s",
    "log-bytes": "activation-log-bytes",
    "record-lifetime-s": "record-ttl-s",
}
VALUES = {
    ("carrier", "daemon"): ("transport", "libp2p"),
    ("transport", "daemon"): ("libp2p", "go"),
    ("transport", "py"): ("libp2p", "python"),
    ("decoding", "pipelined"): ("decoding", "pipedec"),
    ("decoding", "hybrid"): ("decoding", "pipelined-tree"),
    ("point-decoding", "pipelined"): ("point-decoding", "pipedec"),
    ("point-decoding", "hybrid"): ("point-decoding", "pipelined-tree"),
    ("drafter", "heads"): ("drafter", "medusa"),
    ("drafter", "shipped"): ("drafter", "bundled"),
}
SWITCHES = ("relay",)  # flags without a value


def is_old(name: str) -> bool:
    return NAMES.get(name, name) != name


def current(name: str, value: Any) -> tuple[str, Any]:
    """(name, value) of a setting in the current spelling; those that are not deprecated unchanged."""
    for spelled in (name, NAMES.get(name)):
        if isinstance(value, str) and (spelled, value) in VALUES:
            return VALUES[str(spelled), value]
    return NAMES.get(name, name), f"1/{value}" if name == "share" else value


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
