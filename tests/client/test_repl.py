"""The terminal client against a scripted swarm: what each line shows, and that nothing ends the program but /quit."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from swarm.errors import NoRoute
from swarm.planner.generation.state_machine import FinishReason
from swarm.types import Chain, Hop
from swarm_client.api.outline_report import OutlineReport, PointReport
from swarm_client.api.results import GenerationResult, TextChunk
from swarm_client.auditing.result import AuditResult
from swarm_client.cli.conversation import Conversation
from swarm_client.cli.repl import ChatRepl, Quit

CHAIN = Chain((Hop("peer-aaaaaa", 0, 3), Hop("peer-bbbbbb", 3, 5)), 12.0)


class ScriptedStream:
    def __init__(self, words: Sequence[str], hang: bool = False, outline: OutlineReport | None = None) -> None:
        self.words, self.hang, self.shown, self.outline = words, hang, 0, outline

    async def __aenter__(self) -> ScriptedStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def __aiter__(self) -> AsyncIterator[TextChunk]:
        for i, word in enumerate(self.words):
            self.shown += 1
            yield TextChunk(word, (i,), ((0.1, 2.0), (0.2, 3.0)))
            if self.hang:
                await asyncio.sleep(60)

    @property
    def result(self) -> GenerationResult:
        text = "".join(self.words[: self.shown])
        return GenerationResult(
            text, tuple(range(self.shown)), (7,), FinishReason.EOS, 10.0, 0.5, CHAIN, "sequential", 3,
            "the only chain", hop_ms=((0.1, 2.0), (0.2, 3.0)), network_ms=1.5, outline=self.outline,
        )  # fmt: skip


class ScriptedClient:
    def __init__(self) -> None:
        self.asked: list[list[Mapping[str, str]]] = []
        self.hang = False
        self.outline: OutlineReport | None = None
        self.options: dict[str, Any] = {}
        self.error: Exception | None = None
        self.findings: list[AuditResult] = []

    def audit_findings(self) -> list[AuditResult]:
        found, self.findings = self.findings, []
        return found

    def chat_stream(self, messages: list[Mapping[str, str]], **options: Any) -> ScriptedStream:
        self.options = options
        if self.error is not None:
            raise self.error
        self.asked.append(messages)
        return ScriptedStream(["Hello", " there"], self.hang, self.outline)


@pytest.fixture
def chat() -> SimpleNamespace:
    out, client = io.StringIO(), ScriptedClient()
    console = Console(file=out, width=100, highlight=False)
    talk = ChatRepl(client, Conversation("tiny"), {}, console)  # type: ignore[arg-type]
    return SimpleNamespace(chat=talk, client=client, out=out)


async def test_an_answer_is_streamed_and_remembered(chat: SimpleNamespace) -> None:
    await chat.chat.handle("hi")
    assert "Hello there" in chat.out.getvalue()
    assert "10.0 tokens/s" in chat.out.getvalue()
    assert "aaaaaa[0:3] -> bbbbbb[3:5]" in chat.out.getvalue()
    await chat.chat.handle("again")
    assert [m["content"] for m in chat.client.asked[1]] == ["hi", "Hello there", "again"]


async def test_what_audits_found_is_said_once(chat: SimpleNamespace) -> None:
    chat.client.findings = [
        AuditResult(liars=("peer-bbbbbb",), reason="two other nodes contradict it"),
        AuditResult(disputed=("peer-cccccc", "peer-dddddd")),
    ]
    await chat.chat.handle("hi")
    shown = " ".join(chat.out.getvalue().split())
    assert "node peer-bbbbbb failed the audit of an earlier answer (two other nodes contradict it)" in shown
    assert "which of peer-cccccc and peer-dddddd is right" in shown
    await chat.chat.handle("again")
    assert " ".join(chat.out.getvalue().split()).count("failed the audit") == 1


async def test_system_reset_save_and_load(chat: SimpleNamespace, tmp_path: Path) -> None:
    await chat.chat.handle("/system Be brief.")
    await chat.chat.handle("hi")
    assert chat.client.asked[0][0] == {"role": "system", "content": "Be brief."}
    await chat.chat.handle(f"/save {tmp_path / 'talk.json'}")
    await chat.chat.handle("/reset")
    assert chat.chat.conversation.turns == []
    await chat.chat.handle(f"/load {tmp_path / 'talk.json'}")
    assert chat.chat.conversation.turns == [("user", "hi"), ("assistant", "Hello there")]
    assert chat.chat.conversation.system == "Be brief."


async def test_chain_and_stats_explain_the_last_answer(chat: SimpleNamespace) -> None:
    await chat.chat.handle("/stats")
    assert "nothing has been answered yet" in chat.out.getvalue()
    await chat.chat.handle("hi")
    await chat.chat.handle("/chain")
    await chat.chat.handle("/stats")
    shown = chat.out.getvalue()
    assert "the only chain" in shown
    assert "3.00" in shown
    assert "1.50" in shown


async def test_errors_are_shown_and_the_chat_continues(chat: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"model": 3}')
    chat.client.error = NoRoute("no node serves layers 3:5", ((3, 5),))
    for line in ("/nonsense", "/load", "/load /no/such/file", f"/load {tmp_path / 'bad.json'}", "hi", ""):
        await chat.chat.handle(line)
    shown = " ".join(chat.out.getvalue().split())  # a long name of a file may have broken a line
    for sentence in ("there is no /nonsense", "needs a file name", "cannot read", "not a saved conversation", "3:5"):
        assert sentence in shown


async def test_cancelling_stops_the_answer_and_keeps_its_text(chat: SimpleNamespace) -> None:
    chat.client.hang = True
    task = asyncio.create_task(chat.chat.handle("hi"))
    await asyncio.sleep(0.02)
    task.cancel()
    await task
    assert "stopped" in chat.out.getvalue()
    assert chat.chat.conversation.turns == [("user", "hi"), ("assistant", "Hello")]


async def test_retry_answers_the_last_prompt_again(chat: SimpleNamespace) -> None:
    await chat.chat.handle("/retry")
    assert "nothing has been answered yet" in chat.out.getvalue()
    await chat.chat.handle("one")
    await chat.chat.handle("two")
    await chat.chat.handle("/retry")
    assert chat.client.asked[1] == chat.client.asked[2]
    assert [text for _, text in chat.chat.conversation.turns] == ["one", "Hello there", "two", "Hello there"]
    chat.client.error = NoRoute("no node serves layers 3:5", ((3, 5),))
    await chat.chat.handle("/retry")
    assert [text for _, text in chat.chat.conversation.turns] == ["one", "Hello there", "two", "Hello there"]


async def test_the_strategy_can_be_changed_and_points_are_shown(chat: SimpleNamespace) -> None:
    point = PointReport("[b]Sea", "wet", (1, 2), (3,) * 40, FinishReason.EOS, 1.0, 1.5, 4.0, 33, 32, "sequential", 1)
    chat.client.outline = OutlineReport(True, "it has parts", "list", "1. Sea", 9, 1.25, (point, point))
    await chat.chat.handle("/decoding")
    await chat.chat.handle("/decoding magic")
    await chat.chat.handle("hi")
    assert "decoding" not in chat.client.options
    await chat.chat.handle("/decoding outline")
    await chat.chat.handle("hi")
    assert chat.client.options["decoding"] == "outline"
    await chat.chat.handle("/stats")
    shown = chat.out.getvalue()
    for words in ("decoding is 'magic'", "2 points after an outline of 9 tokens", "add up to 6.0 s", "[b]Sea", "4.00"):
        assert words in shown
    chat.client.outline = OutlineReport(False, "a fact is a short answer")
    await chat.chat.handle("hi")
    assert "no outline: a fact is a short answer" in chat.out.getvalue()


async def test_quit(chat: SimpleNamespace) -> None:
    with pytest.raises(Quit):
        await chat.chat.handle("/quit")
