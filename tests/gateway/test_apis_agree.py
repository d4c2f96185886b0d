"""Over a real swarm in memory, the Messages and Responses APIs give the text that chat completions give."""

from __future__ import annotations

import json

from gateway_swarm import MODEL, gateway_swarm
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

SAID = [{"role": "user", "content": "abc"}]
GREEDY = {"temperature": 0, "model": MODEL}


async def test_one_prompt_has_one_answer_in_every_api() -> None:
    async with gateway_swarm() as gateway:
        http = gateway.http
        chat = (await http.post("/v1/chat/completions", json={**GREEDY, "messages": SAID, "max_tokens": 12})).json()
        text = chat["choices"][0]["message"]["content"]
        made = (await http.post("/v1/responses", json={**GREEDY, "input": SAID, "max_output_tokens": 12})).json()
        assert Response.model_validate(made).output_text == text
        assert made["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]
        message = (await http.post("/v1/messages", json={**GREEDY, "messages": SAID, "max_tokens": 12})).json()
        assert "".join(block["text"] for block in message["content"]) == text
        usage = message["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
        counted = (await http.post("/v1/messages/count_tokens", json={"model": MODEL, "messages": SAID})).json()
        assert counted["input_tokens"] == chat["usage"]["prompt_tokens"]
        asked = {**GREEDY, "input": SAID, "max_output_tokens": 12, "stream": True}
        asked |= {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}
        frames = (await http.post("/v1/responses", json=asked)).text.split("\n\n")
        events = [json.loads(frame.partition("data: ")[2]) for frame in frames if "data: " in frame]
        for event in events:
            TypeAdapter(ResponseStreamEvent).validate_python(event)
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert "".join(event["delta"] for event in deltas) == text
        assert sum(len(event["logprobs"]) for event in deltas) == chat["usage"]["completion_tokens"]


async def test_an_answer_may_fill_the_context_and_says_so() -> None:
    async with gateway_swarm() as gateway:
        said = [{"role": "user", "content": "a" * (gateway.client.context_length - 8)}]
        body = {**GREEDY, "messages": said, "max_tokens": 30_000}
        message = (await gateway.http.post("/v1/messages", json=body)).json()
        assert message["stop_reason"] == "model_context_window_exceeded"
        assert 0 < message["usage"]["output_tokens"] < 8
        said[0]["content"] += "a" * 8
        refused = await gateway.http.post("/v1/messages", json=body)
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
        assert refused.headers["request-id"]
