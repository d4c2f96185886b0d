"""Anthropic's Messages API without a network: requests become ChatRequests, events validate by the package's types."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from pydantic import TypeAdapter

from swarm_gateway.anthropic.answers import MessageAnswer
from swarm_gateway.anthropic.errors import ERROR_TYPES, anthropic_error
from swarm_gateway.anthropic.requests import MessagesBody, chat_request
from swarm_gateway.chat.events import (
    AnswerEvent,
    ChatRequest,
    Finished,
    ReasoningDelta,
    StopCause,
    TextDelta,
    TokenUsage,
    ToolCallDelta,
    ToolChoice,
    ToolChoiceMode,
    WaitingForChain,
)
from swarm_gateway.errors import ApiError
from swarm_gateway.http.body import decode

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
WEATHER = {"name": "weather", "description": "of a city", "input_schema": {"type": "object", "properties": {}}}


def parsed(**fields: Any) -> ChatRequest:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **fields}
    return chat_request(decode(json.dumps(body).encode(), MessagesBody))


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parsed(**fields)
    assert caught.value.status == 400
    return caught.value


def answered(events: list[AnswerEvent], **options: Any) -> tuple[list[dict[str, Any]], Message]:
    """The stream's events, all validated, and what the SDK accumulates of them; the same as the whole message."""
    writer = MessageAnswer("m", 100, 7, **options)
    written = [*writer.start(), *(each for event in events for each in writer.push(event))]
    snapshot, buffers = None, {}
    for each in written:
        if each["type"] != "ping":
            snapshot = accumulate_event(
                event=EVENTS.validate_python(each), current_snapshot=snapshot, json_bufs=buffers
            )
    assert snapshot is not None
    whole = Message.model_validate(writer.message(), strict=True)
    assert Message.model_validate(snapshot.model_dump()).model_dump() == whole.model_dump()
    return written, whole


def ended(cause: StopCause, stop_string: str | None = None, completion: int = 100) -> Finished:
    return Finished(cause, TokenUsage(10, completion, 4, 3), stop_string)


def test_a_whole_conversation() -> None:
    request = parsed(
        system=[
            {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "kind."},
        ],
        messages=[
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "ask", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Ulm"}},
                    {"type": "tool_use", "id": "t2", "name": "weather", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                    {"type": "tool_result", "tool_use_id": "t2", "content": "no city", "is_error": True},
                    {"type": "text", "text": "well?"},
                ],
            },
        ],
        tools=[WEATHER],
    )
    calls = [
        {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}},
        {"id": "t2", "type": "function", "function": {"name": "weather", "arguments": {}}},
    ]
    assert list(request.messages) == [
        {"role": "system", "content": "Be\nkind."},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "ask", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "content": "rain"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no city"},
        {"role": "user", "content": "well?"},
    ]
    assert request.tools[0].name == "weather"


def test_turns_of_one_role_are_joined() -> None:
    request = parsed(messages=[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    assert request.messages == ({"role": "user", "content": "a\nb"},)


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"type": "auto"}, ToolChoice()),
        ({"type": "any"}, ToolChoice(ToolChoiceMode.REQUIRED)),
        ({"type": "tool", "name": "weather"}, ToolChoice(ToolChoiceMode.REQUIRED, "weather")),
        ({"type": "none"}, ToolChoice(ToolChoiceMode.NONE)),
    ],
)
def test_tool_choice(choice: dict[str, Any], wanted: ToolChoice) -> None:
    request = parsed(tools=[WEATHER], tool_choice={**choice, "disable_parallel_tool_use": True})
    assert request.tool_choice == wanted
    assert not request.parallel_tool_calls


def test_options_thinking_and_schema() -> None:
    request = parsed(
        stop_sequences=["END"],
        temperature=0.0,
        top_k=5,
        top_p=0.5,
        thinking={"type": "enabled", "budget_tokens": 2048},
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
        metadata={"user_id": "u"},
    )
    options = {"max_new_tokens": 9, "temperature": 0.0, "top_p": 0.5, "top_k": 5, "stop": ("END",)}
    assert request.options == options
    assert request.template_options == {"enable_thinking": True}
    assert request.grammar is not None
    assert json.loads(request.grammar.source) == {"type": "object"}
    assert parsed(output_format={"type": "json_schema", "schema": {}}).grammar is not None
    assert parsed().options["temperature"] == 1.0
    assert parsed(thinking={"type": "disabled"}).template_options == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "read text"),
        ({"messages": [{"role": "user", "content": [{"type": "server_tool_use"}]}]}, "server_tool_use"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "thinking"),
        ({"messages": [{"role": "assistant", "content": "The answer is ("}]}, "the user's"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [WEATHER, WEATHER]}, "unique"),
        ({"tools": [{**WEATHER, "name": "no spaces"}]}, "tools"),
        ({"tools": [{**WEATHER, "input_schema": {"x": "y" * 70_000}}]}, "longer"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"temperature": 1.5}, "temperature"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1}}, "budget_tokens"),
    ],
)
def test_refusals_say_what_is_wrong(fields: dict[str, Any], words: str) -> None:
    assert words in refused(**fields).message


def test_text_thinking_and_calls_in_one_stream() -> None:
    written, message = answered(
        [
            ReasoningDelta("hm"),
            ReasoningDelta("m"),
            WaitingForChain("a node is gone"),
            TextDelta("I "),
            TextDelta(""),
            TextDelta("look"),
            ToolCallDelta(0, "t1", "weather"),
            ToolCallDelta(0, arguments='{"city": '),
            ToolCallDelta(0, arguments='"Ulm"}'),
            ToolCallDelta(1, "t2", "weather", "{}"),
            ended(StopCause.TOOL_CALLS),
        ]
    )
    thinking, text, first, second = message.content
    assert (thinking.thinking, text.text) == ("hmm", "I look")
    assert thinking.signature
    assert (first.input, first.id, second.input) == ({"city": "Ulm"}, "t1", {})
    assert message.stop_reason == "tool_use"
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (6, 4, 100)
    kinds = [event["type"] for event in written]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    assert written[0]["message"]["usage"]["input_tokens"] == 7


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (ended(StopCause.END_OF_TURN), "end_turn"),
        (ended(StopCause.STOP_STRING, "END"), "stop_sequence"),
        (ended(StopCause.LENGTH), "max_tokens"),
        (ended(StopCause.LENGTH, completion=99), "model_context_window_exceeded"),
    ],
)
def test_stop_reasons(event: Finished, reason: str) -> None:
    _, message = answered([TextDelta("x"), event])
    assert (message.stop_reason, message.stop_sequence) == (reason, event.stop_string)


def test_hidden_thinking_has_a_signature_alone() -> None:
    written, message = answered(
        [ReasoningDelta("secret"), TextDelta("x"), ended(StopCause.END_OF_TURN)], shows_thinking=False
    )
    assert message.content[0].thinking == ""
    assert "secret" not in json.dumps(written)


def test_any_order_of_events_gives_a_valid_stream() -> None:
    """However events come, stream and whole are the same and no text is lost."""
    rng = random.Random(1)
    for _ in range(100):
        events: list[AnswerEvent] = []
        calls = 0
        for _ in range(rng.randrange(12)):
            kind = rng.randrange(4)
            if kind == 2:
                events += [ToolCallDelta(calls, f"t{calls}", "f"), ToolCallDelta(calls, arguments='{"a":1}')]
                calls += 1
            else:
                events.append([TextDelta("a"), ReasoningDelta("b"), None, WaitingForChain("w")][kind])  # type: ignore[list-item]
        _, message = answered([*events, ended(StopCause.END_OF_TURN)])
        texts = "".join(block.text for block in message.content if block.type == "text")
        assert texts == "".join(event.text for event in events if isinstance(event, TextDelta))
        assert sum(block.type == "tool_use" for block in message.content) == calls


def test_a_call_that_was_cut_off_has_no_input() -> None:
    writer = MessageAnswer("m", 100)
    for event in (ToolCallDelta(0, "t", "f", '{"a": [1,'), ended(StopCause.LENGTH)):
        writer.push(event)
    assert writer.message()["content"][0]["input"] == {}


@pytest.mark.parametrize("status", [*ERROR_TYPES, 402, 418, 500, 502])
def test_every_status_has_an_error_type(status: int) -> None:
    ErrorResponse.model_validate(anthropic_error(ApiError(status, "x", "y"), "req_1"), strict=True)
