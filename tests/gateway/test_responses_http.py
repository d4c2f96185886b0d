"""OpenAI's own client and the Open Responses cases against a gateway on 127.0.0.1."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from scripted import KEYS, MODEL, Script, serving

from swarm.errors import ConnectionLost, NodeBusy
from swarm.planner.generation.state_machine import FinishReason
from swarm.types import TokenLogprobs
from swarm_gateway.chat.events import ReasoningDelta, TextDelta, ToolCallDelta

HELLO = (TextDelta("Hello"), TextDelta(" you"))
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}


def client(url: str, key: str = KEYS[0]) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


async def test_whole_streamed_and_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(Script(HELLO), monkeypatch) as url, client(url) as api:
        response = await api.responses.create(model=MODEL, input="hi", instructions="Be kind.", metadata={"k": "v"})
        assert (response.output_text, response.status, response.metadata) == ("Hello you", "completed", {"k": "v"})
        async with api.responses.stream(model=MODEL, input="hi") as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            streamed = await stream.get_final_response()
        assert deltas == ["Hello", " you"]
        assert streamed.output_text == response.output_text
        for made in (response, streamed):
            assert (await api.responses.retrieve(made.id)).output_text == "Hello you"
        await api.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve(response.id)
        unstored = await api.responses.create(model=MODEL, input="hi", store=False)
        with pytest.raises(openai.NotFoundError):
            await api.responses.retrieve(unstored.id)


async def test_a_conversation_goes_on_from_a_response(monkeypatch: pytest.MonkeyPatch) -> None:
    call = ToolCallDelta(0, "c1", "weather", "{}")
    script = Script((ReasoningDelta("ask"), TextDelta("I look."), call))
    async with serving(script, monkeypatch) as url, client(url) as api:
        first = await api.responses.create(model=MODEL, input="weather?", instructions="Be kind.", tools=[TOOL])
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        output = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
        second = await api.responses.create(
            model=MODEL, input=[output], tools=[TOOL], previous_response_id=first.id, store=True
        )
        user, assistant, tool = script.requests[1].messages
        assert (user["content"], assistant["reasoning_content"], tool["content"]) == ("weather?", "ask", "rain")
        items = await api.responses.input_items.list(second.id, order="asc", limit=2)
        types = [item.type async for item in items]
        assert types == ["message", "reasoning", "message", "function_call", "function_call_output"]
        again = await api.responses.create(model=MODEL, input=[*first.output, output], tools=[TOOL])
        assert again.status == "completed"
        assert script.requests[2].messages == script.requests[1].messages[1:]
        async with client(url, KEYS[1]) as stranger:
            with pytest.raises(openai.BadRequestError) as caught:
                await stranger.responses.create(model=MODEL, input="x", previous_response_id=first.id)
        assert caught.value.code == "previous_response_not_found"


async def test_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(HELLO, hold=asyncio.Event())
    async with serving(script, monkeypatch) as url, client(url) as api:
        queued = await api.responses.create(model=MODEL, input="hi", background=True)
        assert queued.status == "queued"
        stream = await api.responses.retrieve(queued.id, stream=True, starting_after=1)
        first = await anext(aiter(stream))
        assert (first.type, first.sequence_number) == ("response.in_progress", 2)
        assert (await api.responses.retrieve(queued.id)).status == "in_progress"
        with pytest.raises(openai.BadRequestError, match="still running"):
            await api.responses.create(model=MODEL, input="x", previous_response_id=queued.id)
        assert script.hold is not None
        script.hold.set()
        rest = [event async for event in stream]
        assert rest[-1].type == "response.completed"
        assert [event.sequence_number for event in rest] == list(range(3, 3 + len(rest)))
        assert (await api.responses.retrieve(queued.id)).output_text == "Hello you"


async def test_cancelling(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(HELLO, hold=asyncio.Event())
    async with serving(script, monkeypatch) as url, client(url) as api:
        stream = await api.responses.create(model=MODEL, input="hi", background=True, stream=True)
        events = aiter(stream)
        created = await anext(events)
        assert created.type == "response.created"
        while (await anext(events)).type != "response.output_text.delta":
            pass
        async with client(url, KEYS[1]) as stranger:
            with pytest.raises(openai.NotFoundError):
                await stranger.responses.cancel(created.response.id)
        cancelled = await api.responses.cancel(created.response.id)
        assert (cancelled.status, cancelled.output_text) == ("cancelled", "Hello")
        assert script.open_streams == 0
        assert [event async for event in events] == []
        assert (await api.responses.cancel(created.response.id)).status == "cancelled"
        assert script.hold is not None
        script.hold.set()
        whole = await api.responses.create(model=MODEL, input="hi")
        with pytest.raises(openai.BadRequestError, match="background"):
            await api.responses.cancel(whole.id)


async def test_logprobs_and_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = TokenLogprobs(7, -0.25, ((7, -0.25), (8, -2.0)))
    script = Script((TextDelta("x", (entry,)),), FinishReason.LENGTH)
    async with serving(script, monkeypatch) as url, client(url) as api:
        response = await api.responses.create(
            model=MODEL, input="hi", top_logprobs=2, include=["message.output_text.logprobs"], max_output_tokens=1
        )
        assert script.settings[0]["logprobs"] == 2
        assert response.incomplete_details is not None
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        logprobs = response.output[0].content[0].logprobs
        assert (logprobs[0].token, [top.token for top in logprobs[0].top_logprobs]) == ("<7>", ["<7>", "<8>"])


async def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(HELLO)
    async with serving(script, monkeypatch) as url, client(url) as api:
        async with client(url, "wrong") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.responses.create(model=MODEL, input="hi")
        with pytest.raises(openai.NotFoundError) as unknown:
            await api.responses.create(model="other", input="hi")
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as schema:
            await api.responses.create(model=MODEL, input="hi", text={"format": {"type": "json_schema"}})
        assert schema.value.param == "text.format"
        script.context_length = 2
        with pytest.raises(openai.BadRequestError) as too_long:
            await api.responses.create(model=MODEL, input="one two three")
        assert too_long.value.code == "context_length_exceeded"
        turns = [
            {"role": role, "content": f"turn {i}"}
            for i in range(9)
            for role in (["user", "assistant"] if i < 8 else ["user"])
        ]
        assert (await api.responses.create(model=MODEL, input=turns, truncation="auto")).status == "completed"
        assert [message["content"] for message in script.requests[-1].messages] == ["turn 8"]
        script.error = NodeBusy("full", retry_after_s=7.0)
        with pytest.raises(openai.RateLimitError):
            await api.responses.create(model=MODEL, input="hi")
        script.error = ConnectionLost("the tail went away")
        stream = await api.responses.create(model=MODEL, input="hi", stream=True)
        events = [event async for event in stream]
        assert [event.type for event in events[-2:]] == ["error", "response.failed"]
        assert events[-1].response.error.message == "the tail went away"


async def test_queries_and_bodies_that_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"authorization": f"Bearer {KEYS[0]}", "content-type": "application/json"}
    async with serving(Script(HELLO), monkeypatch) as url, httpx.AsyncClient(base_url=url, headers=headers) as http:
        for sent in (b"", b"{", b"\xff", b"[]", b"[" * 50_000, b'{"input": 1}', b'{"input": [1]}'):
            answer = await http.post("/v1/responses", content=sent)
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        made = (await http.post("/v1/responses", json={"input": "hi"})).json()["id"]
        for query in ("limit=0", "limit=101", "limit=x", "limit=²", "limit=--1", "order=up", "after=none"):
            answer = await http.get(f"/v1/responses/{made}/input_items?{query}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])
        for query in ("stream=true", "stream=true&starting_after=x"):
            assert (await http.get(f"/v1/responses/{made}?{query}")).status_code == 400
        for path in ("/v1/responses/none", "/v1/responses/none/input_items", "/v1/responses/%00"):
            assert (await http.get(path)).status_code == 404
