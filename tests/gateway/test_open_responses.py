"""The cases of Open Responses' compliance test (openresponses.org/compliance), against a gateway without a model.

Where it asks for what a text model cannot do (an image), the refusal must be a 400 that says so.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from scripted import KEYS, Script, serving

from swarm_gateway.chat.events import OutputEvent, TextDelta, ToolCallDelta

FIELDS = (  # required by the schema of its ResponseResource
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id"),
    *("instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p"),
    *("presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "user", "usage"),
    *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata"),
    *("safety_identifier", "prompt_cache_key"),
)

TEXT = (TextDelta("1 2 "), TextDelta("3"))
CALL = (ToolCallDelta(0, "c1", "get_weather"), ToolCallDelta(0, arguments='{"location":"Ulm"}'))
LOCATION = {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]}
TOOLS = [{"type": "function", "name": "get_weather", "description": "Weather of a place", "parameters": LOCATION}]


def said(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


CASES: dict[str, tuple[dict[str, Any], tuple[OutputEvent, ...]]] = {
    "basic-response": ({"input": [said("user", "Greet me in three words.")]}, TEXT),
    "streaming-response": ({"input": [said("user", "Count to three.")], "stream": True}, TEXT),
    "system-prompt": ({"input": [said("system", "Talk like a pirate."), said("user", "Greet me.")]}, TEXT),
    "tool-calling": ({"input": [said("user", "Is it raining in Ulm?")], "tools": TOOLS}, CALL),
    "tool-calling-streaming": ({"input": [said("user", "Rain in Ulm?")], "tools": TOOLS, "stream": True}, CALL),
    "multi-turn": (
        {"input": [said("user", "I am Ada."), said("assistant", "Hello Ada."), said("user", "Who am I?")]},
        TEXT,
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_compliance(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body, events = CASES[case]
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    async with (
        serving(Script(events), monkeypatch) as url,
        httpx.AsyncClient(base_url=url, headers=headers) as http,
    ):
        answer = await http.post("/v1/responses", json={"model": "scripted", **body})
    assert answer.status_code == 200
    if not body.get("stream"):
        check(answer.json(), events)
        return
    assert answer.headers["content-type"].startswith("text/event-stream")
    streamed = []
    for frame in filter(None, answer.text.split("\n\n")):
        name, _, data = frame.partition("\ndata: ")
        event = json.loads(data)
        assert name == f"event: {event['type']}"
        TypeAdapter(ResponseStreamEvent).validate_python(event)
        streamed.append(event)
    kinds = [event["type"] for event in streamed]
    delta = "function_call_arguments" if events is CALL else "output_text"
    wanted = ["response.created", "response.output_item.added", f"response.{delta}.delta", f"response.{delta}.done"]
    assert [kind for kind in kinds if kind in wanted[:3]][:3] == wanted[:3]
    assert kinds[-2:] == ["response.output_item.done", "response.completed"]
    check(streamed[-1]["response"], events)


def check(response: dict[str, Any], events: tuple[OutputEvent, ...]) -> None:
    assert set(FIELDS) <= set(response)
    typed = Response.model_validate(response)
    assert typed.status == "completed"
    assert [item.type for item in typed.output] == ["function_call" if events is CALL else "message"]


async def test_an_image_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [{"type": "input_text", "text": "What is this?"}, {"type": "input_image", "image_url": "data:image/png;,"}]
    async with serving(Script(TEXT), monkeypatch, keys=()) as url, httpx.AsyncClient(base_url=url) as http:
        answer = await http.post("/v1/responses", json={"model": "scripted", "input": [said("user", parts)]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "input[0].content[1]")
    assert "the models here read text" in error["message"]
