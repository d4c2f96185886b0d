"""`swarm-node invite | doctor`, and what an invitation sets for the other commands.

Owns flags. The checks are in `doctor`, the token's format in `swarm.net.discovery.invite`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from swarm.command_line.old_flags import CommandWithOldNames
from swarm.config import DEFAULT_MODEL, NodeConfig, env_flag, env_value, load, local_swarm
from swarm.errors import UsageError
from swarm.net.discovery.invite import Invite, parse
from swarm_node.commands.runner import exit_on_error, run, start_log

Peers = Annotated[
    list[str] | None, typer.Option("--peer", metavar="MADDR", help="A node of the swarm; repeatable. [the local swarm]")
]
Token = Annotated[
    str | None,
    typer.Option("--invite", metavar="TOKEN", help="What `swarm-node invite` printed: peers, model and secret in one."),
]
Secret = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Of a private swarm; others on this machine see it in `ps`.")
]
Private = Annotated[bool, typer.Option("--private", help="Begin a private swarm, with a secret made up here.")]
RelayVia = Annotated[
    list[str] | None,
    typer.Option(metavar="MADDR", help="Be reached through this relay, if nobody can dial this machine; repeatable."),
]
Libp2p = Annotated[
    str | None,
    typer.Option(metavar="KIND", help="go, or python for no Go program: py-libp2p in a thread. [go]"),
]
NetworkName = Annotated[
    str | None, typer.Option("--network", metavar="NAME", help="What people call the swarm, to tell several apart.")
]
NoDiscovery = Annotated[
    bool, typer.Option("--no-discovery", help="Neither look for the swarm in the local network nor be found there.")
]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of sentences.")]


def add_to(app: typer.Typer) -> None:
    for command in (invite, doctor):
        app.command(cls=CommandWithOldNames)(command)


def invited(token: str | None) -> dict[str, Any]:
    """What `--invite` or SWARM_INVITE sets in a config; nothing without one. Raises UsageError."""
    token = token if token is not None else env_value("invite") or None
    return parse(token).settings() if token is not None else {}


def secret_of(secret: str | None, private: bool) -> str | None:
    """Raises UsageError."""
    if private and secret:
        raise UsageError("--private makes up a secret, --secret gives one: choose")
    if secret is not None or not (private or env_flag("private")):
        return secret
    from swarm_node.network.invite import new_secret

    return new_secret()


def invite(
    peer: Peers = None,
    model: Annotated[str | None, typer.Option(help=f"What the swarm serves. [{DEFAULT_MODEL}]")] = None,
    network: Annotated[str, typer.Option(metavar="NAME", help="What people call the swarm.")] = "",
    secret: Secret = None,
    as_json: Json = False,
) -> None:
    """Print an invitation to a swarm: one string to paste, and a QR code of it."""
    with exit_on_error(as_json):
        run(lambda stop: _invite(tuple(peer or ()), model, network, secret or env_value("secret"), as_json))


def doctor(
    peer: Peers = None,
    token: Token = None,
    listen: Annotated[list[str] | None, typer.Option(metavar="MADDR", help="Where the node would listen.")] = None,
    direct_port: Annotated[int | None, typer.Option(metavar="PORT", help="For direct connections. [any]")] = None,
    relay_via: RelayVia = None,
    gpu: Annotated[int | None, typer.Option(metavar="N", help="The GPU it would compute on.")] = None,
    model: Annotated[str | None, typer.Option(help=f"The model it would serve. [{DEFAULT_MODEL}]")] = None,
    secret: Secret = None,
    libp2p: Libp2p = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="TOML with the node's settings.")] = None,
    as_json: Json = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens to stderr.")] = False,
) -> None:
    """Find out what would keep this machine from serving, and what to do about it. Exit code 2 if anything would."""
    with exit_on_error(as_json):
        given = {
            "peers": tuple(peer) if peer else None,
            "listen": tuple(listen) if listen else None,
            "direct_port": direct_port,
            "relay_via": tuple(relay_via) if relay_via else None,
            "gpu": gpu,
            "model": model,
            "secret": secret,
            "libp2p_impl": libp2p,
            "json": as_json or None,
        }
        merged = {**invited(token), **{name: value for name, value in given.items() if value is not None}}
        settings = load(NodeConfig, merged, config)
        start_log(verbose)
        run(lambda stop: _examine(settings))


async def _invite(peers: tuple[str, ...], model: str | None, network: str, secret: str, as_json: bool) -> None:
    """Without peers: to the swarm of `swarm-node local`, or of this user's node on this machine. Raises UsageError."""
    from swarm_node.network.invite import show

    if not peers:
        try:
            local_model, peers = local_swarm()
            model = model or local_model
        except UsageError:
            found = await _invite_of_node(model)
            if found is None:
                raise
            peers, model = found.peers, model or found.model
            network, secret = network or found.network, secret or found.secret
    show(Invite(peers, model or DEFAULT_MODEL, network, secret), as_json)


async def _invite_of_node(model: str | None) -> Invite | None:
    """The invitation of the first node on this machine (that serves `model`); None if none runs."""
    from swarm_node.owner import control_socket

    for node in await control_socket.find():
        if model in (None, node.metrics.model):
            reply = await control_socket.request(node.path, "invite")
            if reply is not None and reply.ok:
                return parse(reply.message)
    return None


async def _examine(config: NodeConfig) -> None:
    from swarm_node.commands import doctor

    if not await doctor.run(config):
        raise typer.Exit(2)
