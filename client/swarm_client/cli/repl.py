"""The interactive terminal of `swarm-chat`. Owns input, commands and display; the tokens come from SwarmClient.

Enter sends, Alt-Enter (or Ctrl-J) starts a new line, Ctrl-C stops an answer, Ctrl-D quits.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.formatted_text import HTML
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarm import old_names
from swarm.config import ClientConfig, state_dir
from swarm.errors import SwarmError
from swarm.planner.generation.events import FinishReason
from swarm_client.api.options import GenerationOptions
from swarm_client.api.outline_report import OutlineReport
from swarm_client.api.results import GenerationResult, GenerationStream
from swarm_client.cli.answer_display import AnswerDisplay, without_echo
from swarm_client.cli.conversation import Conversation
from swarm_client.client import SwarmClient
from swarm_client.generation.audited_answer import MAX_REDONE
from swarm_client.generation.text_stream import TextStream

HELP = """\
/help              this text
/reset             forget the conversation (the system prompt stays); also /clear
/retry             answer the last prompt again
/system [TEXT]     show or set the system prompt
/save FILE         write the conversation as JSON
/load FILE         continue a saved one
/decoding [NAME]   show or set the decoding strategy: auto, sequential, tree, pipedec, pipelined-tree or outline
/chain             the nodes of the last answer, and why they were chosen
/stats             where the time of the last answer went
/quit              quit (so do /bye and Ctrl-D)

Enter sends; Alt-Enter or Ctrl-J starts a new line; Tab completes a command; Ctrl-C stops an answer."""


class Quit(Exception):
    """The user quits."""


@dataclass(slots=True)
class ChatRepl:
    """One interactive chat; `handle(line)` runs a command or sends a prompt."""

    client: SwarmClient
    conversation: Conversation
    options: Mapping[str, Any]
    console: Console
    decoding: str | None = None  # None: the config's
    last: GenerationResult | None = None
    answers: list[GenerationResult] = field(default_factory=list)

    async def handle(self, line: str) -> None:
        """Raises Quit; every SwarmError is shown, and the chat continues."""
        text = line.strip()
        if not text:
            return
        try:
            if text.startswith("/"):
                await self._command(text)
            else:
                await self._answer(text)
        except SwarmError as error:
            self.console.print(f"[red]{error}[/red]", highlight=False)

    @property
    def commands(self) -> dict[str, Callable[[str], Awaitable[None]]]:
        return {
            "/help": self._help,
            "/reset": self._reset,
            "/clear": self._reset,
            "/retry": self._retry,
            "/system": self._system,
            "/save": self._save,
            "/load": self._load,
            "/decoding": self._set_decoding,
            "/strategy": self._set_decoding,  # the deprecated name
            "/chain": self._chain,
            "/stats": self._stats,
            "/quit": self._quit,
            "/bye": self._quit,
        }

    async def _command(self, text: str) -> None:
        name, _, argument = text.partition(" ")
        command = self.commands.get(name)
        if command is None:
            self.console.print(f"there is no {name}; /help lists the commands", highlight=False, markup=False)
            return
        await command(argument.strip())

    async def _answer(self, text: str) -> None:
        options = {**self.options, "decoding": self.decoding} if self.decoding else self.options
        stream = self.client.chat_stream(self.conversation.messages(text), **options)
        stopped = await self._read(stream)
        for _ in range(MAX_REDONE):
            again = None if stopped else await self._redone(stream)
            if again is None:
                break
            stream = again
            stopped = await self._read(stream)
        self.last = answer = stream.result
        self.answers.append(answer)
        self.conversation.add(text, answer.text)
        for repair in answer.repairs:
            self.console.print(f"[yellow]lost {repair}; went on along another chain[/yellow]", highlight=False)
        self._show_findings()
        if answer.outline is not None:
            self.console.print(str(answer.outline), style="dim", highlight=False, markup=False, soft_wrap=True)
        self.console.print(
            f"[dim]{_end(answer, stopped)}{len(answer.token_ids)} tokens, "
            f"{answer.tokens_per_second:.1f} tokens/s, first after {answer.time_to_first_token_s:.2f} s, "
            f"{answer.chain}[/dim]",
            highlight=False,
            soft_wrap=True,
        )
        self.console.print(answer.exposure, style="dim", highlight=False, markup=False, soft_wrap=True)

    async def _read(self, stream: GenerationStream) -> bool:
        """-> whether it was stopped."""
        async with stream:
            try:
                await self._show(stream)
            except asyncio.CancelledError:
                _uncancel()
                return True
        return False

    async def _redone(self, stream: GenerationStream) -> GenerationStream | None:
        """The answer again if a hop of it was found to lie, by its own audit where it waits for that."""
        if not isinstance(stream, TextStream):
            return None
        audit = await stream.audited() if self.client.config.audits == "wait" else None
        again = stream.redone(audit)
        if again is not None:
            self.console.print(
                "[yellow]a node of this answer failed an audit; it is left, and here it is again:[/yellow]"
            )
        return again

    def _show_findings(self) -> None:
        """What audits of earlier answers have found."""
        for found in self.client.audit_findings():
            said = [
                (f"node {peer} failed the audit of an earlier answer ({found.reason}): do not trust that one", "red")
                for peer in found.liars
            ]
            if found.disputed:
                said.append((f"an audit could not decide which of {' and '.join(found.disputed)} is right", "dim"))
            for line, style in said:
                self.console.print(line, style=style, highlight=False, markup=False)

    async def _show(self, stream: GenerationStream) -> None:
        """Stream as markdown on a terminal, as plain text into a pipe."""
        if not self.console.is_terminal:
            async for chunk in stream:
                self.console.file.write(chunk.text)
                self.console.file.flush()
            self.console.file.write("\n")
            return
        with AnswerDisplay(self.console) as display:
            async for chunk in stream:
                display.add(chunk.text, chunk.waiting)

    async def _help(self, _: str) -> None:
        self.console.print(HELP, highlight=False, markup=False)

    async def _reset(self, _: str) -> None:
        self.conversation.reset()
        self.console.print("forgotten")

    async def _retry(self, _: str) -> None:
        turns = list(self.conversation.turns)
        prompt = self.conversation.take_back()
        if prompt is None:
            self.console.print("nothing has been answered yet")
            return
        try:
            await self._answer(prompt)
        except SwarmError:
            self.conversation.turns[:] = turns
            raise

    async def _system(self, text: str) -> None:
        if text:
            self.conversation.system = text
        shown = self.conversation.system or "(none: the model's own)"
        self.console.print(shown, highlight=False, markup=False)

    async def _save(self, path: str) -> None:
        if not path:
            self.console.print("/save needs a file name")
            return
        self.conversation.save(_path(path))
        self.console.print(f"saved to {path}", highlight=False, markup=False)

    async def _load(self, path: str) -> None:
        if not path:
            self.console.print("/load needs a file name")
            return
        self.conversation.load(_path(path))
        self.console.print(f"{len(self.conversation.turns)} turns loaded", highlight=False)

    async def _set_decoding(self, name: str) -> None:
        if name:
            _, name = old_names.current("decoding", name)
            GenerationOptions(decoding=name)
            self.decoding = name
        self.console.print(self.decoding or "(the config's)", highlight=False, markup=False)

    async def _chain(self, _: str) -> None:
        if self.last is None:
            self.console.print("nothing has been answered yet")
            return
        self.console.print(self.last.explanation, highlight=False, markup=False, soft_wrap=True)

    async def _stats(self, _: str) -> None:
        if self.last is None:
            self.console.print("nothing has been answered yet")
            return
        table = Table("hop", "layers", "queue ms", "compute ms", title="a step of the last answer")
        for hop, (queue, compute) in zip(self.last.chain.hops, self.last.hop_ms, strict=False):
            table.add_row(hop.peer[-6:], f"{hop.start}:{hop.end}", f"{queue:.2f}", f"{compute:.2f}")
        table.add_row("links", "", "", f"{self.last.network_ms:.2f}")
        self.console.print(table)
        if self.last.outline is not None and self.last.outline.used:
            self.console.print(_points(self.last.outline))
        tokens = sum(len(a.token_ids) for a in self.answers)
        self.console.print(
            f"strategy {self.last.strategy}, seed {self.last.seed}; "
            f"{len(self.answers)} answers, {tokens} tokens in this chat",
            highlight=False,
        )

    async def _quit(self, _: str) -> None:
        raise Quit


async def interact(settings: ClientConfig, system: str, options: Mapping[str, Any]) -> None:
    """The whole interactive program. Raises SwarmError when the swarm cannot be reached at the start."""
    console = Console(highlight=False)
    async with SwarmClient(config=settings) as client:
        snapshot = await client.snapshot()
        console.print(
            f"[bold]{client.config.model}[/bold]: {len(snapshot.serving())} nodes serve {snapshot.num_layers} layers. "
            "/help for help."
        )
        chat = ChatRepl(client, Conversation(client.config.model, system), options, console)
        prompts = _prompts(chat.commands)
        while True:
            try:
                line = await prompts.prompt_async(HTML("<b>&gt;&gt;&gt;</b> "))
                with _interruptible(), without_echo():
                    await chat.handle(line)
            except KeyboardInterrupt:
                continue  # Ctrl-C at the prompt clears the line
            except asyncio.CancelledError:
                _uncancel()  # Ctrl-C before the first token or after the last one
            except (EOFError, Quit):
                return


def _points(outline: OutlineReport) -> Table:
    table = Table("point", "tokens", "began s", "ended s", "prompt", "held", title="points of the last answer")
    for point in outline.points:
        counts = str(len(point.prompt_token_ids)), str(point.cached_tokens)
        title = Text(point.title)  # generated text is not markup
        table.add_row(title, str(len(point.token_ids)), f"{point.began_s:.2f}", f"{point.ended_s:.2f}", *counts)
    return table


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _end(answer: GenerationResult, stopped: bool) -> str:
    """How an answer that is not whole ended."""
    if stopped:
        return "stopped, "
    return "cut off at its limit, " if answer.finish_reason is FinishReason.LENGTH else ""


def _uncancel() -> None:
    """Clear a handled Ctrl-C: later timeouts of the task would take the pending cancellation for their own."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()


def _prompts(commands: Iterable[str]) -> PromptSession[str]:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    history = state_dir() / "chat_history"
    history.parent.mkdir(parents=True, exist_ok=True)
    history.touch(mode=0o600)
    history.chmod(0o600)  # what people ask is nobody else's business on a shared machine
    completer = WordCompleter(sorted(commands), sentence=True)
    return PromptSession(
        history=FileHistory(str(history)),
        multiline=True,
        key_bindings=keys,
        completer=completer,
        complete_while_typing=False,
    )


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """In the block, Ctrl-C cancels the current task instead of ending the program."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
