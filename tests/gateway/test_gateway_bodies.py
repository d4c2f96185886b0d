"""What strangers send: every wrong body is a 4xx in the API's form, quickly, and never reaches the swarm."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from gateway_swarm import MODEL, gateway_swarm
from virtual_clock import virtual_time

from swarm.config import GatewayConfig
from swarm_gateway.errors import ApiError
from swarm_gateway.http.body import decode, depth, outside_strings
from swarm_gateway.openai import completions

USER = {"role": "user", "content": "hi"}
CHAT = "/v1/chat/completions"


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [USER], "max_tokens": 1, **fields}


WRONG_CHATS: list[tuple[dict[str, Any], str | None]] = [
    (chat(messages=[]), "messages"),
    (chat(messages="hi"), "messages"),
    ({"model": MODEL}, "messages"),
    (chat(messages=[USER] * 5000), "messages"),
    (
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        "messages[0].content",
    ),
    (chat(messages=[{"role": "user"}]), "messages[0].content"),
    (chat(messages=[{"role": "wizard", "content": "x"}]), "messages[0].role"),
    (chat(n=0), "n"),
    (chat(n=10**6), "n"),
    (chat(max_tokens=-1), "max_tokens"),
    (chat(max_tokens=10**30), "max_tokens"),
    (chat(max_tokens=1.5), "max_tokens"),
    (chat(temperature="hot"), "temperature"),
    (chat(top_p=2), "top_p"),
    (chat(top_k=-5), "top_k"),
    (chat(stop=["x"] * 100), "stop"),
    (chat(stop="x" * 10_000), "stop"),
    (chat(logit_bias={"x": 1}), "logit_bias"),
    (chat(logit_bias={"1": 10**9}), "logit_bias"),
    (chat(logit_bias={str(i): 1 for i in range(5000)}), "logit_bias"),
    (chat(logit_bias={"999999999": 1}), None),
    (chat(logprobs=True, top_logprobs=100), "top_logprobs"),
    (chat(top_logprobs=2), "top_logprobs"),
    (chat(seed=1 << 80), "seed"),
    (chat(tools=[{"type": "function", "function": {"name": "f"}}] * 500), "tools"),
    (chat(tools=[{"type": "function", "function": {"name": "a b"}}]), None),
    (chat(tool_choice="required"), None),
    (chat(functions=[{"name": "f"}]), "functions"),
    (chat(response_format={"type": "yaml"}), "response_format.type"),
    (chat(response_format={"type": "json_schema"}), "response_format.json_schema.schema"),
    (chat(guided_regex="a", guided_json={}), "guided_regex"),
    (chat(guided_regex="a" * 100_000), "guided_regex"),
    (chat(model="x" * 1000), "model"),
    (chat(stream="maybe"), "stream"),
    (chat(chat_template_kwargs={"messages": []}), None),
    (chat(chat_template_kwargs={"__class__": 1}), None),
]


@virtual_time
async def test_wrong_chats_are_told_which_field_it_is() -> None:
    async with gateway_swarm() as gateway:
        for body, param in WRONG_CHATS:
            answer = await gateway.http.post(CHAT, json=body)
            shown = json.dumps(body)[:200]
            assert answer.status_code == 400, f"{shown}: {answer.text}"
            error = answer.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert error["message"]
            assert error["param"] == param, f"{shown}: {error}"
        assert gateway.sessions() == 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nul",
        b"\xff\xfe",
        b'{"messages": [' * 50,
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"1" * 100_000,
        b'{"a": [' + b"[]," * 1_300_000 + b"[]]}",
        b'"\\ud800"',
    ],
)
def test_what_is_no_json_is_refused_at_once(body: bytes) -> None:
    started = time.perf_counter()
    with pytest.raises(ApiError) as error:
        decode(body, dict[str, Any])
    assert error.value.status == 400
    assert time.perf_counter() - started < 1.0


def test_depth_is_that_of_a_plain_count() -> None:
    """Against a reference that looks at one character after the other."""

    def plain(text: str) -> int:
        deepest = now = 0
        inside = escaped = False
        for character in text:
            if inside:
                escaped, inside = (character == "\\" and not escaped), character != '"' or escaped
            elif character == '"':
                inside = True
            elif character in "[{":
                now += 1
                deepest = max(deepest, now)
            elif character in "]}":
                now -= 1
        return deepest

    random.seed(5)

    def value(levels: int) -> Any:
        if levels == 0:
            return random.choice([1, 'a"[{\\', "]}", None])
        inner = [value(levels - 1), *([value(random.randrange(levels))] * 40)]
        return inner if random.random() < 0.5 else {f'k"[{i}': v for i, v in enumerate(inner)}

    for levels in (2, 3, 5):
        text = json.dumps(value(levels))
        assert depth(outside_strings(text.encode())) == plain(text)


@virtual_time
async def test_an_echo_with_too_many_log_probabilities_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "MAX_PROMPT_LOGPROBS", 100)
    async with gateway_swarm() as gateway:
        asked = {"prompt": [[7] * 5] * 4, "max_tokens": 1, "echo": True, "logprobs": 4}
        fits = await gateway.http.post("/v1/completions", json=asked)
        assert fits.status_code == 200, fits.text
        answer = await gateway.http.post("/v1/completions", json={**asked, "logprobs": 5})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprobs")


@virtual_time
async def test_too_large_and_too_deep() -> None:
    async with gateway_swarm(config=GatewayConfig(max_body=10_000)) as gateway:
        large = await gateway.http.post(CHAT, json=chat(messages=[{"role": "user", "content": "x" * 20_000}]))
        assert large.status_code == 413

        async def pieces() -> Any:  # without a Content-Length
            for _ in range(200):
                yield b"x" * 100

        endless = await gateway.http.post(CHAT, content=pieces())
        assert endless.status_code == 413
        nested: Any = "x"
        for _ in range(100):
            nested = [nested]
        deep = await gateway.http.post(CHAT, json=chat(chat_template_kwargs={"x": nested}))
        assert deep.status_code == 400
        assert deep.json()["error"]["code"] == "invalid_json"


@virtual_time
async def test_a_form_is_no_json() -> None:
    """A page may send these to any host without asking."""
    async with gateway_swarm() as gateway:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            body = json.dumps(chat())
            answer = await gateway.http.post(CHAT, content=body, headers={"content-type": kind})
            assert answer.status_code == 415


@virtual_time
async def test_random_bodies_never_are_server_errors() -> None:
    rng = random.Random(11)
    values: list[Any] = [None, True, 0, -1, 1.5, 1e300, "", "x", [], {}, [[]], {"a": {}}, 10**25, "\u0000", [None], [1]]
    fields = [
        "messages",
        "model",
        "n",
        "stop",
        "tools",
        "tool_choice",
        "logit_bias",
        "response_format",
        "seed",
        "stream",
    ]
    fields += [
        "max_tokens",
        "temperature",
        "top_logprobs",
        "logprobs",
        "stream_options",
        "chat_template_kwargs",
        "prompt",
    ]
    async with gateway_swarm() as gateway:
        for _ in range(300):
            body = chat(prompt="x") | {name: rng.choice(values) for name in rng.sample(fields, 3)}
            for path in (CHAT, "/v1/completions", "/tokenize", "/detokenize"):
                answer = await gateway.http.post(path, json=body)
                assert answer.status_code < 500, f"{path} {body}: {answer.text}"
                if answer.status_code >= 400:
                    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@virtual_time
async def test_paths_and_methods_that_are_not_there() -> None:
    async with gateway_swarm() as gateway:
        assert (await gateway.http.get("/v1/nothing")).status_code == 404
        wrong = await gateway.http.get(CHAT)
        assert wrong.status_code == 405
        assert wrong.json()["error"]["code"] == "method_not_allowed"
