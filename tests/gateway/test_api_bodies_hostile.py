"""Whatever stands in a body: the Messages and Responses APIs understand it or refuse it with a 4xx, and soon."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm_gateway.anthropic.requests import CountTokensBody, MessagesBody, chat_request, prompt_request
from swarm_gateway.chat.events import ChatRequest
from swarm_gateway.chat.turns import Turns
from swarm_gateway.errors import MAX_MESSAGE, ApiError
from swarm_gateway.http.body import decode
from swarm_gateway.responses import requests as responses
from swarm_gateway.responses.answers import ResponseAnswer
from swarm_gateway.responses.items import canonical_items

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
MESSAGES: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "s"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "tool_use", "id": "t", "name": "f", "input": {"a": "b"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "r", "is_error": False}]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA, "strict": True}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 2000, "display": "omitted"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    "stop_sequences": ["a"],
    "stream": False,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
}
RESPONSES: dict[str, Any] = {
    "model": "m",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}], "id": "i"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "o"},
    ],
    "instructions": "i",
    "include": ["message.output_text.logprobs"],
    "tools": [{"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "metadata": {"k": "v"},
    "max_output_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_logprobs": 2,
    "truncation": "auto",
    "user": "u",
    "store": True,
    "stream": False,
    "parallel_tool_calls": True,
}
ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 1 << 70, 1e308, "", "x", "\x00", "x" * 100_000, [], [None], [[]], [{}], {}),
    *({"type": "x"}, {"type": []}, {"": ""}, [1] * 20_000, {"type": "text", "text": 5}),
)


def understand_messages(body: bytes) -> ChatRequest:
    prompt_request(decode(body, CountTokensBody))
    return chat_request(decode(body, MessagesBody))


def understand_responses(body: bytes) -> ChatRequest:
    request = decode(body, responses.ResponsesBody)
    responses.check_served(request)
    items = canonical_items(request.input)
    understood = responses.chat_request(request, items)
    msgspec.json.encode([items, ResponseAnswer(request, "m", str).start()])  # what was accepted can be written again
    return understood


APIS = pytest.mark.parametrize(
    ("understand", "valid"),
    [(understand_messages, MESSAGES), (understand_responses, RESPONSES)],
    ids=["messages", "responses"],
)


def outcome(understand: Callable[[bytes], ChatRequest], body: Any) -> bool:
    """Whether it is understood; anything but an ApiError of the caller's making is a failure."""
    refusal = None
    try:
        understand(body if isinstance(body, bytes) else json.dumps(body).encode())
    except ApiError as error:
        refusal = error
    assert refusal is None or (400 <= refusal.status < 500 and len(refusal.message) <= MAX_MESSAGE)
    return refusal is None


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every value inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inner:
        yield (*path, key)
        yield from places(child, (*path, key))


def changed(valid: Any, path: tuple[Any, ...], value: Any) -> Any:
    body = copy.deepcopy(valid)
    parent = body
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return body


@APIS
def test_a_wrong_value_in_every_place(understand: Callable[[bytes], ChatRequest], valid: dict[str, Any]) -> None:
    assert outcome(understand, valid)
    understood = sum(outcome(understand, changed(valid, path, odd)) for path in places(valid) for odd in ODD)
    assert understood < len(list(places(valid))) * len(ODD)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.just("type"), inner, max_size=4)
    ),
    max_leaves=12,
)


@APIS
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_json_in_any_place(
    understand: Callable[[bytes], ChatRequest], valid: dict[str, Any], data: st.DataObject
) -> None:
    path = data.draw(st.sampled_from(list(places(valid))))
    outcome(understand, changed(valid, path, data.draw(JSON_VALUES)))


@APIS
def test_depth_and_length_are_bounded(understand: Callable[[bytes], ChatRequest], valid: dict[str, Any]) -> None:
    deep = json.dumps(valid).replace(json.dumps(SCHEMA), '{"a":' * 5_000 + "1" + "}" * 5_000).encode()
    assert not outcome(understand, deep)
    long = {
        "messages": [{"role": "user", "content": "x"}] * 10_001,
        "input": [{"role": "user", "content": "x"}] * 10_001,
    }
    assert not outcome(understand, {**valid, **{key: value for key, value in long.items() if key in valid}})


def test_pieces_of_a_turn_are_joined_in_linear_time() -> None:
    """Joined one by one, these would be copied 20 GB in all."""
    turns = Turns()
    begun = time.perf_counter()
    for _ in range(10_000):
        turns.say("user", "x" * 400)
        turns.say("user", "")
    (message,) = turns.messages()
    assert time.perf_counter() - begun < 1.0
    assert message["content"].count("x") == 4_000_000
