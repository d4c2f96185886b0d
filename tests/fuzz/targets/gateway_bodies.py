"""Bodies of the gateway's APIs: understood, or refused with a status of the caller's making."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from swarm.errors import SwarmError
from swarm_gateway.anthropic.requests import CountTokensBody, MessagesBody, chat_request, prompt_request
from swarm_gateway.errors import ApiError
from swarm_gateway.http.body import decode
from swarm_gateway.openai import chat
from swarm_gateway.openai.requests import ChatCompletionRequest
from swarm_gateway.responses import requests as responses
from swarm_gateway.responses.items import canonical_items

INSTRUMENT = ("swarm_gateway",)


def _messages(body: bytes) -> None:
    prompt_request(decode(body, CountTokensBody))
    chat_request(decode(body, MessagesBody))


def _responses(body: bytes) -> None:
    request = decode(body, responses.ResponsesBody)
    responses.check_served(request)
    responses.chat_request(request, canonical_items(request.input))


def _chat(body: bytes) -> None:
    chat.chat_request(decode(body, ChatCompletionRequest), "m")


_APIS: tuple[Callable[[bytes], None], ...] = (_messages, _responses, _chat)


def run(data: bytes) -> None:
    for understand in _APIS:
        status = 400
        try:
            understand(data)
        except ApiError as error:
            status = error.status
        except SwarmError:
            continue
        assert 400 <= status < 500


def seeds() -> Iterator[bytes]:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    tool = {"name": "f", "description": "d", "input_schema": schema}
    function = {"name": "f", "description": "d", "parameters": schema}
    bodies: tuple[dict[str, Any], ...] = (
        {
            "model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": "b"}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "r"}]},
            ],
            "tools": [tool], "tool_choice": {"type": "tool", "name": "f"}, "stop_sequences": ["a"], "temperature": 0.5,
            "thinking": {"type": "enabled", "budget_tokens": 2000},
        },
        {
            "model": "m", "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "o"},
            ],
            "tools": [{"type": "function", **function, "strict": True}],
            "text": {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
            "metadata": {"k": "v"}, "max_output_tokens": 5, "top_logprobs": 2,
        },
        {
            "model": "m", "messages": [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": None, "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
                {"role": "tool", "tool_call_id": "c", "content": "y"},
            ],
            "tools": [{"type": "function", "function": function}], "logit_bias": {"5": 1.5}, "stop": ["a"], "n": 2,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}, "seed": 3,
            "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 7, "temperature": 0.1,
        },
    )  # fmt: skip
    yield from (msgspec.json.encode(body) for body in bodies)
