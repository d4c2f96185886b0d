"""Tool calls and JSON schemas end to end: SmolLM2 over three nodes, real grammars and parsers, the APIs' clients."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jsonschema
import openai
import pytest
from anthropic import AsyncAnthropic
from gateway_swarm import MODEL, GatewayUnderTest, gateway_swarm

from swarm_kernels.tokenizer.tokenizer import load_tokenizer

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

SMALL = {"type": "string", "maxLength": 12}
WEATHER = {
    "type": "object",
    "properties": {
        "city": SMALL,
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
CLOCK = {"type": "object", "properties": {"zone": SMALL}, "required": ["zone"], "additionalProperties": False}
SCHEMAS = {"weather": WEATHER, "clock": CLOCK}
PERSON = {
    "type": "object",
    "properties": {
        "name": SMALL,
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": SMALL, "maxItems": 2},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
ASK: list[Any] = [{"role": "user", "content": "How is the weather in Ulm for the next 3 days? Use a tool."}]
OPENAI_TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": name, "description": f"The {name}.", "parameters": schema, "strict": True},
    }
    for name, schema in SCHEMAS.items()
]
ANTHROPIC_TOOLS: list[Any] = [
    {"name": name, "description": f"The {name}.", "input_schema": schema} for name, schema in SCHEMAS.items()
]
NAMED = {"type": "function", "function": {"name": "clock"}}


@asynccontextmanager
async def smollm2(source: Any) -> AsyncIterator[GatewayUnderTest]:
    tokenizer = load_tokenizer(source)
    async with gateway_swarm(source=source, tokenizer=tokenizer, borders=(10, 20), sockets=True) as gateway:
        yield gateway


def anthropic_client(gateway: GatewayUnderTest) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=str(gateway.http.base_url).rstrip("/"), api_key="none", max_retries=0)


async def test_tool_calls_of_both_apis(real_model: Any) -> None:
    async with smollm2(real_model) as gateway:
        for choice in ("required", "named", "auto"):
            await openai_round_trip(gateway.openai(), choice)
        async with anthropic_client(gateway) as api:
            for choice in ("any", "tool", "auto"):
                await anthropic_round_trip(api, choice)


async def openai_round_trip(api: openai.AsyncOpenAI, choice: str) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": ASK, "tools": OPENAI_TOOLS, "temperature": 0}
    asked |= {"max_tokens": 80, "tool_choice": NAMED if choice == "named" else choice, "parallel_tool_calls": False}
    whole = (await api.chat.completions.create(**asked)).choices[0]
    text, calls, reason = "", {}, None
    async for chunk in await api.chat.completions.create(**asked, stream=True):
        (part,) = chunk.choices
        text, reason = text + (part.delta.content or ""), part.finish_reason or reason
        for delta in part.delta.tool_calls or ():
            call = calls.setdefault(delta.index, {"id": "", "name": "", "arguments": ""})
            call["id"] += delta.id or ""
            call["name"] += delta.function.name or ""
            call["arguments"] += delta.function.arguments or ""
    assert (text, reason) == (whole.message.content or "", whole.finish_reason)
    made = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()]
    assert [(call["name"], call["arguments"]) for call in calls.values()] == made
    assert all(call["id"] for call in calls.values())
    for name, arguments in made:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    if choice != "auto":
        ((name, _),) = made
        assert reason == "tool_calls"
        assert choice == "required" or name == "clock"
    again = [*ASK, whole.message.model_dump(exclude_none=True)]
    again += [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in whole.message.tool_calls or ()]
    after = await api.chat.completions.create(model=MODEL, messages=again, tools=OPENAI_TOOLS, max_tokens=8)
    assert after.usage is not None
    assert after.usage.completion_tokens > 0


async def anthropic_round_trip(api: AsyncAnthropic, choice: str) -> None:
    wanted = {"type": choice, **({"name": "clock"} if choice == "tool" else {}), "disable_parallel_tool_use": True}
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 80, "messages": ASK, "tools": ANTHROPIC_TOOLS}
    asked |= {"tool_choice": wanted, "extra_body": {"temperature": 0}}
    whole = await api.messages.create(**asked)
    async with api.messages.stream(**asked) as stream:
        parts = [event.partial_json async for event in stream if event.type == "input_json"]
        streamed = await stream.get_final_message()
    assert streamed.stop_reason == whole.stop_reason
    assert [block.type for block in streamed.content] == [block.type for block in whole.content]
    used = [block for block in streamed.content if block.type == "tool_use"]
    for block in used:
        jsonschema.validate(block.input, SCHEMAS[block.name])
    if choice != "auto":
        (block,) = used
        assert (whole.stop_reason, block.input) == ("tool_use", json.loads("".join(parts)))
        assert choice == "any" or block.name == "clock"
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "rain"} for block in used]
    further: list[Any] = [*ASK, streamed.to_param(), {"role": "user", "content": results or "Go on."}]
    after = await api.messages.create(model=MODEL, max_tokens=8, messages=further, tools=ANTHROPIC_TOOLS)
    assert after.usage.output_tokens > 0


async def test_a_schema_in_every_api(real_model: Any) -> None:
    said: list[Any] = [{"role": "user", "content": "Invent a person."}]
    named: Any = {"name": "person", "schema": PERSON, "strict": True}
    form: Any = {"type": "json_schema", "json_schema": named}
    async with smollm2(real_model) as gateway, anthropic_client(gateway) as anthropic:
        api = gateway.openai()
        chat = await api.chat.completions.create(
            model=MODEL, messages=said, response_format=form, max_tokens=100, temperature=1.0, seed=3, n=2
        )
        assert [choice.finish_reason for choice in chat.choices] == ["stop", "stop"]
        texts = [choice.message.content or "" for choice in chat.choices]
        made = await api.responses.create(
            model=MODEL, input=said, text={"format": {"type": "json_schema", **named}}, max_output_tokens=100
        )
        texts.append(made.output_text)
        config = {"format": {"type": "json_schema", "schema": PERSON}}
        message = await anthropic.messages.create(
            model=MODEL, messages=said, max_tokens=100, extra_body={"output_config": config}
        )
        texts += [block.text for block in message.content]
    assert len(texts) == 4
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)
