"""One frozen config for each program, and the only place that reads the environment.

Precedence: command line, then `SWARM_*` environment variables, then the TOML file named by `--config`, then the
defaults written here. Command-line defaults are read from these classes, so a default has one home.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from platformdirs import PlatformDirs

from swarm.errors import UsageError

DEFAULT_MODEL = "smollm2-135m"
Carriers = Literal["auto", "daemon"]
"""What carries frames: direct connections where they work and the p2p daemon elsewhere, or the daemon alone."""
Transports = Literal["daemon", "py"]
"""Who speaks libp2p for us: hivemind's p2p daemon, a Go program, or py-libp2p in a thread."""
_dirs = PlatformDirs("swarm", appauthor=False)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that keep one stranger from costing the others; seconds, bytes and counts."""

    dial_timeout_s: float = 10.0
    edge_timeout_s: float = 3.0  # for a hop to reach the next one; then the client relays for this session
    open_timeout_s: float = 15.0
    route_timeout_s: float = 5.0  # how long a client waits for layers nobody serves
    repair_timeout_s: float = 30.0  # ... when they went away in the middle of an answer
    silence_s: float = 1.0  # a peer that lets a ping wait for so long is lost
    stall_s: float = 6.0  # steps that stand still for so long at peers that live: one of them no longer works
    step_timeout_s: float = 60.0
    drain_timeout_s: float = 20.0
    handover_timeout_s: float = 20.0  # that a leaving node serves on until others have taken its layers over
    session_idle_s: float = 300.0  # a session that sends no step for so long gives its pages back
    max_sessions: int = 64
    max_sessions_per_peer: int = 16
    max_connections: int = 256
    max_protocol_errors: int = 8  # from one peer, before its connections are cut
    batch_tokens: int = 512  # rows of one packed batch
    log_bytes: int = 256 << 20  # outputs kept for replay, of all sessions of a node together
    record_lifetime_s: float = 12.0  # how long a record outlives its last refresh
    publish_interval_s: float = 1.5


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """`swarm-node join`."""

    model: str = DEFAULT_MODEL
    peers: tuple[str, ...] = ()
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)  # strangers must reach a volunteer: any port, all networks
    gpu: int | None = None  # None: the CPU
    layers: str | None = None  # "START:END"; None: the node decides
    max_memory: int | None = None  # bytes; None: most of what is free
    dtype: str = "bf16"
    heads: Path | None = None  # Medusa heads for the model, run where its last layers are
    name: str = ""
    region: str = ""
    identity: Path | None = None  # None: a fresh identity that is forgotten at exit
    wait_s: float = 0.0  # keep trying for so long to reach `peers`
    share: int = 1  # take at most one `share`-th of the model, for several nodes on one machine
    threads: int | None = None  # None: chosen by measurement
    json: bool = False
    carrier: Carriers = "auto"
    transport: Transports = "daemon"
    direct_port: int = 0  # for direct connections; 0: any
    relay: bool = False  # carry connections for peers that nobody can dial
    relays: tuple[str, ...] = ()  # to be reached through, when nobody can dial this machine
    secret: str = field(default="", repr=False)  # of a private swarm; "": an open one
    network: str = ""  # what people call the swarm; swarms of one name, model and secret find each other nearby
    discovery: bool = True  # look for the swarm in the local network, and be found there
    max_sessions: int | None = None  # None: `limits.max_sessions`
    max_upload: int | None = None  # bytes a second; None: no cap
    schedule: str = ""  # local time in which to serve, as in "22:00-08:00"; "": always
    pause_when_busy: bool = False  # take no sessions while others use the machine
    log_format: Literal["text", "json"] = "text"
    metrics_port: int | None = None  # for Prometheus; None: no metrics
    metrics_host: str = "127.0.0.1"
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """`SwarmClient` and `swarm-chat`."""

    model: str = DEFAULT_MODEL
    peers: tuple[str, ...] = ()
    dtype: str | None = None  # None: whichever the swarm serves
    strategy: str = "auto"
    outline_in_auto: bool = False  # may `auto` answer by an outline? It changes the words, not only their speed
    outline_templates: Path | None = None  # a TOML file of one's own, see docs/outline.md
    # Who guesses beside the look-up: what comes along, a .draft file or a model; "heads": the tail's; "ngram": nobody
    draft: str = "shipped"
    prefill_chunk: int | None = None  # tokens of a prompt in one step; None: planned from the chain's costs
    prefill_window: int = 16  # how many of those steps may be on their way at once; 1: each waits for the one before
    carrier: Carriers = "auto"
    transport: Transports = "daemon"
    secret: str = field(default="", repr=False)  # of a private swarm; "": an open one
    network: str = ""  # as a node's
    discovery: bool = True  # without `peers`, look for the swarm in the local network
    limits: Limits = field(default_factory=Limits)


def data_dir() -> Path:
    """Where models are kept: `SWARM_HOME`, or the user's data directory."""
    home = os.environ.get("SWARM_HOME")
    return Path(home) if home else _dirs.user_data_path


def state_dir() -> Path:
    """Where identities, calibrations and the address of the local swarm are kept."""
    home = os.environ.get("SWARM_HOME")
    return Path(home) / "state" if home else _dirs.user_state_path


def local_swarm_file() -> Path:
    """Where `swarm-node local` says, while it runs, how to reach it."""
    return state_dir() / "local.json"


def local_swarm() -> tuple[str, tuple[str, ...]]:
    """(model, peers) of the swarm that `swarm-node local` runs on this machine. Raises UsageError if none does."""
    try:
        told = json.loads(local_swarm_file().read_text(encoding="utf-8"))
        model, peers, pid = str(told["model"]), tuple(map(str, told["peers"])), int(told["pid"])
        os.kill(pid, 0)  # one that was killed could not take its file along
    except PermissionError:
        pass  # it runs under another user
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(
            "no swarm on this machine: give --peer MULTIADDR, or start one here with `swarm-node local --nodes 3`"
        ) from None
    return model, peers


_BYTES = ("max_memory", "max_upload")
_NUMBERS = (
    "gpu",
    "threads",
    "prefill_chunk",
    "prefill_window",
    "share",
    "wait_s",
    "direct_port",
    "max_sessions",
    "metrics_port",
)

_Config = TypeVar("_Config", NodeConfig, ClientConfig)


def load(cls: type[_Config], overrides: Mapping[str, Any], file: Path | None = None) -> _Config:
    """Merge `overrides` (those not None), the environment and a TOML file into a config. Raises UsageError."""
    known = {f.name: f for f in fields(cls)}
    merged: dict[str, Any] = {}
    if file is not None:
        merged.update(_read_toml(file, set(known)))
    for name in known:
        text = os.environ.get(f"SWARM_{name.upper()}")
        if text:
            merged[name] = _from_text(name, text)
    merged.update({k: v for k, v in overrides.items() if v is not None})
    if isinstance(merged.get("limits"), Mapping):
        merged["limits"] = _limits(merged["limits"])
    for name in ("peers", "listen", "relays"):
        if name in merged:
            value = merged[name]
            merged[name] = (value,) if isinstance(value, str) else value
    for name in _BYTES:
        if isinstance(merged.get(name), str):
            merged[name] = parse_bytes(merged[name])
    try:
        return msgspec.convert(merged, cls, dec_hook=_to_path)
    except msgspec.ValidationError as error:
        raise UsageError(f"a setting has the wrong type: {error}") from None


def parse_bytes(text: str) -> int:
    """`"6GB"`, `"512 MiB"` or `"1000000"` -> bytes. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if match is None or (match[3] and not match[2]):
        raise UsageError(f"'{text}' is not an amount of memory; write it as in 6GB, 512MiB or 1000000")
    size = float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " ")
    if size < 1:
        raise UsageError(f"'{text}' is no memory at all")
    return int(size)


def _to_path(kind: type[Any], value: Any) -> Any:
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    raise msgspec.ValidationError(f"{value!r} is not a {kind.__name__}")


def _read_toml(file: Path, known: set[str]) -> dict[str, Any]:
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the config file {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the config file {file} is not TOML: {error}") from None
    unknown = sorted(set(table) - known)
    if unknown:
        raise UsageError(f"the config file {file} sets '{unknown[0]}', which is not one of {', '.join(sorted(known))}")
    return table


def _limits(table: Mapping[str, Any]) -> Limits:
    known = {f.name for f in fields(Limits)}
    unknown = sorted(set(table) - known)
    if unknown:
        raise UsageError(f"[limits] sets '{unknown[0]}', which is not one of {', '.join(sorted(known))}")
    return Limits(**table)


def _from_text(name: str, text: str) -> Any:
    if name in ("peers", "listen", "relays"):
        return tuple(part for part in text.replace(",", " ").split() if part)
    if name in _BYTES:
        return parse_bytes(text)
    if name in _NUMBERS:
        try:
            return float(text) if name == "wait_s" else int(text)
        except ValueError:
            raise UsageError(f"SWARM_{name.upper()} is '{text}', which is not a number") from None
    if name in ("json", "pause_when_busy", "relay", "outline_in_auto", "discovery"):
        return text.lower() in ("1", "true", "yes")
    return text
