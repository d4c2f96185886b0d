"""litellm against the gateway, as an OpenAI and as an Anthropic server: chat, streams, tools, schemas and errors."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
from typing import Any

import pytest
from gateway_swarm import MODEL, GatewayUnderTest, gateway_swarm

from swarm.config import GatewayConfig

pytestmark = pytest.mark.slow
KEY = "the-key"
USER = [{"role": "user", "content": "hi"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": CITY}}
PROVIDERS = ["openai", "anthropic"]


@pytest.fixture(scope="module")
def litellm() -> Any:
    """The package, which takes seconds to import."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a list of prices
    return importlib.import_module("litellm")


def asking(gateway: GatewayUnderTest, provider: str, **more: Any) -> dict[str, Any]:
    url = str(gateway.http.base_url).rstrip("/")
    base = f"{url}/v1" if provider == "openai" else url
    fixed = {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": KEY, "num_retries": 0, "max_retries": 0}
    return {**fixed, "messages": USER, "temperature": 0, "max_tokens": 24, **more}


def serving() -> Any:
    return gateway_swarm(sockets=True, config=GatewayConfig(api_keys=(KEY,)), headers={"x-api-key": KEY})


async def completed(litellm: Any, is_async: bool, request: dict[str, Any]) -> Any:
    """The answer; of a stream, litellm's own assembly of it."""
    if is_async:
        answer = await litellm.acompletion(**request)
        if not request.get("stream"):
            return answer
        return litellm.stream_chunk_builder([chunk async for chunk in answer])

    def ask() -> Any:
        answer = litellm.completion(**request)
        return litellm.stream_chunk_builder(list(answer)) if request.get("stream") else answer

    return await asyncio.to_thread(ask)


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_chat_tools_and_schemas(litellm: Any, provider: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    async with serving() as gateway:
        text = (await gateway.client.chat(USER, max_new_tokens=24)).text
        for is_async in (False, True):
            for stream in (False, True):
                request = asking(gateway, provider, stream=stream)
                (said,) = (await completed(litellm, is_async, request)).choices
                assert (said.message.content, said.finish_reason) == (text, "length")
                forced = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200}
                (called,) = (await completed(litellm, is_async, {**request, **forced})).choices
                (call,) = called.message.tool_calls
                assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Ulm"})
                assert called.finish_reason == "tool_calls"
                (bound,) = (
                    await completed(litellm, is_async, {**request, "response_format": schema, "max_tokens": 99})
                ).choices
                assert json.loads(bound.message.content) == {"city": "Ulm"}
        await gateway.until(lambda: gateway.sessions() == 0)


async def test_what_only_openai_has(litellm: Any) -> None:
    async with serving() as gateway:
        request = asking(gateway, "openai", n=3, temperature=1.0, seed=7, logprobs=True, top_logprobs=2)
        answer = await litellm.acompletion(**request)
        assert len({choice.message.content for choice in answer.choices}) == 3
        for choice in answer.choices:
            assert len(choice.logprobs.content) >= 1
            assert all(len(token.top_logprobs) >= 2 for token in choice.logprobs.content)
        text = (await gateway.client.chat(USER, max_new_tokens=24)).text
        stop = text[5:8]
        stopped = await litellm.acompletion(**asking(gateway, "openai", stop=[stop]))
        assert stopped.choices[0].message.content == text[: text.index(stop)]
        assert stopped.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("provider", PROVIDERS)
async def test_errors_are_litellm_s_own(litellm: Any, provider: str, stream: bool) -> None:
    async with serving() as gateway:
        long = [{"role": "user", "content": "x" * 600}]
        wrong: list[tuple[type[Exception], dict[str, Any]]] = [
            (litellm.AuthenticationError, {"api_key": "another"}),
            (litellm.NotFoundError, {"model": f"{provider}/gpt-9"}),
            (litellm.BadRequestError, {"messages": long}),
            (litellm.BadRequestError, {"top_p": 7}),
        ]
        for kind, fields in wrong:
            with pytest.raises(kind):
                await litellm.acompletion(**asking(gateway, provider, stream=stream, **fields))
