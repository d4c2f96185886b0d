"""`swarm-chat`: the command line. Owns its options, the one-shot mode and exit codes; the terminal is `repl`'s."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from swarm.config import ClientConfig, load, local_swarm
from swarm.errors import SwarmError, UsageError
from swarm.invite import parse
from swarm_client.nearby import peers_nearby

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_LIBRARY = ClientConfig()
CHAT_TEMPERATURE, CHAT_TOP_P = 0.2, 0.9  # what the built-in model's card advises


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asked for, apart from the config."""

    system: str
    options: dict[str, Any]
    as_json: bool


_Peers = Annotated[
    list[str] | None,
    typer.Option(help="Multiaddr of a node of the swarm; repeatable. Default: the swarm of `swarm-node local`."),
]
_Invite = Annotated[
    str | None, typer.Option(help="What `swarm-node invite` printed; replaces --peer, --model.", metavar="TOKEN")
]
_Draft = Annotated[
    str | None,
    typer.Option(
        help="Who guesses ahead beside the look-up: a .draft file, a small model, `heads` (the tail's), `ngram` (none)."
    ),
]
_NoDiscovery = Annotated[bool, typer.Option("--no-discovery", help="Do not look for the swarm in the local network.")]
_Transport = Annotated[
    str | None, typer.Option(help="daemon, or py for no Go program: py-libp2p in a thread.", metavar="KIND")
]


@app.command(help="Talk to a swarm. Without --once, an interactive terminal.")
def run(
    once: Annotated[str | None, typer.Option(help="Answer this one prompt and exit.", metavar="TEXT")] = None,
    peer: _Peers = None,
    invite: _Invite = None,
    model: Annotated[str | None, typer.Option(help=f"The model to ask. Default: {_LIBRARY.model}.")] = None,
    system: Annotated[str, typer.Option(help="The system prompt.")] = "",
    strategy: Annotated[str | None, typer.Option(help="auto, sequential, tree, pipelined, hybrid or outline.")] = None,
    draft: _Draft = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token.")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="The longest answer, in tokens.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = CHAT_TEMPERATURE,
    top_p: Annotated[float, typer.Option(help="1 is off.")] = CHAT_TOP_P,
    top_k: Annotated[int, typer.Option(help="0 is off.")] = 0,
    repetition_penalty: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End the answer before this text; repeatable.")] = None,
    network: Annotated[str | None, typer.Option(help="What people call the swarm, to tell several apart.")] = None,
    no_discovery: _NoDiscovery = False,
    transport: _Transport = None,
    dtype: Annotated[str | None, typer.Option(help="Use only nodes of this dtype.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file of these settings.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log to stderr.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: one JSON object on stdout.")] = False,
) -> None:
    logging.basicConfig(level=logging.INFO if verbose else logging.CRITICAL)
    try:
        given: dict[str, Any] = {"model": model, "peers": tuple(peer) if peer else None, "strategy": strategy}
        given |= {"dtype": dtype, "draft": draft, "transport": transport, "network": network}
        given["discovery"] = False if no_discovery else None
        invited = parse(invite).settings() if invite is not None else {}
        settings = load(ClientConfig, {**invited, **{k: v for k, v in given.items() if v is not None}}, config)
        settings = _with_peers(settings)
        options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "temperature": 0.0 if greedy else temperature,
            "top_p": top_p,
            "top_k": top_k,
            "repetition_penalty": repetition_penalty,
            "seed": seed,
            "stop": tuple(stop or ()),
        }
        if once is None and as_json:
            raise UsageError("--json answers one prompt; give it with --once")
        request = Request(system, options, as_json)
        if once is None:
            from swarm_client.repl import interact  # the terminal's libraries are not needed for --once

            uvloop.run(interact(settings, request.system, options))
        else:
            uvloop.run(answer_once(settings, once, request))
    except SwarmError as error:
        _fail(error, as_json)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


async def answer_once(settings: ClientConfig, prompt: str, request: Request) -> None:
    """Print the answer as it comes, or with --json one object at the end."""
    from swarm_client.client import SwarmClient
    from swarm_client.request import Options, check_messages

    # What is wrong with the request is told before anything is loaded or dialled.
    Options(**request.options, strategy=settings.strategy)
    messages = [{"role": "system", "content": request.system}] if request.system else []
    messages.append({"role": "user", "content": prompt})
    check_messages(messages)
    async with (
        SwarmClient(config=settings) as client,
        client.chat_stream(messages, **request.options) as stream,
    ):
        async for piece in stream:
            if not request.as_json:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
        answer = stream.answer
        if request.as_json:
            sys.stdout.write(json.dumps(answer.to_json()) + "\n")
        else:
            sys.stdout.write("\n")
            if answer.outline is not None:
                sys.stderr.write(f"[{answer.outline}]\n")
            sys.stderr.write(
                f"[{len(answer.token_ids)} tokens, {answer.tokens_per_second:.1f} tokens/s, "
                f"first after {answer.time_to_first_token_s:.2f} s, {answer.strategy}, chain {answer.chain}]\n"
            )


def _with_peers(settings: ClientConfig) -> ClientConfig:
    """Without --peer, the swarm that `swarm-node local` runs on this machine, and its model unless one was named; then
    the swarm of this model in the local network.
    """
    if settings.peers:
        return settings
    try:
        model, peers = local_swarm()
    except UsageError:
        nearby = settings.discovery and uvloop.run(peers_nearby(settings))
        if not nearby:
            raise
        return dataclasses.replace(settings, peers=nearby)
    return dataclasses.replace(
        settings, peers=peers, model=model if settings.model == _LIBRARY.model else settings.model
    )


def _fail(error: SwarmError, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps({"error": error.code, "message": str(error)}) + "\n")
    sys.stderr.write(f"swarm-chat: {error}\n")
    raise typer.Exit(error.exit_code)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
