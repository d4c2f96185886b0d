"""The flags of `swarm-node join`, those it shares with other commands included, and what they set.

Owns their words and their types. What a setting is and where its default lives is `swarm.config`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from swarm.config import DEFAULT_MODEL, NodeConfig, load, parse_bytes
from swarm.errors import UsageError
from swarm_node.commands import network_cli

DEFAULTS = NodeConfig()

Model = Annotated[
    str | None, typer.Option(help=f"A folder, a .gguf file, a Hugging Face id or a built-in name. [{DEFAULT_MODEL}]")
]
Peers = Annotated[
    list[str] | None,
    typer.Option("--peer", metavar="MADDR", help="A node of the swarm to join; repeatable. None: begin a new swarm."),
]
Json = Annotated[bool, typer.Option("--json", help="JSON lines instead of sentences.")]
Dtype = Annotated[str | None, typer.Option(help=f"bf16, int8, int4, fp16 or fp32; a chain has one. [{DEFAULTS.dtype}]")]
MaxMemory = Annotated[
    str | None, typer.Option(metavar="BYTES", help="For weights, keys and values, as in 6GB. [most of what is free]")
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads to compute with. [measured]")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens to stderr.")]

Gpu = Annotated[int | None, typer.Option(min=0, metavar="N", help="Compute on GPU N.")]
Cpu = Annotated[bool, typer.Option("--cpu", help="Compute on the CPU, which is the default.")]
Listen = Annotated[
    list[str] | None,
    typer.Option(metavar="MADDR", help=f"Where to be reached; repeatable. [{DEFAULTS.listen[0]}]"),
]
Layers = Annotated[str | None, typer.Option(metavar="A:B", help="Serve layers A to B-1. [the node decides]")]
Heads = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Medusa heads (safetensors), for whoever asks for their guesses. [none]"),
]
Name = Annotated[str | None, typer.Option(help="How others see this node.")]
Region = Annotated[str | None, typer.Option(help="Where it stands, as in eu-west.")]
Identity = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Keep the peer id in this file. [a new one each time]")
]
Wait = Annotated[
    float | None, typer.Option(min=0, metavar="SECONDS", help="Keep trying to reach the peers for so long. [0]")
]
Share = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Take at most an N-th of the model and of the memory. [1]")
]
MaxSessions = Annotated[
    int | None, typer.Option(metavar="N", help=f"Sessions at a time. [{DEFAULTS.limits.max_sessions}]")
]
MaxUpload = Annotated[str | None, typer.Option(metavar="BYTES", help="To send a second at most, as in 2MB. [no limit]")]
Schedule = Annotated[
    str | None, typer.Option(metavar="FROM-TO", help="Local time to serve, as in 22:00-08:00,12:30-13:30. [always]")
]
PauseWhenBusy = Annotated[
    bool, typer.Option("--pause-when-busy", help="Take no sessions while others use this machine.")
]
LogFormat = Annotated[str | None, typer.Option(metavar="FORMAT", help="Of stderr: text or json. [text]")]
MetricsPort = Annotated[
    int | None, typer.Option(min=0, max=65535, metavar="PORT", help="Serve Prometheus metrics. [none]")
]
MetricsHost = Annotated[
    str | None, typer.Option(metavar="HOST", help=f"Where to serve them. [{DEFAULTS.metrics_host}]")
]
Carrier = Annotated[str | None, typer.Option(metavar="KIND", help="auto, or daemon for no direct connections. [auto]")]
DirectPort = Annotated[
    int | None, typer.Option(min=0, max=65535, metavar="PORT", help="TCP port for direct connections. [any]")
]
Relay = Annotated[bool, typer.Option("--relay", help="Carry connections for peers that nobody can dial.")]
Config = Annotated[Path | None, typer.Option(metavar="FILE", help="TOML with any of these settings.")]

_AS_THEY_ARE = (
    "gpu",
    "model",
    "layers",
    "dtype",
    "heads",
    "name",
    "region",
    "identity",
    "threads",
    "share",
    "max_sessions",
    "schedule",
    "log_format",
    "metrics_port",
    "metrics_host",
    "network",
    "carrier",
    "transport",
    "direct_port",
)
_SWITCHES = {"pause_when_busy": "pause_when_busy", "relay": "relay", "as_json": "json"}
_LISTS = {"peer": "peers", "listen": "listen", "via": "relays"}
_BYTES = ("max_memory", "max_upload")


def config_of(given: Mapping[str, Any]) -> NodeConfig:
    """`given`: the parameters of `join` by their names. Raises UsageError."""
    if given["gpu"] is not None and given["cpu"]:
        raise UsageError("--gpu and --cpu exclude each other")
    told: dict[str, Any] = {flag: given[flag] for flag in _AS_THEY_ARE if given[flag] is not None}
    told |= {setting: True for flag, setting in _SWITCHES.items() if given[flag]}
    told |= {setting: tuple(given[flag]) for flag, setting in _LISTS.items() if given[flag]}
    told |= {flag: parse_bytes(given[flag]) for flag in _BYTES if given[flag]}
    if given["wait"] is not None:
        told["wait_s"] = given["wait"]
    if given["no_discovery"]:
        told["discovery"] = False
    secret = network_cli.secret_of(given["secret"], given["private"])
    if secret is not None:
        told["secret"] = secret
    file = Path(given["config"]) if given["config"] else None
    config = load(NodeConfig, {**network_cli.invited(given["invite"]), **told}, file)
    return dataclasses.replace(config, gpu=None) if given["cpu"] else config
