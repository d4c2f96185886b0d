"""`swarm-node`: join a swarm, start a private one on this machine, look at one.

Owns flags; how a command runs and ends is `command`'s. Heavy imports wait until a command needs them, so that `--help`
and mistakes answer at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import os
import signal
from pathlib import Path
from typing import Annotated

import psutil
import typer

from swarm.config import DEFAULT_MODEL, ClientConfig, NodeConfig, load, parse_bytes
from swarm.errors import UsageError
from swarm_node import logs, network_cli, owner_cli
from swarm_node.command import Errors, run

STARTED = psutil.Process().create_time()  # what "serving after" is counted from, imports included
DEFAULTS = NodeConfig()

app = typer.Typer(
    name="swarm-node",
    help="Lend this machine to a swarm that serves a language model together.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

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


@app.command()
def join(
    gpu: Annotated[int | None, typer.Option(min=0, metavar="N", help="Compute on GPU N.")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Compute on the CPU, which is the default.")] = False,
    model: Model = None,
    peer: Peers = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(metavar="MADDR", help=f"Where to be reached; repeatable. [{DEFAULTS.listen[0]}]"),
    ] = None,
    layers: Annotated[str | None, typer.Option(metavar="A:B", help="Serve layers A to B-1. [the node decides]")] = None,
    max_memory: MaxMemory = None,
    dtype: Dtype = None,
    name: Annotated[str | None, typer.Option(help="How others see this node.")] = None,
    region: Annotated[str | None, typer.Option(help="Where it stands, as in eu-west.")] = None,
    identity: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the peer id in this file. [a new one each time]")
    ] = None,
    threads: Threads = None,
    wait: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="Keep trying to reach the peers for so long. [0]")
    ] = None,
    share: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Take at most an N-th of the model and of the memory. [1]")
    ] = None,
    max_sessions: Annotated[
        int | None, typer.Option(metavar="N", help=f"Sessions at a time. [{DEFAULTS.limits.max_sessions}]")
    ] = None,
    max_upload: Annotated[
        str | None, typer.Option(metavar="BYTES", help="To send a second at most, as in 2MB. [no limit]")
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(metavar="FROM-TO", help="Local time to serve, as in 22:00-08:00,12:30-13:30. [always]")
    ] = None,
    pause_when_busy: Annotated[
        bool, typer.Option("--pause-when-busy", help="Take no sessions while others use this machine.")
    ] = False,
    log_format: Annotated[str | None, typer.Option(metavar="FORMAT", help="Of stderr: text or json. [text]")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, metavar="PORT", help="Serve Prometheus metrics. [none]")
    ] = None,
    metrics_host: Annotated[
        str | None, typer.Option(metavar="HOST", help=f"Where to serve them. [{DEFAULTS.metrics_host}]")
    ] = None,
    invite: network_cli.Token = None,
    secret: network_cli.Secret = None,
    private: network_cli.Private = False,
    network: network_cli.NetworkName = None,
    no_discovery: network_cli.NoDiscovery = False,
    carrier: Annotated[
        str | None, typer.Option(metavar="KIND", help="auto, or daemon for no direct connections. [auto]")
    ] = None,
    transport: network_cli.Transport = None,
    direct_port: Annotated[
        int | None, typer.Option(min=0, max=65535, metavar="PORT", help="TCP port for direct connections. [any]")
    ] = None,
    relay: Annotated[bool, typer.Option("--relay", help="Carry connections for peers that nobody can dial.")] = False,
    via: network_cli.Via = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="TOML with any of these settings.")] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Lend this machine: measure it, join, take the layers the swarm needs most and serve them until Ctrl-C."""
    with Errors(as_json):
        if gpu is not None and cpu:
            raise UsageError("--gpu and --cpu exclude each other")
        overrides = {
            "gpu": gpu,
            "model": model,
            "peers": tuple(peer) if peer else None,
            "listen": tuple(listen) if listen else None,
            "layers": layers,
            "max_memory": parse_bytes(max_memory) if max_memory else None,
            "dtype": dtype,
            "name": name,
            "region": region,
            "identity": identity,
            "threads": threads,
            "wait_s": wait,
            "share": share,
            "max_sessions": max_sessions,
            "max_upload": parse_bytes(max_upload) if max_upload else None,
            "schedule": schedule,
            "pause_when_busy": pause_when_busy or None,
            "log_format": log_format,
            "metrics_port": metrics_port,
            "metrics_host": metrics_host,
            "secret": network_cli.secret_of(secret, private),
            "network": network,
            "discovery": False if no_discovery else None,
            "carrier": carrier,
            "transport": transport,
            "direct_port": direct_port,
            "relay": relay or None,
            "relays": tuple(via) if via else None,
            "json": as_json or None,
        }
        given = {setting: value for setting, value in overrides.items() if value is not None}
        settings = load(NodeConfig, {**network_cli.invited(invite), **given}, config)
        if cpu:
            settings = dataclasses.replace(settings, gpu=None)
        logs.start(verbose, settings.log_format)
        run(lambda stop: _join(settings, stop))


@app.command()
def local(
    nodes: Annotated[int | None, typer.Option(min=1, max=64, help="How many node processes. [3]")] = None,
    layers: Annotated[
        str | None, typer.Option(metavar="A:B,C:D", help="Each node's layers, one span a node. [the nodes decide]")
    ] = None,
    model: Model = None,
    dtype: Dtype = None,
    max_memory: MaxMemory = None,
    threads: Threads = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Start a private swarm of several node processes on 127.0.0.1 and say how to talk to it."""
    from swarm_node import local as private

    with Errors(as_json):
        flags = {"--dtype": dtype, "--max-memory": max_memory, "--threads": threads}
        passed_on = [part for flag, value in flags.items() if value is not None for part in (flag, str(value))]
        passed_on += ["--verbose"] if verbose else []
        chosen = model or os.environ.get("SWARM_MODEL") or DEFAULT_MODEL
        options = private.LocalOptions.checked(nodes, layers, chosen, passed_on, as_json, verbose)
        logs.start(verbose)
        run(lambda stop: private.run(options, stop))


@app.command()
def status(
    peer: Peers = None,
    model: Model = None,
    invite: network_cli.Token = None,
    transport: network_cli.Transport = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Show a swarm: who serves what, load, coverage of each layer, missing layers; and the nodes on this machine."""
    with Errors(as_json):
        logs.start(verbose)
        from swarm_node.status import show

        invited = network_cli.invited(invite)
        peers = tuple(peer or invited.get("peers", ()))
        secret = invited.get("secret") or os.environ.get("SWARM_SECRET", "")
        host = load(ClientConfig, {"transport": transport}).transport
        run(lambda stop: show(peers, model or invited.get("model"), as_json, secret, host))


owner_cli.add_to(app)
network_cli.add_to(app)


async def _join(config: NodeConfig, stop: asyncio.Event) -> None:
    from swarm_node import nearby, report

    with report.make(config.json, STARTED) as reporter:
        # In a thread, so that a signal is heard meanwhile.
        importing = asyncio.create_task(asyncio.to_thread(importlib.import_module, "swarm_node.daemon"))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((importing, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if stop.is_set():
            reporter.event("stopped", "stopped")
        else:
            config = await nearby.resolved(config, reporter)
            await importing.result().join(config, reporter, stop)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until a loop takes over, Ctrl-C ends us without a traceback
    app()


if __name__ == "__main__":
    main()
