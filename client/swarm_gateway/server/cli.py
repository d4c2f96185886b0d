"""`swarm-gateway`: the command line. Owns the flags, what is printed, and the rule of which address needs a key."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from swarm.command_line import event_loop, program
from swarm.command_line.old_flags import CommandWithOldNames
from swarm.config import GatewayConfig
from swarm.errors import SwarmError, UsageError
from swarm_client.api.options import STRATEGIES
from swarm_client.network.discovery import given_config
from swarm_gateway.http.guard import is_loopback

app = typer.Typer(**program.SETTINGS)

_DEFAULTS = GatewayConfig()
_Peers = Annotated[
    list[str] | None,
    typer.Option(help="Multiaddr of a node of the swarm; repeatable. Default: the swarm of `swarm-node local`."),
]
_Invite = Annotated[
    str | None, typer.Option(help="What `swarm-node invite` printed; replaces --peer, --model.", metavar="TOKEN")
]
_Swarms = Annotated[
    list[str] | None, typer.Option(help="An invitation of one more swarm to serve; repeatable.", metavar="TOKEN")
]
_Keys = Annotated[
    list[str] | None,
    typer.Option(help="Callers must send this key; repeatable. SWARM_API_KEY hides it from `ps`.", metavar="KEY"),
]
_Origins = Annotated[
    list[str] | None, typer.Option(help="Pages of this origin may call, as in https://chat.example; repeatable.")
]
_Hosts = Annotated[list[str] | None, typer.Option(help="A further name under which callers may reach it; repeatable.")]
_LocalLayers = Annotated[str | None, typer.Option(help="As for swarm-chat.", metavar="F:L")]
_Trust = Annotated[list[str] | None, typer.Option(help="As for swarm-chat; repeatable.", metavar="PEER")]
_Apart = Annotated[str | None, typer.Option(help="As for swarm-chat.", metavar="BY")]
_KnownFirst = Annotated[bool, typer.Option("--known-first", help="As for swarm-chat.")]
_VaryFirst = Annotated[bool, typer.Option("--vary-first", help="As for swarm-chat.")]
_Libp2p = Annotated[
    str | None, typer.Option(help="go, or python for no Go program: py-libp2p in a thread.", metavar="KIND")
]


@app.command(cls=CommandWithOldNames, help="Serve a swarm as OpenAI's and Anthropic's APIs, for any program.")
def run(
    peer: _Peers = None,
    invite: _Invite = None,
    swarm: _Swarms = None,
    model: Annotated[str | None, typer.Option(help=f"The model. Default: {_DEFAULTS.model}.")] = None,
    host: Annotated[str | None, typer.Option(help=f"Address to listen on. Default: {_DEFAULTS.host}.")] = None,
    port: Annotated[int | None, typer.Option(help=f"Default: {_DEFAULTS.port}; 0: any.")] = None,
    api_key: _Keys = None,
    allow_origin: _Origins = None,
    allow_host: _Hosts = None,
    max_running: Annotated[
        int | None, typer.Option(help=f"Requests of a model at once; more wait. Default: {_DEFAULTS.max_running}.")
    ] = None,
    decoding: Annotated[str | None, typer.Option(help=f"{', '.join(STRATEGIES)}.")] = None,
    drafter: Annotated[str | None, typer.Option(help="As for swarm-chat.")] = None,
    network: Annotated[str | None, typer.Option(help="The swarm's name, where a network has several.")] = None,
    no_discovery: Annotated[bool, typer.Option("--no-discovery", help="Do not look in the local network.")] = False,
    libp2p: _Libp2p = None,
    dtype: Annotated[str | None, typer.Option(help="Use only nodes with this dtype.")] = None,
    local_layers: _LocalLayers = None,
    trust: _Trust = None,
    apart: _Apart = None,
    known_first: _KnownFirst = False,
    vary_first: _VaryFirst = False,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file of these settings.", envvar="SWARM_CONFIG", show_envvar=False)
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log to stderr.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Events as JSON lines on stdout.")] = False,
    version: program.Version = False,
) -> None:
    logging.basicConfig(level=logging.INFO if verbose else logging.CRITICAL)
    given: dict[str, Any] = {"model": model, "host": host, "port": port, "max_running": max_running}
    given |= {"decoding": decoding, "drafter": drafter, "network": network, "libp2p_impl": libp2p, "dtype": dtype}
    lists = {"peers": peer, "swarms": swarm, "api_keys": api_key, "trust": trust}
    lists |= {"allow_origins": allow_origin, "allow_hosts": allow_host}
    given |= {name: tuple(values) for name, values in lists.items() if values}
    given |= {"discovery": False if no_discovery else None, "json": True if as_json else None}
    given |= {"local_layers": local_layers, "apart": apart}
    given |= {"known_first": known_first or None, "vary_first": vary_first or None}
    try:
        settings = checked(given_config(GatewayConfig, given, invite, config))
        as_json = settings.json
        start(settings)
    except SwarmError as error:
        if as_json:
            sys.stdout.write(json.dumps({"event": "error", "error": error.code, "message": str(error)}) + "\n")
        sys.stderr.write(f"swarm-gateway: {error}\n")
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def checked(config: GatewayConfig) -> GatewayConfig:
    """Raises UsageError where the gateway would be open to whoever can reach it."""
    if not is_loopback(config.host) and not config.api_keys:
        raise UsageError(
            f"with --host {config.host} other machines could use this gateway: give --api-key KEY as well, or leave "
            f"--host out to serve this machine alone"
        )
    for key in config.api_keys:
        if not key.isascii() or not key.isprintable() or not key.strip() or " " in key:
            raise UsageError("an API key must be printable ASCII without spaces")
    return config


def start(config: GatewayConfig) -> None:
    """Serve until a signal. Raises SwarmError."""
    from swarm_gateway.server.app import create_app  # torch comes with it: only once the flags are right
    from swarm_gateway.server.run import http_server, listen
    from swarm_gateway.server.swarms import gateway_of, swarms_of

    gateway, connect = gateway_of(config, swarms_of(config))
    listener = listen(config.host, config.port)
    host = f"[{config.host}]" if ":" in config.host else config.host
    address = f"http://{host}:{listener.getsockname()[1]}"
    names = list(gateway.models)

    def ready() -> None:
        _report_ready(address, names, config)

    with listener:
        event_loop.run(http_server(create_app(gateway, connect), ready).serve([listener]))


def _report_ready(address: str, models: list[str], config: GatewayConfig) -> None:
    exposed = "the first and the last node of a chain see token ids, which is all of the text"
    if config.local_layers != "none":
        exposed = f"token ids stay here (--local-layers {config.local_layers}); nodes see hidden states"
    elif config.trust:
        ends = ", ".join(peer[-6:] for peer in config.trust)
        exposed = f"token ids go to trusted nodes alone ({ends}); other nodes see hidden states"
    exposed += ", and from hidden states most of a text can be recovered: docs/privacy.md"
    if config.json:
        line = json.dumps({"event": "ready", "address": address, "models": models, "exposure": exposed})
    else:
        key = ' \\\n    -H "Authorization: Bearer $SWARM_API_KEY"' if config.api_keys else ""
        body = json.dumps({"model": models[0], "messages": [{"role": "user", "content": "Why is the sky blue?"}]})
        line = (
            f"{', '.join(models)} at {address}/v1\n\n  curl {address}/v1/chat/completions{key} \\\n"
            f"    -H 'Content-Type: application/json' \\\n    -d '{body}'\n\n"
            f"Who sees what: {exposed}.\nCtrl-C stops it."
        )
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    app()


if __name__ == "__main__":
    main()
