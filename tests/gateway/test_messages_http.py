"""Anthropic's own client against a gateway on 127.0.0.1."""

from __future__ import annotations

import asyncio

import anthropic
import httpx
import pytest
from anthropic import AsyncAnthropic
from scripted import KEYS, MODEL, Script, serving

from swarm.errors import ConnectionLost, NodeBusy, NoRoute
from swarm.planner.generation.state_machine import FinishReason
from swarm_gateway.chat.events import ReasoningDelta, TextDelta, ToolCallDelta

HELLO = (TextDelta("Hello"), TextDelta(" you"))
TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
ASK = {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": "say hello to me now"}]}


def client(url: str, key: str = KEYS[0]) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=url, api_key=key, max_retries=0)


async def test_a_message_whole_and_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(HELLO)
    async with serving(script, monkeypatch) as url, client(url) as api:
        message = await api.messages.create(**ASK, stop_sequences=["END"])
        assert (message.content[0].text, message.stop_reason, message.model) == ("Hello you", "end_turn", MODEL)
        usage = message.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (3, 2, 2)
        assert message._request_id
        assert script.settings[0]["stop"] == ("END",)
        async with api.messages.stream(**ASK) as stream:
            assert [text async for text in stream.text_stream] == ["Hello", " you"]
            streamed = await stream.get_final_message()
        assert streamed.usage.input_tokens == usage.input_tokens
        assert streamed.content[0].text == message.content[0].text
        assert (await api.messages.count_tokens(model=MODEL, messages=ASK["messages"])).input_tokens == 5


async def test_tools_and_thinking_go_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (ToolCallDelta(0, arguments='{"city":'), ToolCallDelta(0, arguments='"Ulm"}'))
    script = Script((ReasoningDelta("ask"), TextDelta("I look."), ToolCallDelta(0, "t1", "weather"), *arguments))
    async with serving(script, monkeypatch) as url, client(url) as api:
        thinking = {"type": "enabled", "budget_tokens": 1024}
        async with api.messages.stream(**ASK, tools=[TOOL], thinking=thinking) as stream:
            message = await stream.get_final_message()
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        assert message.content[2].input == {"city": "Ulm"}
        assert message.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": "t1", "content": "rain"}
        further = [*ASK["messages"], message.to_param(), {"role": "user", "content": [result]}]
        await api.messages.create(model=MODEL, max_tokens=9, messages=further, tools=[TOOL])
        _, assistant, tool = script.requests[1].messages
        assert (assistant["reasoning_content"], assistant["content"]) == ("ask", "I look.")
        assert assistant["tool_calls"][0]["function"]["arguments"] == {"city": "Ulm"}
        assert (tool["role"], tool["tool_call_id"], tool["content"]) == ("tool", "t1", "rain")


async def test_stop_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(HELLO, FinishReason.STOP, stop_string="END")
    async with serving(script, monkeypatch) as url, client(url) as api:
        message = await api.messages.create(**ASK)
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
        script.finish_reason, script.stop_string = FinishReason.LENGTH, None
        assert (await api.messages.create(**{**ASK, "max_tokens": 2})).stop_reason == "max_tokens"


async def test_errors_have_their_own_types(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(HELLO)
    async with serving(script, monkeypatch) as url, client(url) as api:
        async with client(url, "wrong") as stranger:
            with pytest.raises(anthropic.AuthenticationError) as wrong_key:
                await stranger.messages.create(**ASK)
        assert wrong_key.value.type == "authentication_error"
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await api.messages.create(**{**ASK, "model": "other"})
        assert unknown.value.type == "not_found_error"
        assert unknown.value.request_id
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            await api.messages.create(**{**ASK, "max_tokens": 0})
        script.context_length = 1
        with pytest.raises(anthropic.BadRequestError, match="context") as too_long:
            await api.messages.create(**ASK)
        assert too_long.value.type == "invalid_request_error"
        script.context_length, script.error = 1 << 20, NodeBusy("full", retry_after_s=7.0)
        with pytest.raises(anthropic.RateLimitError) as busy:
            await api.messages.create(**ASK)
        assert busy.value.response.headers["retry-after"] == "7"
        script.error = NoRoute("no node")
        with pytest.raises(anthropic.APIStatusError) as no_route:
            await api.messages.create(**ASK)
        assert (no_route.value.status_code, no_route.value.type) == (529, "overloaded_error")


async def test_bodies_that_are_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"x-api-key": KEYS[0], "content-type": "application/json"}
    async with serving(Script(HELLO), monkeypatch) as url, httpx.AsyncClient(base_url=url, headers=headers) as http:
        for sent in (b"", b"{", b"\xff", b"[]", b"null", b'"x"', b"[" * 50_000, b'{"model": 1}'):
            answer = await http.post("/v1/messages", content=sent)
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
            assert answer.headers["request-id"] == answer.json()["request_id"]
        huge = await http.post("/v1/messages", content=b" " * (5 << 20))
        assert (huge.status_code, huge.json()["type"]) == (413, "error")


async def test_an_error_inside_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(HELLO, error=ConnectionLost("the tail went away"))
    async with serving(script, monkeypatch) as url, client(url) as api:
        async with api.messages.stream(**ASK) as stream:
            texts = aiter(stream.text_stream)
            assert [await anext(texts), await anext(texts)] == ["Hello", " you"]
            with pytest.raises(anthropic.APIStatusError, match="the tail went away"):
                await anext(texts)


async def test_hanging_up_ends_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(HELLO, hold=asyncio.Event())
    async with serving(script, monkeypatch) as url, client(url) as api:
        async with api.messages.stream(**ASK) as stream:
            assert await anext(aiter(stream.text_stream)) == "Hello"
            assert script.open_streams == 1
        async with asyncio.timeout(5.0):
            await script.ended.wait()
        assert script.open_streams == 0
