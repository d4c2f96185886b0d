"""`swarm-node`: join a swarm, start a private one on this machine, look at one.

Owns the commands. The flags of `join` are in `flags`; how a command runs and ends is in `runner`. Heavy imports wait
until a command needs them, so that `--help` and usage errors are quick.
"""

from __future__ import annotations

import asyncio
import importlib
import signal
from typing import Annotated

import psutil
import typer

from swarm.command_line import program
from swarm.command_line.old_flags import CommandWithOldNames
from swarm.config import DEFAULT_MODEL, ClientConfig, NodeConfig, env_value, load
from swarm_node.commands import control_commands, flags, models_command, network_commands, service_commands
from swarm_node.commands.local_gateway import DEFAULT_PORT as GATEWAY_PORT
from swarm_node.commands.runner import exit_on_error, run, start_log

STARTED = psutil.Process().create_time()  # what "serving after" is counted from, imports included

app = typer.Typer(
    name="swarm-node",
    help="Lend this machine to a swarm that serves a language model together.",
    no_args_is_help=True,
    **program.SETTINGS,
)
app.callback()(program.options_of_all)


@app.command(cls=CommandWithOldNames)
def join(
    ctx: typer.Context,
    gpu: flags.Gpu = None,
    cpu: flags.Cpu = False,
    model: flags.Model = None,
    peer: flags.Peers = None,
    listen: flags.Listen = None,
    layers: flags.Layers = None,
    experts: flags.Experts = None,
    lead: flags.Lead = False,
    max_memory: flags.MaxMemory = None,
    dtype: flags.Dtype = None,
    medusa_heads: flags.MedusaHeads = None,
    drafter: flags.Drafter = None,
    name: flags.Name = None,
    region: flags.Region = None,
    identity: flags.Identity = None,
    threads: flags.Threads = None,
    join_timeout: flags.JoinTimeout = None,
    model_fraction: flags.ModelFraction = None,
    max_sessions: flags.MaxSessions = None,
    owner: flags.Owner = None,
    upload_limit: flags.UploadLimit = None,
    active_hours: flags.ActiveHours = None,
    pause_when_busy: flags.PauseWhenBusy = False,
    log_format: flags.LogFormat = None,
    metrics_port: flags.MetricsPort = None,
    metrics_host: flags.MetricsHost = None,
    invite: network_commands.Token = None,
    secret: network_commands.Secret = None,
    private: network_commands.Private = False,
    network: network_commands.NetworkName = None,
    no_discovery: network_commands.NoDiscovery = False,
    transport: flags.Transport = None,
    libp2p: network_commands.Libp2p = None,
    direct_port: flags.DirectPort = None,
    relay_server: flags.RelayServer = False,
    relay_via: network_commands.RelayVia = None,
    config: flags.Config = None,
    as_json: flags.Json = False,
    verbose: flags.Verbose = False,
) -> None:
    """Lend this machine: measure it, join, take the layers the swarm needs most and serve them until Ctrl-C."""
    with exit_on_error(as_json):
        settings = flags.config_of(ctx.params)
        start_log(verbose, settings.log_format)
        run(lambda stop: _join(settings, stop))


@app.command()
def local(
    nodes: Annotated[int | None, typer.Option(min=1, max=64, help="How many node processes. [3]")] = None,
    layers: Annotated[
        str | None, typer.Option(metavar="A:B,C:D", help="Each node's layers, one span a node. [the nodes decide]")
    ] = None,
    model: flags.Model = None,
    dtype: flags.Dtype = None,
    max_memory: flags.MaxMemory = None,
    threads: flags.Threads = None,
    gateway: Annotated[
        bool, typer.Option("--gateway", help="And a gateway: OpenAI's and Anthropic's APIs, and a page.")
    ] = False,
    gateway_port: Annotated[
        int | None, typer.Option(metavar="PORT", min=0, max=65535, help=f"Of the gateway. [{GATEWAY_PORT}]")
    ] = None,
    as_json: flags.Json = False,
    verbose: flags.Verbose = False,
) -> None:
    """Start a private swarm of several node processes on 127.0.0.1 and print how to chat with it."""
    from swarm_node.commands import local as private

    with exit_on_error(as_json):
        given = {"--dtype": dtype, "--max-memory": max_memory, "--threads": threads}
        passed_on = [part for flag, value in given.items() if value is not None for part in (flag, str(value))]
        passed_on += ["--verbose"] if verbose else []
        chosen = model or env_value("model") or DEFAULT_MODEL
        port = gateway_port if gateway_port is not None else GATEWAY_PORT if gateway else None
        options = private.LocalOptions.checked(nodes, layers, chosen, passed_on, as_json, verbose, port)
        start_log(verbose)
        run(lambda stop: private.run(options, stop))


@app.command(cls=CommandWithOldNames)
def status(
    peer: flags.Peers = None,
    model: flags.Model = None,
    invite: network_commands.Token = None,
    libp2p: network_commands.Libp2p = None,
    as_json: flags.Json = False,
    verbose: flags.Verbose = False,
) -> None:
    """Show a swarm: who serves what, load, coverage of each layer, missing layers; and the nodes on this machine."""
    with exit_on_error(as_json):
        start_log(verbose)
        from swarm_node.commands.status import show

        known, named = _swarm_asked_for(peer, model, invite, libp2p)
        run(lambda stop: show(known.peers, named, as_json, known.secret, known.libp2p_impl))


@app.command()
def top(
    peer: network_commands.Peers = None,
    model: flags.Model = None,
    invite: network_commands.Token = None,
    libp2p: network_commands.Libp2p = None,
    once: Annotated[bool, typer.Option("--once", help="Print it once, and end; so it is without a terminal.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it once, as the JSON of a gateway's /swarm.")] = False,
    verbose: flags.Verbose = False,
) -> None:
    """Watch a swarm: replicas of each layer, nodes, who joined, left or moved, and the load of the nodes here."""
    with exit_on_error(as_json):
        start_log(verbose)
        from swarm_node.commands.top import show

        known, named = _swarm_asked_for(peer, model, invite, libp2p)
        run(lambda stop: show(known.peers, named, stop, once, as_json, known.secret, known.libp2p_impl))


@app.command()
def profile(
    seconds: Annotated[float, typer.Option(min=0.1, max=3600.0, help="How long to look.")] = 10.0,
    as_json: flags.Json = False,
) -> None:
    """Where the time of steps goes on the nodes of this machine, while somebody uses them: kernels, waiting, wire."""
    with exit_on_error(as_json):
        from swarm_node.commands.profile import show

        run(lambda stop: show(seconds, stop, as_json))


def _swarm_asked_for(
    peer: list[str] | None, model: str | None, invite: str | None, libp2p: str | None
) -> tuple[ClientConfig, str | None]:
    """How to reach a swarm, and its model if one is named. Raises UsageError."""
    invited = network_commands.invited(invite)
    given = {"peers": tuple(peer) if peer else None, "model": model, "libp2p_impl": libp2p}
    known = load(ClientConfig, {**invited, **{name: value for name, value in given.items() if value is not None}})
    return known, model or invited.get("model") or env_value("model") or None  # None: whichever runs here


control_commands.add_to(app)
models_command.add_to(app)
network_commands.add_to(app)
service_commands.add_to(app)


async def _join(config: NodeConfig, stop: asyncio.Event) -> None:
    from swarm_node.network import mdns_join
    from swarm_node.owner import event_log

    with event_log.make(config.json, STARTED) as reporter:
        # In a thread, so that signals are handled meanwhile.
        importing = asyncio.create_task(asyncio.to_thread(importlib.import_module, "swarm_node.node"))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((importing, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if stop.is_set():
            reporter.event("stopped", "stopped")
        else:
            config = await mdns_join.peers_or_mdns(
                config, lambda sentence, peers: reporter.event("found", sentence, peers=peers)
            )
            await importing.result().join(config, reporter, stop)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until a loop takes over, Ctrl-C ends us without a traceback
    app()


if __name__ == "__main__":
    main()
