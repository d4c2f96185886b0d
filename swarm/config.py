"""One frozen config for each program, and the only place that reads the environment.

Precedence: command line, then `SWARM_*` environment variables, then the TOML file given by `--config`, then the
defaults here. Command-line defaults are read from these classes, so a default is defined once. Every setting has one
name: field, TOML key, `--flag` and `SWARM_FLAG`; a flag drops the unit `_s`, and a different flag is in the field's
metadata.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_origin, get_type_hints

import msgspec
from msgspec import Meta
from platformdirs import PlatformDirs

from swarm import old_names
from swarm.errors import UsageError

DEFAULT_MODEL = "smollm2-135m"
NodeTransports = Literal["auto", "libp2p"]
"""For nodes: direct TLS connections where they work and libp2p elsewhere, or libp2p alone."""
Transports = Literal["auto", "libp2p", "direct"]
"""For clients: direct TLS connections, with a libp2p host and the DHT once they are needed; libp2p alone; or direct
connections alone, as without hivemind or the libp2p address of a peer: records come from nodes then."""
Libp2pImpl = Literal["go", "python"]
"""The libp2p implementation: hivemind's p2p daemon, a Go program, or py-libp2p in a thread."""
Audits = Literal["auto", "wait", "off"]
"""Which answers other nodes compute again, see `ClientConfig.audits`."""
Apart = Literal["none", "block", "region", "both"]
"""By what neighbouring hops must differ, see `ClientConfig.apart`."""
Count = Annotated[int, Meta(ge=1, le=1 << 40)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Interval = Annotated[float, Meta(gt=0, le=1e9)]  # seconds, more than 0
Size = Annotated[int, Meta(ge=1, le=1 << 62)]  # bytes
_dirs = PlatformDirs("swarm", appauthor=False)


@dataclass(frozen=True, slots=True)
class Limits:
    """Timeouts and resource limits; many of them bound what an untrusted peer can use."""

    dial_timeout_s: Interval = 10.0
    next_hop_dial_timeout_s: Interval = 3.0  # for a hop to dial the next one; then the client relays
    open_timeout_s: Interval = 15.0
    route_timeout_s: Seconds = 5.0  # how long a client waits for layers that no node serves
    repair_timeout_s: Seconds = 30.0  # ... and for those lost during a generation
    ping_timeout_s: Interval = 1.0  # a peer that does not answer a ping for so long is lost
    stall_timeout_s: Interval = 6.0  # without progress, though all hops answer pings: one hangs
    step_timeout_s: Interval = 60.0
    drain_timeout_s: Seconds = 20.0
    handover_timeout_s: Seconds = 20.0  # how long a departing node waits for others to cover its layers
    session_idle_s: Interval = 300.0  # a session without a step for so long frees its KV blocks
    turn_timeout_s: Interval = 300.0  # how long a client's generation waits for others of the same client to end
    max_sessions: Count = 64
    max_sessions_per_peer: Count = 16
    max_connections: Count = 256
    max_protocol_errors: Count = 8  # from one peer, before its connections are closed
    batch_tokens: Count = 512  # rows of one packed batch
    activation_log_bytes: Size = 256 << 20  # outputs kept for replay, all sessions together
    record_ttl_s: Interval = 12.0  # how long a record outlives its last refresh
    publish_interval_s: Interval = 1.5


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """`swarm-node join`."""

    model: str = DEFAULT_MODEL
    peers: tuple[str, ...] = field(default=(), metadata={"flag": "peer"})
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)  # any port, all networks: others must reach it
    gpu: Annotated[int, Meta(ge=0)] | None = None  # None: the CPU
    layers: str | None = None  # "START:END"; None: automatic placement
    experts: str | None = None  # "START:END" of each of these layers, which others lead; None: all, or none with `lead`
    lead: bool = False  # lead these layers, with `experts` alone: other nodes hold the others
    max_memory: Size | None = None  # bytes; None: most of what is free
    dtype: str = "bf16"  # or "auto": the format of the model's files
    medusa_heads: Path | None = None  # Medusa heads, run by the tail
    drafter: str = ""  # an EAGLE-3 or DFlash folder, or "mtp": run by the tail for clients that ask for its drafts
    name: str = ""
    region: str = ""
    identity: Path | None = None  # None: a new one at every start
    join_timeout_s: Seconds = 0.0  # how long to retry reaching `peers`
    model_fraction: Fraction = Fraction(1)  # at most, and of the memory: several nodes on one machine
    threads: Count | None = None  # None: calibrated
    json: bool = False
    transport: NodeTransports = "auto"
    libp2p_impl: Libp2pImpl = field(default="go", metadata={"flag": "libp2p"})
    direct_port: Port = 0  # for direct connections; 0: any
    relay_server: bool = False  # relay connections of peers that cannot be dialed
    relay_via: tuple[str, ...] = ()  # relays to be reached through, if this machine cannot be dialed
    secret: str = field(default="", repr=False)  # of a private swarm; "": an open one
    network: str = ""  # the swarm's name; nodes of one name, model and secret find each other by mDNS
    discovery: bool = True  # mDNS: look for the swarm in the local network, and be found there
    max_sessions: Count | None = None  # None: `limits.max_sessions`
    owner: tuple[str, ...] = ()  # clients that are served first: their peer ids, or their identity files
    upload_limit: Size | None = None  # bytes a second; None: no cap
    active_hours: str = ""  # local time in which to serve, as in "22:00-08:00"; "": always
    pause_when_busy: bool = False  # accept no sessions while other programs use the machine
    log_format: Literal["text", "json"] = "text"
    metrics_port: Port | None = None  # for Prometheus; None: no metrics
    metrics_host: str = "127.0.0.1"
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """`SwarmClient` and `swarm-chat`."""

    model: str = DEFAULT_MODEL
    peers: tuple[str, ...] = field(default=(), metadata={"flag": "peer"})
    dtype: str | None = None  # None: the one that the swarm serves
    decoding: str = "auto"
    outline_in_auto: bool = False  # may `auto` use an outline? It changes the text, not only the speed
    outline_templates: Path | None = None  # a TOML file, see docs/guide/outline.md
    # Beside the n-gram drafter: "bundled" draft model, a .draft file, the folder of an EAGLE-3 or DFlash drafter, "mtp"
    # layer or a model; "medusa", "tail": what the tail holds; "auto": the best at hand; "ngram": none
    drafter: str = "bundled"
    prefill_chunk: Count | None = None  # tokens a step; None: planned from the chain's costs
    prefill_window: Count = 16  # prefill steps in flight, at most
    identity: Path | None = None  # None: a new one at every start
    transport: Transports = "auto"
    libp2p_impl: Libp2pImpl = field(default="go", metadata={"flag": "libp2p"})
    secret: str = field(default="", repr=False)  # of a private swarm; "": an open one
    network: str = ""  # as for a node
    discovery: bool = True  # without `peers`, look for the swarm in the local network
    remember_peers: bool = True  # keep what was seen of nodes in a small file, for the next time
    # Other nodes compute some answers again: "auto", in open swarms, in the background; "wait": every answer, and
    # `generate` and `chat` return it once it is confirmed, or was redone
    audits: Audits = "auto"
    # "FIRST:LAST": embedding, so many first and last layers, norm and head are computed by the client itself, so that
    # no token id leaves it; "auto": as many as cost little; "none": nodes do all (docs/privacy.md)
    local_layers: str = "none"
    # Peer ids of nodes that hold the ends of the model: they alone get token ids. (): anybody may
    trust: tuple[str, ...] = ()
    apart: Apart = "none"  # neighbouring parts of the model go to different address blocks, regions, or both
    known_first: bool = False  # nodes known for long come first in a chain
    vary_first: bool = False  # the first node changes between conversations
    limits: Limits = field(default_factory=Limits)


class SwarmEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A swarm of a gateway, `[[swarm]]` in its config file. `name`: of the model for callers; "": the model's own."""

    name: str = ""
    model: str = ""
    peers: tuple[str, ...] = ()
    invite: str = ""
    secret: str = ""
    network: str = ""


@dataclass(frozen=True, slots=True)
class GatewayConfig(ClientConfig):
    """`swarm-gateway`: how it is reached and what it accepts. The fields of ClientConfig hold for all of its swarms;
    without `swarms`, its peers are the one swarm.
    """

    host: str = "127.0.0.1"
    port: Port = 11435
    api_keys: tuple[str, ...] = field(default=(), repr=False, metadata={"flag": "api-key"})  # (): nobody needs one
    allow_origins: tuple[str, ...] = field(default=(), metadata={"flag": "allow-origin"})  # of pages of other hosts
    allow_hosts: tuple[str, ...] = field(default=(), metadata={"flag": "allow-host"})  # further names of this gateway
    # "swarm1...": an invitation
    swarms: tuple[SwarmEntry | str, ...] = field(default=(), repr=False, metadata={"flag": "swarm"})
    max_body: Size = 4 << 20
    max_running: Count = 16  # requests of one model at once; more wait. A node admits 16 sessions of a peer
    max_queued: Count = 256  # ... and more than these are refused
    queue_timeout_s: Interval = 60.0
    default_max_tokens: Count = 2048  # of an answer whose request names no limit
    max_tokens: Count = 32768  # of any answer
    json: bool = False


def data_dir() -> Path:
    """Where models are kept: `SWARM_HOME`, or the user's data directory."""
    home = os.environ.get("SWARM_HOME")
    return Path(home) if home else _dirs.user_data_path


def state_dir() -> Path:
    """Where identities, calibrations and the address of the local swarm are kept."""
    home = os.environ.get("SWARM_HOME")
    return Path(home) / "state" if home else _dirs.user_state_path


def peer_memory_dir() -> Path:
    """What this user's clients have seen of peers, one file a model."""
    return state_dir() / "peers"


def local_swarm_file() -> Path:
    """The addresses of `swarm-node local`, while it runs."""
    return state_dir() / "local.json"


def local_swarm() -> tuple[str, tuple[str, ...]]:
    """(model, peers) of the `swarm-node local` that runs on this machine. Raises UsageError if none does."""
    try:
        saved = msgspec.json.decode(local_swarm_file().read_bytes(), type=LocalSwarmFile)
        model, peers = saved.model, saved.peers
        os.kill(saved.pid, 0)  # does it still run? A killed process leaves its file behind
    except PermissionError:
        pass  # it runs under another user
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        raise UsageError(
            "no swarm on this machine: give --peer MULTIADDR, or start one here with `swarm-node local --nodes 3`"
        ) from None
    return model, peers


class LocalSwarmFile(msgspec.Struct, frozen=True):
    """What `swarm-node local` writes for the other programs of its user."""

    model: str
    peers: tuple[str, ...]
    pid: Annotated[int, Meta(ge=1, lt=1 << 31)]


_Config = TypeVar("_Config", bound=NodeConfig | ClientConfig | Limits)

_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "array": "a list"}
_BOOL_WORDS = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def load(cls: type[_Config], overrides: Mapping[str, Any], file: Path | None = None) -> _Config:
    """Merge `overrides` (fields by name, those not None), the environment and a TOML file into a config.

    Raises UsageError, which names the wrong flag, variable or key and the values allowed.
    """
    merged: dict[str, Any] = {}
    if file is not None:
        merged.update(_from_table(cls, _read_toml(file), f"the config file {file}"))
    merged.update(_from_environment(cls))
    flags = {name: flag for flag, name in _names(cls).items()}  # a field's last name is its flag
    for name, value in overrides.items():
        if value is not None:
            merged[name] = _convert(cls, name, value, f"--{flags[name]}")
    return cls(**merged)


def env_value(flag: str) -> str:
    """The value of `SWARM_<FLAG>`, for a flag that is not a setting; "" if it is not set."""
    return os.environ.get(f"SWARM_{flag.upper().replace('-', '_')}", "")


def env_flag(flag: str) -> bool:
    """`env_value` of a switch. Raises UsageError."""
    return bool(_convert(NodeConfig, "json", env_value(flag) or "false", f"SWARM_{flag.upper().replace('-', '_')}"))


def split_list(text: str) -> tuple[str, ...]:
    """The values of a list, separated by commas or, without any comma, by blanks."""
    return tuple(part.strip() for part in (text.split(",") if "," in text else text.split()) if part.strip())


def parse_bytes(text: str) -> int:
    """`"6GB"`, `"512 MiB"` or `"1000000"` -> bytes. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?)(i?)b?\s*", text.lower(), re.ASCII)
    if match is None or (match[3] and not match[2]):
        raise UsageError(f"'{text}' is not an amount of memory; write it as in 6GB, 512MiB or 1000000")
    size = float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(match[2] or " ")
    if size < 1:
        raise UsageError(f"'{text}' is no memory at all")
    return int(size)


def _names(cls: type[Any]) -> dict[str, str]:
    """Every spelling of a setting, as a flag without dashes -> its field."""
    names: dict[str, str] = {}
    for setting in fields(cls):
        flag = setting.metadata.get("flag", setting.name.removesuffix("_s").replace("_", "-"))
        names |= {setting.name.replace("_", "-"): setting.name}
        names.pop(flag, None)  # the last one is the flag's
        names[flag] = setting.name
    return names


def _types(cls: type[Any]) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _from_table(cls: type[Any], table: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    """(field, value) of what a file sets. Raises UsageError."""
    names = _names(cls)
    for key in sorted(table, key=lambda key: not old_names.is_old(key.replace("_", "-"))):  # current names override
        flag, value = old_names.current(key.replace("_", "-"), table[key])
        if flag not in names:
            known = ", ".join(sorted(setting.name for setting in fields(cls)))
            raise UsageError(f"{where} sets '{key}', which is not one of {known}")
        if names[flag] == "limits" and isinstance(value, Mapping):
            yield "limits", Limits(**dict(_from_table(Limits, value, f"[limits] in {where}")))
        else:
            yield names[flag], _convert(cls, names[flag], value, f"'{key}' in {where}")


def _from_environment(cls: type[Any]) -> Iterator[tuple[str, Any]]:
    """(field, value) of what `SWARM_*` variables set; unknown variables are ignored."""
    names = _names(cls)
    given = {key.removeprefix("SWARM_").lower().replace("_", "-"): key for key in os.environ if key[:6] == "SWARM_"}
    for spelled in sorted(given, key=lambda name: not old_names.is_old(name)):  # current names override
        flag, text = old_names.current(spelled, os.environ[given[spelled]])
        positive = flag.removeprefix("no-")
        if not text or names.get(positive, "limits") == "limits":
            continue
        name = names[positive]
        value = _convert(cls, name, text, given[spelled])
        if positive == flag:
            yield name, value
        elif _types(cls)[name] is bool:
            yield name, not value


def _convert(cls: type[Any], name: str, value: Any, origin: str) -> Any:
    """`value` as the field's type. Raises UsageError, which names `origin`: the flag, variable or key."""
    setting: Field[Any] = next(setting for setting in fields(cls) if setting.name == name)
    kind = _types(cls)[name]
    try:
        if isinstance(value, str):
            if kind is bool:
                value = _BOOL_WORDS.get(value.lower(), value)
            elif isinstance(setting.default, tuple):
                value = split_list(value)
            elif kind == Size | None or kind is Size:
                value = parse_bytes(value)
        return msgspec.convert(value, kind, strict=False, dec_hook=_convert_other_type)
    except msgspec.ValidationError as error:
        shown = f"is {_brief(value)}" if setting.repr else "is wrong"
        raise UsageError(f"{origin} {shown}; it must be {_expected(kind, str(error))}") from None
    except UsageError as error:
        raise UsageError(f"{origin}: {error}") from None


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _expected(kind: Any, complaint: str) -> str:
    """msgspec's "Expected `int | null`, got `str`" in plain words; `_convert_other_type`'s message unchanged."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(kind.__args__)}"
    match = re.match(r"Expected `(\w+)[^`]*`( [<>]=? \S+)?", complaint)
    if match is None:
        return complaint.partition(" - at ")[0]
    return _KINDS.get(match[1], f"a table of {match[1]}") + (match[2] or "").replace(".0", "")


def _convert_other_type(kind: type[Any], value: Any) -> Any:
    """msgspec's `dec_hook`, for Path and Fraction. Raises ValueError."""
    if isinstance(value, kind):
        return value
    if kind is Path and isinstance(value, str) and "\0" not in value:
        return Path(value)
    if kind is Fraction and re.fullmatch(r"\d{1,6}(/\d{1,6}|\.\d{1,9})?", str(value), re.ASCII):
        above, _, below = str(value).partition("/")
        if below.strip("0") or not below:
            fraction = Fraction(above) / Fraction(below or 1)
            if 0 < fraction <= 1:
                return fraction
    raise ValueError("the path of a file" if kind is Path else "a part of the model, as in 1/3 or 0.5, at most 1")


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the config file {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, too large a number, too deep
        raise UsageError(f"the config file {file} is not TOML: {error}") from None
