"""The flags of `swarm-node join`, those it shares with other commands included, and what they set.

Owns their help texts and types. Settings and their defaults are in `swarm.config`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from swarm.config import DEFAULT_MODEL, NodeConfig, env_flag, load
from swarm.errors import UsageError
from swarm_node.commands import network_commands

DEFAULTS = NodeConfig()

Model = Annotated[
    str | None, typer.Option(help=f"A folder, a .gguf file, a Hugging Face id or a built-in name. [{DEFAULT_MODEL}]")
]
Peers = Annotated[
    list[str] | None,
    typer.Option("--peer", metavar="MADDR", help="A node of the swarm to join; repeatable. None: begin a new swarm."),
]
Json = Annotated[
    bool, typer.Option("--json", envvar="SWARM_JSON", show_envvar=False, help="JSON lines instead of sentences.")
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help=f"bf16, int8, int4, fp16, fp32, or auto: that of the model's files; a chain has one. [{DEFAULTS.dtype}]"
    ),
]
MaxMemory = Annotated[
    str | None, typer.Option(metavar="BYTES", help="For weights, keys and values, as in 6GB. [most of what is free]")
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads to compute with. [measured]")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", envvar="SWARM_VERBOSE", show_envvar=False, help="Log what happens to stderr.")
]

Gpu = Annotated[int | None, typer.Option(metavar="N", help="Compute on GPU N.")]
Cpu = Annotated[bool, typer.Option("--cpu", help="Compute on the CPU, which is the default.")]
Listen = Annotated[
    list[str] | None,
    typer.Option(metavar="MADDR", help=f"Where to be reached; repeatable. [{DEFAULTS.listen[0]}]"),
]
Layers = Annotated[str | None, typer.Option(metavar="A:B", help="Serve layers A to B-1. [the node decides]")]
Experts = Annotated[
    str | None,
    typer.Option(metavar="C:D", help="Of --layers, hold experts C to D-1 alone, for nodes that lead them. [all]"),
]
Lead = Annotated[
    bool, typer.Option("--lead", help="Lead --layers: hold all but their experts, of which those of --experts.")
]
MedusaHeads = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Medusa heads (safetensors), for clients that ask for their tokens. [none]"),
]
Drafter = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        help="EAGLE-3 or DFlash folder, or `mtp`: with the last layer, draft for clients that ask for it. [none]",
    ),
]
Name = Annotated[str | None, typer.Option(help="How others see this node.")]
Region = Annotated[str | None, typer.Option(help="Where it stands, as in eu-west.")]
Identity = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Keep the peer id in this file. [a new one each time]")
]
JoinTimeout = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="Keep trying to reach the peers for so long. [0]")
]
ModelFraction = Annotated[
    str | None, typer.Option(metavar="1/N", help="Take at most this part of the model and of the memory. [1]")
]
MaxSessions = Annotated[
    int | None, typer.Option(metavar="N", help=f"Sessions at a time. [{DEFAULTS.limits.max_sessions}]")
]
Owner = Annotated[
    list[str] | None,
    typer.Option(metavar="CLIENT", help="Serve this client first: its identity file or peer id; repeatable. [none]"),
]
UploadLimit = Annotated[
    str | None, typer.Option(metavar="BYTES", help="To send a second at most, as in 2MB. [no limit]")
]
ActiveHours = Annotated[
    str | None, typer.Option(metavar="FROM-TO", help="Local time to serve, as in 22:00-08:00,12:30-13:30. [always]")
]
PauseWhenBusy = Annotated[
    bool, typer.Option("--pause-when-busy", help="Take no sessions while others use this machine.")
]
LogFormat = Annotated[str | None, typer.Option(metavar="FORMAT", help="Of stderr: text or json. [text]")]
MetricsPort = Annotated[int | None, typer.Option(metavar="PORT", help="Serve Prometheus metrics. [none]")]
MetricsHost = Annotated[
    str | None, typer.Option(metavar="HOST", help=f"Where to serve them. [{DEFAULTS.metrics_host}]")
]
Transport = Annotated[
    str | None, typer.Option(metavar="KIND", help="auto, or libp2p for no direct connections. [auto]")
]
DirectPort = Annotated[int | None, typer.Option(metavar="PORT", help="TCP port for direct connections. [any]")]
RelayServer = Annotated[bool, typer.Option("--relay-server", help="Carry connections for peers that nobody can dial.")]
Config = Annotated[
    Path | None,
    typer.Option(metavar="FILE", envvar="SWARM_CONFIG", show_envvar=False, help="TOML with any of these settings."),
]

_RENAMED = {"peer": "peers", "join_timeout": "join_timeout_s", "libp2p": "libp2p_impl", "as_json": "json"}
_NO_SETTINGS = ("cpu", "config", "invite", "private", "no_discovery", "secret", "verbose")


def config_of(given: Mapping[str, Any]) -> NodeConfig:
    """`given`: the parameters of `join` by their names. Raises UsageError."""
    if given["gpu"] is not None and given["cpu"]:
        raise UsageError("--gpu and --cpu exclude each other")
    settings = {
        _RENAMED.get(name, name): value
        for name, value in given.items()
        if name not in _NO_SETTINGS and value is not None and value is not False and value != ()
    }
    if given["no_discovery"]:
        settings["discovery"] = False
    secret = network_commands.secret_of(given["secret"], given["private"])
    if secret is not None:
        settings["secret"] = secret
    config = load(NodeConfig, {**network_commands.invited(given["invite"]), **settings}, given["config"])
    on_cpu = given["cpu"] or (given["gpu"] is None and env_flag("cpu"))
    return dataclasses.replace(config, gpu=None) if on_cpu else config
