"""What holds for every API of the gateway alike: refusals in its own form and status, streamed or not; and that a
stream which is closed ends the work on every hop."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from gateway_swarm import MODEL, gateway_swarm

from swarm.config import GatewayConfig

KEY = "the-key"
SAID = [{"role": "user", "content": "hi"}]
NONSENSE = {"type": "nonsense"}
APIS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 4},
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/v1/responses": {"input": SAID, "max_output_tokens": 16},
    "/v1/messages": {"messages": SAID, "max_tokens": 4},
}
LONG = "x" * 600  # more tokens than the model's context
TOO_LONG = {
    "/v1/completions": {"prompt": LONG},
    "/v1/responses": {"input": LONG},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/messages": {"messages": [{"role": "user", "content": LONG}]},
}
MARKS = {  # of a line that has text
    "/v1/completions": '"text":"',
    "/v1/responses": "response.output_text.delta",
    "/v1/chat/completions": '"content":',
    "/v1/messages": "text_delta",
}
SCHEMA = {"type": "json_schema", "name": "x", "schema": NONSENSE}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": NONSENSE}}
BAD_SCHEMA: dict[str, dict[str, Any]] = {
    "/v1/completions": {"structured_outputs": {"json": NONSENSE}},
    "/v1/responses": {"text": {"format": SCHEMA}},
    "/v1/chat/completions": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": NONSENSE}}
    },
    "/v1/messages": {"output_config": {"format": {"type": "json_schema", "schema": NONSENSE}}},
}
REFUSALS: list[tuple[str, int, str]] = [
    ("no key", 401, "authentication_error"),
    ("wrong key", 401, "authentication_error"),
    ("another origin", 403, "permission_error"),
    ("unknown model", 404, "not_found_error"),
    ("another method", 405, "invalid_request_error"),
    ("too large", 413, "invalid_request_error"),
    ("no JSON type", 415, "invalid_request_error"),
    ("bad JSON", 400, "invalid_request_error"),
    ("a list", 400, "invalid_request_error"),
    ("wrong type", 400, "invalid_request_error"),
    ("out of range", 400, "invalid_request_error"),
    ("too long", 400, "invalid_request_error"),
    ("bad schema", 400, "invalid_request_error"),
]


async def send(http: httpx.AsyncClient, path: str, case: str, stream: bool) -> httpx.Response:
    body: dict[str, Any] = {"model": MODEL, "stream": stream, **APIS[path]}
    headers = {"authorization": f"Bearer {KEY}"}
    match case:
        case "no key":
            headers = {}
        case "wrong key":
            headers = {"x-api-key": "another"}
        case "another origin":
            headers["origin"] = "https://elsewhere.example"
        case "unknown model":
            body["model"] = "gpt-9"
        case "another method":
            return await http.put(path, json=body, headers=headers)
        case "too large":
            body["user"] = "x" * 20_000
        case "no JSON type":
            return await http.post(path, content=b"{}", headers={**headers, "content-type": "text/plain"})
        case "bad JSON" | "a list":
            content = b'{"model": ' if case == "bad JSON" else b"[]"
            return await http.post(path, content=content, headers={**headers, "content-type": "application/json"})
        case "wrong type":
            body["temperature"] = "warm"
        case "out of range":
            body["top_p"] = 2
        case "too long":
            body |= TOO_LONG[path]
        case "bad schema":
            body |= BAD_SCHEMA[path]
    return await http.post(path, json=body, headers=headers)


@pytest.mark.parametrize("path", APIS)
async def test_refusals_have_the_api_s_own_form(path: str) -> None:
    config = GatewayConfig(api_keys=(KEY,), max_body=10_000)
    async with gateway_swarm(config=config) as gateway:
        for case, status, kind in REFUSALS:
            for stream in (False, True):
                refused = await send(gateway.http, path, case, stream)
                assert (refused.status_code, refused.headers["content-type"]) == (status, "application/json"), case
                check_form(path, refused, kind)
        assert gateway.sessions() == 0
        answered = await send(gateway.http, path, "", False)
        assert answered.status_code == 200, answered.text


def check_form(path: str, refused: httpx.Response, kind: str) -> None:
    body = refused.json()
    error = body["error"]
    assert error["message"]
    if path == "/v1/messages":
        assert (body["type"], error["type"]) == ("error", kind)
        assert body["request_id"].startswith("req_")
    else:
        assert error["type"] == kind
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"]


@pytest.mark.parametrize("path", APIS)
async def test_a_closed_stream_ends_the_work(path: str) -> None:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    async with gateway_swarm(sockets=True) as gateway:
        for node in gateway.swarm.nodes.values():
            node.device.delay_s = 0.02
        body = {"model": MODEL, **APIS[path], limit: 450, "stream": True, "temperature": 0}
        body |= {"logit_bias": {"0": -100}} if "completions" in path else {}  # does not end by itself
        async with gateway.http.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            lines = response.aiter_lines()
            while MARKS[path] not in await anext(lines):
                pass
            assert gateway.sessions() > 0
            (shown,) = gateway.model.observer.of(MODEL)  # type: ignore[union-attr]
            assert response.headers["x-swarm-answer"] == shown.id
        await gateway.until(lambda: gateway.sessions() == 0 and gateway.model.admission.running == 0, 1.0)
