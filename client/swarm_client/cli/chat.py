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

from swarm import old_names
from swarm.config import ClientConfig, env_value, load, local_swarm, split_list
from swarm.errors import SwarmError, UsageError
from swarm.invite import parse
from swarm_client.api.options import OUTLINE, STRATEGIES, GenerationOptions, check_messages
from swarm_client.network.discovery import peers_nearby

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_LIBRARY = ClientConfig()
CHAT_TEMPERATURE, CHAT_TOP_P = 0.2, 0.9  # what the built-in model's card advises


@dataclass(frozen=True, slots=True)
class ChatRequest:
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
_Drafter = Annotated[
    str | None,
    typer.Option(
        help="What drafts tokens beside the n-gram drafter: `bundled`, a .draft file, a small model, `medusa` (the "
        "tail's heads), `ngram` (nothing)."
    ),
]
_NoDiscovery = Annotated[bool, typer.Option("--no-discovery", help="Do not look for the swarm in the local network.")]
_Libp2p = Annotated[
    str | None, typer.Option(help="go, or python for no Go program: py-libp2p in a thread.", metavar="KIND")
]


def _option(flag: str, *short: str, help: str, **more: Any) -> Any:
    """An option of no setting in the config, which SWARM_<FLAG> sets too."""
    variable = f"SWARM_{flag.removeprefix('--').upper().replace('-', '_')}"
    return typer.Option(flag, *short, help=help, envvar=variable, show_envvar=False, **more)


@app.command(cls=old_names.CommandWithOldNames, help="Talk to a swarm. Without --prompt, an interactive terminal.")
def run(
    prompt: Annotated[str | None, _option("--prompt", help="Answer this one prompt and exit.", metavar="TEXT")] = None,
    peer: _Peers = None,
    invite: _Invite = None,
    model: Annotated[str | None, typer.Option(help=f"The model to ask. Default: {_LIBRARY.model}.")] = None,
    system: Annotated[str, _option("--system", help="The system prompt.")] = "",
    decoding: Annotated[str | None, typer.Option(help=f"{', '.join(STRATEGIES)} or {OUTLINE}.")] = None,
    drafter: _Drafter = None,
    greedy: Annotated[bool, _option("--greedy", help="Always the likeliest token.")] = False,
    max_new_tokens: Annotated[int, _option("--max-new-tokens", help="The longest answer, in tokens.")] = 512,
    temperature: Annotated[float, _option("--temperature", help="0 is greedy.")] = CHAT_TEMPERATURE,
    top_p: Annotated[float, _option("--top-p", help="1 is off.")] = CHAT_TOP_P,
    top_k: Annotated[int, _option("--top-k", help="0 is off.")] = 0,
    repetition_penalty: Annotated[float, _option("--repetition-penalty", help="1 is off.")] = 1.0,
    seed: Annotated[int | None, _option("--seed", help="The same seed gives the same answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End the answer before this text; repeatable.")] = None,
    network: Annotated[str | None, typer.Option(help="What people call the swarm, to tell several apart.")] = None,
    no_discovery: _NoDiscovery = False,
    libp2p: _Libp2p = None,
    dtype: Annotated[str | None, typer.Option(help="Use only nodes of this dtype.")] = None,
    config: Annotated[Path | None, _option("--config", help="A TOML file of these settings.")] = None,
    verbose: Annotated[bool, _option("--verbose", "-v", help="Log to stderr.")] = False,
    as_json: Annotated[bool, _option("--json", help="With --prompt: one JSON object on stdout.")] = False,
) -> None:
    logging.basicConfig(level=logging.INFO if verbose else logging.CRITICAL)
    try:
        given: dict[str, Any] = {"model": model, "peers": tuple(peer) if peer else None, "decoding": decoding}
        given |= {"dtype": dtype, "drafter": drafter, "libp2p_impl": libp2p, "network": network}
        given["discovery"] = False if no_discovery else None
        invite = invite if invite is not None else env_value("invite") or None
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
            "stop": tuple(stop or split_list(env_value("stop"))),
        }
        if prompt is None and as_json:
            raise UsageError("--json answers one prompt; give it with --prompt")
        request = ChatRequest(system, options, as_json)
        if prompt is None:
            from swarm_client.cli.repl import interact  # the terminal's libraries are not needed for --prompt

            uvloop.run(interact(settings, request.system, options))
        else:
            uvloop.run(answer_once(settings, prompt, request))
    except SwarmError as error:
        _fail(error, as_json)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


async def answer_once(settings: ClientConfig, prompt: str, request: ChatRequest) -> None:
    """Print the answer as it comes, or with --json one object at the end."""
    from swarm_client.client import SwarmClient

    # What is wrong with the request is told before anything is loaded or dialled.
    GenerationOptions(**request.options, decoding=settings.decoding)
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
        answer = stream.result
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
