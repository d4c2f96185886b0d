"""`swarm-chat`: the command line. Owns the flags, the one-shot mode and the exit codes; the interactive
terminal is in `repl`."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from swarm.command_line import event_loop, program
from swarm.command_line.old_flags import CommandWithOldNames
from swarm.config import ClientConfig, env_value, split_list
from swarm.errors import SwarmError, UsageError
from swarm.types import MAX_GRAMMAR_LENGTH, Grammar, GrammarKind
from swarm_client.api.options import OUTLINE, STRATEGIES, GenerationOptions, check_messages
from swarm_client.network.discovery import client_config

app = typer.Typer(**program.SETTINGS)

_LIBRARY = ClientConfig()
CHAT_TEMPERATURE, CHAT_TOP_P = 0.2, 0.9  # the built-in model card's advice


@dataclass(frozen=True, slots=True)
class OneShotRequest:
    """What the command line requests, apart from the config."""

    system: str
    options: dict[str, Any]
    as_json: bool


def _option(flag: str, *short: str, help: str, **more: Any) -> Any:
    """An option that is not in the config; the environment variable SWARM_<FLAG> sets it too."""
    variable = f"SWARM_{flag.removeprefix('--').upper().replace('-', '_')}"
    return typer.Option(flag, *short, help=help, envvar=variable, show_envvar=False, **more)


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
        help="What drafts tokens beside the n-gram drafter: `bundled`, a .draft file, an EAGLE-3 or DFlash folder, a "
        "small model, `mtp` (the model's own layer), `medusa` (the tail's heads), `auto` (the best at hand), `ngram` "
        "(nothing)."
    ),
]
_LocalLayers = Annotated[
    str | None,
    typer.Option(
        help="FIRST:LAST or auto: layers computed here, with embedding and head, so that no token id leaves.",
        metavar="F:L",
    ),
]
_Trust = Annotated[
    list[str] | None,
    typer.Option(help="Peer id of a node that alone may see ids, at the ends of chains; repeatable.", metavar="PEER"),
]
_Apart = Annotated[
    str | None,
    typer.Option(help="block, region, both or none: by what neighbouring nodes of a chain must differ.", metavar="BY"),
]
_KnownFirst = Annotated[bool, typer.Option("--known-first", help="Begin chains with nodes known for long.")]
_VaryFirst = Annotated[bool, typer.Option("--vary-first", help="Begin each conversation with another node.")]
_NoDiscovery = Annotated[bool, typer.Option("--no-discovery", help="Do not look for the swarm in the local network.")]
_Text = Annotated[
    str | None, typer.Argument(metavar="PROMPT", show_default=False, help="Answer this one prompt and exit.")
]
_Prompt = Annotated[
    str | None,
    _option(
        "--prompt", help="The same as the argument PROMPT. Without either, a pipe's text is the prompt.", metavar="TEXT"
    ),
]
_JsonSchema = Annotated[
    Path | None, _option("--json-schema", help="The answer is JSON that matches the schema in this file.")
]
_Libp2p = Annotated[
    str | None, typer.Option(help="go, or python for no Go program: py-libp2p in a thread.", metavar="KIND")
]


@app.command(cls=CommandWithOldNames, help="Talk to a swarm. Without a prompt, an interactive terminal.")
def run(
    ctx: typer.Context,
    text: _Text = None,
    prompt: _Prompt = None,
    peer: _Peers = None,
    invite: _Invite = None,
    model: Annotated[str | None, typer.Option(help=f"The model. Default: {_LIBRARY.model}.")] = None,
    system: Annotated[str, _option("--system", help="The system prompt.")] = "",
    decoding: Annotated[str | None, typer.Option(help=f"{', '.join(STRATEGIES)} or {OUTLINE}.")] = None,
    drafter: _Drafter = None,
    greedy: Annotated[bool, _option("--greedy", help="Always the most likely token.")] = False,
    max_new_tokens: Annotated[int, _option("--max-new-tokens", help="The longest answer, in tokens.")] = 512,
    temperature: Annotated[float, _option("--temperature", help="0 is greedy.")] = CHAT_TEMPERATURE,
    top_p: Annotated[float, _option("--top-p", help="1 is off.")] = CHAT_TOP_P,
    top_k: Annotated[int, _option("--top-k", help="0 is off.")] = 0,
    min_p: Annotated[float, _option("--min-p", help="0 is off.")] = 0.0,
    repetition_penalty: Annotated[float, _option("--repetition-penalty", help="1 is off.")] = 1.0,
    frequency_penalty: Annotated[float, _option("--frequency-penalty", help="0 is off.")] = 0.0,
    presence_penalty: Annotated[float, _option("--presence-penalty", help="0 is off.")] = 0.0,
    seed: Annotated[int | None, _option("--seed", help="The same seed gives the same answer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End the answer before this text; repeatable.")] = None,
    json_schema: _JsonSchema = None,
    regex: Annotated[str | None, _option("--regex", help="The answer matches this regular expression.")] = None,
    identity: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep your peer id in this file. Default: a new one each time.")
    ] = None,
    network: Annotated[str | None, typer.Option(help="The swarm's name, where a network has several.")] = None,
    no_discovery: _NoDiscovery = False,
    libp2p: _Libp2p = None,
    dtype: Annotated[str | None, typer.Option(help="Use only nodes with this dtype.")] = None,
    local_layers: _LocalLayers = None,
    trust: _Trust = None,
    apart: _Apart = None,
    known_first: _KnownFirst = False,
    vary_first: _VaryFirst = False,
    config: Annotated[Path | None, _option("--config", help="A TOML file of these settings.")] = None,
    verbose: Annotated[bool, _option("--verbose", "-v", help="Log to stderr.")] = False,
    as_json: Annotated[bool, _option("--json", help="With a prompt: one JSON object on stdout.")] = False,
    version: program.Version = False,
) -> None:
    logging.basicConfig(level=logging.INFO if verbose else logging.CRITICAL)
    try:
        prompt = _one_prompt(text, prompt, as_json)
        settings = client_config(ClientConfig, _settings(ctx.params), invite, config)
        options = _options(ctx.params, json_schema, regex)
        if prompt is None:
            from swarm_client.cli.repl import interact  # the terminal's libraries are not needed for --prompt

            event_loop.run(interact(settings, system, options))
        else:
            event_loop.run(answer_once(settings, prompt, OneShotRequest(system, options, as_json)))
    except SwarmError as error:
        _fail(error, as_json)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ClientConfig by name, None for those that no flag sets."""
    settings = {name: given[name] for name in ("model", "decoding", "dtype", "drafter", "network", "identity", "apart")}
    settings |= {"local_layers": given["local_layers"], "libp2p_impl": given["libp2p"]}
    settings |= {"peers": tuple(given["peer"] or ()) or None, "trust": tuple(given["trust"] or ()) or None}
    settings |= {"known_first": given["known_first"] or None, "vary_first": given["vary_first"] or None}
    return settings | {"discovery": False if given["no_discovery"] else None}


def _options(given: Mapping[str, Any], json_schema: Path | None, regex: str | None) -> dict[str, Any]:
    """Options of a generation. Raises UsageError."""
    named = ("max_new_tokens", "top_p", "top_k", "min_p", "seed")
    penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    return {
        **{name: given[name] for name in (*named, *penalties)},
        "temperature": 0.0 if given["greedy"] else given["temperature"],
        "grammar": _grammar(json_schema, regex),
        "stop": tuple(given["stop"] or split_list(env_value("stop"))),
    }


async def answer_once(settings: ClientConfig, prompt: str, request: OneShotRequest) -> None:
    """Print the answer as it comes, or with --json one object at the end."""
    from swarm_client.client import SwarmClient

    # Raises for a wrong request before anything is loaded or dialled.
    GenerationOptions(**request.options, decoding=settings.decoding)
    messages = [{"role": "system", "content": request.system}] if request.system else []
    messages.append({"role": "user", "content": prompt})
    check_messages(messages)
    async with (
        SwarmClient(config=settings) as client,
        client.chat_stream(messages, **request.options) as stream,
    ):
        async for chunk in stream:
            if not request.as_json:
                sys.stdout.write(chunk.text)
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
                f"[{answer.exposure}]\n"
            )


def _one_prompt(argument: str | None, flag: str | None, as_json: bool) -> str | None:
    """The prompt to answer once; None opens the interactive terminal. Raises UsageError."""
    if argument is not None and flag is not None:
        raise UsageError("the prompt is given twice; use the argument or --prompt")
    prompt = argument if argument is not None else flag
    if prompt is not None:
        return prompt
    piped = sys.stdin is None or not sys.stdin.isatty()
    text = sys.stdin.read() if piped and sys.stdin is not None else ""
    if text.strip():
        return text.rstrip("\n")
    if as_json:
        raise UsageError("--json answers one prompt; give it with --prompt")
    if piped:
        raise UsageError("there is no prompt and stdin is empty; give one with --prompt, or run it in a terminal")
    return None


def _grammar(json_schema: Path | None, regex: str | None) -> Grammar | None:
    """What the answer must match. Raises UsageError."""
    if json_schema is None:
        return Grammar(GrammarKind.REGEX, regex) if regex is not None else None
    if regex is not None:
        raise UsageError("an answer matches --json-schema or --regex, not both")
    try:
        with json_schema.open(encoding="utf-8") as file:
            schema = file.read(MAX_GRAMMAR_LENGTH + 1)
        json.loads(schema)
    except OSError as error:
        raise UsageError(f"cannot read {json_schema}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{json_schema} is no JSON schema of at most {MAX_GRAMMAR_LENGTH} characters: {error}"
        ) from None
    return Grammar(GrammarKind.JSON_SCHEMA, schema)


def _fail(error: SwarmError, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps({"error": error.code, "message": str(error)}) + "\n")
    sys.stderr.write(f"swarm-chat: {error}\n")
    raise typer.Exit(error.exit_code)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
