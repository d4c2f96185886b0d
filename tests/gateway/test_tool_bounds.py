"""What requests may say of tools."""

from __future__ import annotations

import re
from typing import Any

import pytest

from swarm.errors import InvalidRequest
from swarm_gateway.chat.events import ChatRequest, ToolChoice, ToolChoiceMode, ToolDefinition
from swarm_gateway.tools.validate import MAX_TOOLS, check_tools, new_call_id


def request(*tools: ToolDefinition, choice: ToolChoice = ToolChoice()) -> ChatRequest:
    return ChatRequest("m", (), tools=tools, tool_choice=choice)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"properties": schema}
    return {"type": "object", **schema}


def test_good_tools() -> None:
    check_tools(request())
    many = [ToolDefinition(f"t-{i}_A", "d" * 100, {"type": "object"}) for i in range(MAX_TOOLS)]
    check_tools(request(*many, choice=ToolChoice(ToolChoiceMode.REQUIRED, "t-5_A")))


@pytest.mark.parametrize(
    ("tools", "complaint"),
    [
        ([ToolDefinition(f"t{i}") for i in range(MAX_TOOLS + 1)], "129 tools"),
        ([ToolDefinition("")], "tool name ''"),
        ([ToolDefinition("a b")], "tool name 'a b'"),
        ([ToolDefinition("f\n")], "tool name"),
        ([ToolDefinition("x" * 65)], "tool name"),
        ([ToolDefinition("twice"), ToolDefinition("twice")], "tool twice"),
        ([ToolDefinition("wordy", "d" * 5000)], "tool wordy"),
        ([ToolDefinition("big", parameters={"type": "object", "title": "t" * 40_000})], "tool big"),
        ([ToolDefinition(f"t{i}", parameters={"title": "t" * 30_000}) for i in range(3)], "together"),
        ([ToolDefinition("deep", parameters=nested(100_000))], "tool deep"),
        ([ToolDefinition("odd", parameters={"default": float("nan")})], "tool odd"),
        ([ToolDefinition("odd", parameters={"default": object()})], "tool odd"),
        ([ToolDefinition("array", parameters={"type": "array"})], "tool array"),
    ],
)
def test_bad_tools(tools: list[ToolDefinition], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(complaint)):
        check_tools(request(*tools))


@pytest.mark.parametrize("choice", [ToolChoice(ToolChoiceMode.REQUIRED), ToolChoice(ToolChoiceMode.REQUIRED, "g")])
def test_choices_of_what_there_is_not(choice: ToolChoice) -> None:
    with pytest.raises(InvalidRequest, match="tool_choice"):
        check_tools(request(choice=choice))


def test_call_ids() -> None:
    assert new_call_id(lambda n: bytes(range(n))) == "call_ABCDEFGHIJKLMNOPQRSTUVWX"
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch(r"call_[A-Za-z0-9_-]{24}", made) for made in ids)
