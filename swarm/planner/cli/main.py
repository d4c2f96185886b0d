"""`swarm-plan`: every decision of the planner without a swarm, JSON in and JSON out.

Owns files, flags, exit codes and stdout: exit 0 and one JSON object, or exit 2 and one JSON object
`{"error": code, "message": sentence, ...}`. The commands are in `commands`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TextIO, cast

import msgspec
import typer

from swarm.command_line import program
from swarm.errors import NoRoute, SwarmError, UsageError
from swarm.planner.cli.commands import COMMANDS, OLD_NAMES, Command, CommandResult, simulate
from swarm.planner.schemas import MAX_BYTES, field_list

CommandLineError = cast(
    type[Exception], typer.BadParameter.__base__
)  # base of errors about flags, arguments and commands

app = typer.Typer(
    name="swarm-plan",
    help="Plan without a swarm: reads a JSON file (- is stdin), prints one JSON object. See docs/guide/planner.md.",
    **program.SETTINGS,
)
app.callback()(program.options_of_all)

File = Annotated[str, typer.Argument(metavar="FILE", help="The request, as JSON; - reads stdin.")]
Explain = Annotated[bool, typer.Option("--explain", help="Add an explanation in plain words.")]


def _runner(command: Command[Any]) -> Callable[[str, bool], None]:
    def run(file: File, explain: Explain = False) -> None:
        _run_command(lambda: command.run(_read(file)), explain)

    return run


for _command in COMMANDS:
    _help = f"{_command.summary}\n\nThe request: {field_list(_command.request)}. docs/guide/planner.md has an example."
    app.command(_command.name, help=_help, short_help=_command.summary)(_runner(_command))
    if _command.name in OLD_NAMES:
        app.command(OLD_NAMES[_command.name], help=_help, hidden=True)(_runner(_command))


_SIMULATE = "Run a scenario, TOML or JSON: a seeded swarm of any size in virtual time."


@app.command("simulate", help=f"{_SIMULATE} benchmarks/scenarios has some.", short_help=_SIMULATE)
def _simulate(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The scenario; - reads stdin.")],
    explain: Explain = False,
    trace: Annotated[str | None, typer.Option(metavar="FILE", help="Write every event here, as JSON lines.")] = None,
) -> None:
    if trace is None:
        _run_command(lambda: simulate(_read(file)), explain)
        return
    try:
        with Path(trace).open("w", encoding="utf-8") as lines:
            _run_command(lambda: simulate(_read(file), lambda line: _write(lines, line)), explain)
    except OSError as error:
        _print_error(UsageError(f"cannot write {trace}: {error.strerror}"))
        raise typer.Exit(UsageError.exit_code) from None


def _write(stream: TextIO, line: str) -> None:
    stream.write(line + "\n")


def _run_command(decide: Callable[[], CommandResult], explain: bool) -> None:
    try:
        answer = decide()
    except SwarmError as error:
        _print_error(error)
        raise typer.Exit(error.exit_code) from None
    _print(answer.fields | ({"explanation": answer.explanation} if explain else {}))


def _read(file: str) -> bytes:
    """At most one byte more than allowed: enough to detect an input that is too long."""
    try:
        if file == "-":
            return sys.stdin.buffer.read(MAX_BYTES + 1)
        with Path(file).open("rb") as stream:
            return stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"cannot read {file}: {reason}") from None


def _print_error(error: SwarmError) -> None:
    fields: dict[str, Any] = {"error": error.code, "message": str(error)}
    if isinstance(error, NoRoute):
        fields["missing"] = [list(span) for span in error.missing]
    _print(fields)


def _print(fields: dict[str, Any]) -> None:
    """One line, or with an explanation one line for each field and sentence, for people to read."""
    explanation = fields.get("explanation")
    if explanation is None:
        text = _json(fields)
    else:
        lines = [f"  {_json(name)}: {_json(value)}," for name, value in fields.items() if name != "explanation"]
        sentences = ",\n".join(f"    {_json(sentence)}" for sentence in explanation)
        text = "\n".join(["{", *lines, '  "explanation": [', sentences, "  ]", "}"])
    sys.stdout.write(text + "\n")


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def main() -> None:
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except CommandLineError as error:
        _print_error(UsageError(f"{str(error).rstrip('.')}; see swarm-plan --help"))
        code = UsageError.exit_code
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
