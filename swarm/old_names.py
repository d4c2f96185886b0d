"""Deprecated aliases of flags, settings and values: accepted for one release, hidden from help.

Owns the old spellings only; the settings are in `swarm.config`. Names are written as flags without dashes.
"""

from __future__ import annotations

from typing import Any

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
