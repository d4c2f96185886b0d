"""The Responses API without a network: requests become ChatRequests, events validate by the openai package's types."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from openai._types import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from pydantic import TypeAdapter

from swarm.types import TokenLogprobs
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
from swarm_gateway.responses.answers import ResponseAnswer
from swarm_gateway.responses.items import canonical_items
from swarm_gateway.responses.requests import ResponsesBody, chat_request, check_served

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ITEMS: TypeAdapter[Any] = TypeAdapter(list[ResponseItem])
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
OTHER = {**WEATHER, "name": "other", "strict": True}


def body(**fields: Any) -> ResponsesBody:
    return decode(json.dumps({"model": "m", "input": "hi", **fields}).encode(), ResponsesBody)


def parsed(**fields: Any) -> ChatRequest:
    request = body(**fields)
    check_served(request)
    items = canonical_items(request.input)
    ITEMS.validate_python(items)
    return chat_request(request, items)


def answered(events: list[AnswerEvent], **fields: Any) -> tuple[list[dict[str, Any]], Response]:
    """The stream's events, all validated and numbered, and the response; what the SDK accumulates is the same."""
    writer = ResponseAnswer(body(**fields), "m", lambda token: f"<{token}>")
    written = [*writer.start(), *(each for event in events for each in writer.push(event))]
    assert [event["sequence_number"] for event in written] == list(range(len(written)))
    state = ResponseStreamState(input_tools=omit, text_format=omit)
    typed = [EVENTS.validate_python(each) for each in written]
    for event in typed:
        state.handle_event(event)
    whole = Response.model_validate(writer.response())
    if whole.status == "completed":
        accumulated = state._completed_response
        assert accumulated is not None
        assert accumulated.output_text == whole.output_text
        assert [item.type for item in accumulated.output] == [item.type for item in whole.output]
    assert typed[-1].response.model_dump() == whole.model_dump()
    return written, whole


def ended(cause: StopCause) -> Finished:
    return Finished(cause, TokenUsage(10, 20, 4, 3))


def test_items_become_messages() -> None:
    request = parsed(
        instructions="Be kind.",
        input=[
            {"role": "developer", "content": "Be short."},
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "weather?"}, {"type": "input_text", "text": "now"}],
            },
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "ask"}]},
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
            },
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Ulm"}'},
            {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": ""},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
        ],
    )
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}},
        {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": {}}},
    ]
    assert list(request.messages) == [
        {"role": "system", "content": "Be kind.\nBe short."},
        {"role": "user", "content": "weather?\nnow"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "ask", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "sun"},
    ]


@pytest.mark.parametrize(
    ("choice", "wanted", "tools"),
    [
        ("none", ToolChoice(ToolChoiceMode.NONE), 2),
        ("required", ToolChoice(ToolChoiceMode.REQUIRED), 2),
        ({"type": "function", "name": "other"}, ToolChoice(ToolChoiceMode.REQUIRED, "other"), 2),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]},
            ToolChoice(),
            1,
        ),
    ],
)
def test_tool_choice(choice: Any, wanted: ToolChoice, tools: int) -> None:
    request = parsed(tools=[WEATHER, OTHER], tool_choice=choice, parallel_tool_calls=False)
    assert (request.tool_choice, len(request.tools)) == (wanted, tools)
    assert request.tools[-1].strict
    assert not request.parallel_tool_calls


def test_options_formats_and_reasoning() -> None:
    request = parsed(
        max_output_tokens=5,
        temperature=0,
        top_p=0.5,
        top_logprobs=3,
        include=["message.output_text.logprobs"],
        reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    )
    assert request.options == {"max_new_tokens": 5, "temperature": 0.0, "top_p": 0.5, "logprobs": 3}
    assert request.template_options == {"enable_thinking": True, "reasoning_effort": "low"}
    assert request.grammar is not None
    assert json.loads(request.grammar.source) == {"type": "object"}
    assert parsed(text={"format": {"type": "json_object"}}).grammar is not None
    assert parsed(text={"format": {"type": "text"}}).grammar is None
    assert parsed(reasoning={"effort": "none"}).template_options == {"enable_thinking": False}
    assert "logprobs" not in parsed(top_logprobs=3).options


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "read text"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input_file"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1]"}]}, "an object"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}, "an object"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "no function_call"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "mcp"),
        ({"tools": [WEATHER, WEATHER]}, "unique"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "schema"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True, "store": False}, "background"),
        ({"top_logprobs": 21}, "top_logprobs"),
    ],
)
def test_refusals_say_what_is_wrong(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError) as caught:
        parsed(**fields)
    assert caught.value.status == 400
    assert words in caught.value.message


def test_reasoning_text_and_calls_in_one_stream() -> None:
    written, response = answered(
        [
            ReasoningDelta("hm"),
            WaitingForChain("a node is gone"),
            ReasoningDelta("m"),
            TextDelta("I "),
            TextDelta("look"),
            ToolCallDelta(0, "c1", "weather"),
            ToolCallDelta(0, arguments='{"city":'),
            ToolCallDelta(0, arguments='"Ulm"}'),
            ToolCallDelta(1, "c2", "weather", "{}"),
            ended(StopCause.TOOL_CALLS),
        ],
        tools=[WEATHER],
    )
    reasoning, message, first, second = response.output
    assert (reasoning.content[0].text, message.content[0].text) == ("hmm", "I look")
    assert (first.call_id, first.arguments, second.arguments) == ("c1", '{"city":"Ulm"}', "{}")
    assert response.status == "completed"
    usage = response.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.input_tokens_details.cached_tokens) == (10, 20, 4)
    assert usage.output_tokens_details.reasoning_tokens == 3
    kinds = [event["type"] for event in written]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4


def test_logprobs_are_in_deltas_and_in_the_whole() -> None:
    entry = TokenLogprobs(5, -0.5, ((5, -0.5), (6, float("-inf"))))
    written, response = answered(
        [TextDelta("", (entry,)), TextDelta("a", (entry,)), TextDelta("", (entry,)), ended(StopCause.END_OF_TURN)],
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    content = response.output[0].content[0]
    assert [logprob.token for logprob in content.logprobs] == ["<5>", "<5>", "<5>"]
    assert content.logprobs[0].top_logprobs[1].logprob == -9999.0
    assert sum(len(e["logprobs"]) for e in written if e["type"] == "response.output_text.delta") == 3


def test_cut_off_cancelled_failed_and_empty() -> None:
    _, cut = answered([TextDelta("x"), ended(StopCause.LENGTH)])
    assert (cut.status, cut.output[0].status) == ("incomplete", "incomplete")
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    _, empty = answered([ended(StopCause.END_OF_TURN)])
    assert (empty.status, empty.output_text, len(empty.output)) == ("completed", "", 1)
    writer = ResponseAnswer(body(), "m", str)
    writer.push(TextDelta("x"))
    events = writer.fail(ApiError(429, "node_busy", "full"))
    assert [EVENTS.validate_python(e).type for e in events][-2:] == ["error", "response.failed"]
    failed = Response.model_validate(writer.response())
    assert failed.error is not None
    assert (failed.status, failed.error.code) == ("failed", "rate_limit_exceeded")
    writer = ResponseAnswer(body(), "m", str)
    writer.push(TextDelta("x"))
    writer.cancel()
    assert Response.model_validate(writer.response()).output_text == "x"
    assert writer.done


def test_a_snapshot_has_the_text_so_far() -> None:
    writer = ResponseAnswer(body(), "m", str)
    writer.start()
    for text in "ab":
        writer.push(TextDelta(text))
    half = Response.model_validate(writer.response())
    assert (half.status, half.output_text, half.output[0].status) == ("in_progress", "ab", "in_progress")


def test_any_order_of_events_gives_a_valid_stream() -> None:
    rng = random.Random(2)
    for _ in range(100):
        events: list[AnswerEvent] = []
        calls = 0
        for _ in range(rng.randrange(12)):
            kind = rng.randrange(4)
            if kind == 2:
                events += [ToolCallDelta(calls, f"c{calls}", "f"), ToolCallDelta(calls, arguments="{}")]
                calls += 1
            else:
                events.append((TextDelta("a"), ReasoningDelta("b"), TextDelta(""), WaitingForChain("w"))[kind])
        _, response = answered([*events, ended(rng.choice([StopCause.END_OF_TURN, StopCause.LENGTH]))])
        texts = "".join(event.text for event in events if isinstance(event, TextDelta))
        assert response.output_text == texts
        assert sum(item.type == "function_call" for item in response.output) == calls
