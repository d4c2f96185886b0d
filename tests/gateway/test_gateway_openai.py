"""OpenAI's endpoints with the real `openai` client, over a swarm in memory."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from gateway_swarm import MODEL, GatewayUnderTest, byte_tokenizer, gateway_swarm
from virtual_clock import virtual_time

from swarm.types import TokenLogprobs
from swarm_gateway.openai.logprobs import TextLogprobsWriter, TokenTexts

USER: list[Any] = [{"role": "user", "content": "hi"}]
GREEDY: dict[str, Any] = {"model": MODEL, "messages": USER, "temperature": 0, "max_tokens": 24}


async def greedy_text(gateway: GatewayUnderTest, tokens: int = 24) -> str:
    return (await gateway.client.chat(USER, max_new_tokens=tokens)).text


@virtual_time
async def test_a_chat_is_what_the_client_gives() -> None:
    async with gateway_swarm() as gateway:
        expected = await gateway.client.chat(USER, max_new_tokens=24)
        answer = await gateway.openai().chat.completions.create(**GREEDY)
        (choice,) = answer.choices
        assert choice.message.content == expected.text
        assert choice.message.role == "assistant"
        assert choice.finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(expected.token_ids)
        assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@virtual_time
async def test_a_stream_joined_is_the_whole_answer() -> None:
    async with gateway_swarm() as gateway:
        expected = await greedy_text(gateway)
        stream = await gateway.openai().chat.completions.create(
            **GREEDY, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == expected
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert reasons[-1] == "length"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


@virtual_time
async def test_several_choices_are_seeded_one_by_one() -> None:
    async with gateway_swarm() as gateway:
        ask = {**GREEDY, "temperature": 1.0, "seed": 7, "n": 3}
        several = await gateway.openai().chat.completions.create(**ask)
        alone = [
            (await gateway.client.chat(USER, max_new_tokens=24, temperature=1.0, seed=7 + i)).text for i in range(3)
        ]
        stream = await gateway.openai().chat.completions.create(**ask, stream=True)
        streamed = ["", "", ""]
        async for chunk in stream:
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
    assert [choice.message.content for choice in several.choices] == alone
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert streamed == alone
    assert len(set(alone)) == 3


@virtual_time
async def test_a_stop_string_ends_the_answer_before_it() -> None:
    async with gateway_swarm() as gateway:
        text = await greedy_text(gateway)
        stop = text[6:9]
        answer = await gateway.openai().chat.completions.create(**GREEDY, stop=stop)
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


@virtual_time
async def test_log_probabilities_of_a_chat() -> None:
    async with gateway_swarm() as gateway:
        answer = await gateway.openai().chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3)
        expected = await gateway.client.chat(USER, max_new_tokens=24, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.logprob for entry in logprobs.content] == pytest.approx([e.logprob for e in expected.logprobs])
    tokenizer = byte_tokenizer()
    for entry, wanted in zip(logprobs.content, expected.logprobs, strict=True):
        assert entry.token == tokenizer.decode([wanted.token], skip_special_tokens=False)
        assert entry.bytes == (None if "\ufffd" in entry.token else list(entry.token.encode()))
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob >= entry.top_logprobs[2].logprob


@virtual_time
async def test_tokens_of_one_text_are_told_apart_by_their_ids() -> None:
    async with gateway_swarm() as gateway:
        texts, ids = TokenTexts(gateway.client), TokenTexts(gateway.client, as_ids=True)
        letter = byte_tokenizer().encode("a")[0]
        likely, other = [token for token in range(6, 262) if texts.of(token) == "\ufffd"][:2]
        entry = TokenLogprobs(likely, -1.5, ((likely, -1.5), (other, -2.0), (letter, -3.0)))
        assert TextLogprobsWriter(texts).tokens([entry]).top_logprobs == [{"\ufffd": -1.5, "a": -3.0}]
        assert TextLogprobsWriter(ids).tokens([entry]).top_logprobs == [
            {f"token_id:{token}": logprob for token, logprob in entry.top}
        ]
        answer = await gateway.openai().chat.completions.create(
            **GREEDY, logprobs=True, top_logprobs=2, extra_body={"return_tokens_as_token_ids": True}
        )
        expected = await gateway.client.chat(USER, max_new_tokens=24, logprobs=2)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert [entry.token for entry in content] == [f"token_id:{token}" for token in expected.token_ids]


@virtual_time
async def test_streamed_log_probabilities_are_those_of_the_whole_answer() -> None:
    async with gateway_swarm() as gateway:
        ask = {**GREEDY, "logprobs": True, "top_logprobs": 1}
        whole = await gateway.openai().chat.completions.create(**ask)
        stream = await gateway.openai().chat.completions.create(**ask, stream=True)
        entries = [e async for chunk in stream for c in chunk.choices if c.logprobs for e in c.logprobs.content or []]
    assert whole.choices[0].logprobs is not None
    assert entries == whole.choices[0].logprobs.content


@virtual_time
async def test_completions_of_texts_and_tokens() -> None:
    async with gateway_swarm() as gateway:
        ask: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 9}
        texts = ["a b", "hello"]
        expected = [(await gateway.client.generate(text, max_new_tokens=9)).text for text in texts]
        ids = [byte_tokenizer().encode(text) for text in texts]
        prompts: list[Any] = [texts, ids]
        for prompt in prompts:
            answer = await gateway.openai().completions.create(**ask, prompt=prompt)
            assert [choice.text for choice in answer.choices] == expected
        for one in (texts[1], ids[1]):
            answer = await gateway.openai().completions.create(**ask, prompt=one)
            assert [choice.text for choice in answer.choices] == expected[1:]
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == len(ids[1])
        answer = await gateway.openai().completions.create(**ask, prompt=texts, n=2)
        assert [choice.text for choice in answer.choices] == [expected[0], expected[0], expected[1], expected[1]]


@virtual_time
async def test_a_completion_s_stream_and_echo() -> None:
    async with gateway_swarm() as gateway:
        expected = (await gateway.client.generate("hello", max_new_tokens=9)).text
        ask: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 9, "prompt": "hello", "echo": True}
        stream = await gateway.openai().completions.create(**ask, stream=True)
        text = "".join([choice.text async for chunk in stream for choice in chunk.choices])
        scored = await gateway.openai().completions.create(**{**ask, "max_tokens": 0}, logprobs=2)
        whole = await gateway.openai().completions.create(**ask, logprobs=2)
    assert text == "hello" + expected
    assert scored.choices[0].text == "hello"
    for answer, length in ((scored, 5), (whole, 14)):
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert len(logprobs.tokens) == length
        assert logprobs.tokens[:5] == list("hello")
        assert logprobs.text_offset is not None
        assert logprobs.text_offset[:5] == [0, 1, 2, 3, 4]
        assert logprobs.token_logprobs is not None
        assert logprobs.token_logprobs[0] is None
        assert all(value is not None and value <= 0 for value in logprobs.token_logprobs[1:])


@virtual_time
async def test_models_and_tokens() -> None:
    async with gateway_swarm() as gateway:
        client = gateway.openai()
        assert [model.id async for model in await client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).owned_by == "swarm"
        text = "héllo <|end|>"
        tokens = (await gateway.http.post("/tokenize", json={"prompt": text})).json()
        assert tokens["tokens"] == byte_tokenizer().encode(text)
        assert tokens["count"] == len(tokens["tokens"])
        assert tokens["max_model_len"] == 512
        back = await gateway.http.post("/detokenize", json={"tokens": tokens["tokens"]})
        assert back.json() == {"prompt": text}
        chat = (await gateway.http.post("/tokenize", json={"messages": USER})).json()
        assert chat["tokens"] == byte_tokenizer().apply_chat_template(USER)


@virtual_time
async def test_what_is_sent_reaches_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sampling field, under the name that the client has for it."""
    async with gateway_swarm() as gateway:
        seen: list[dict[str, Any]] = []
        fork_streams = gateway.client.fork_streams

        def noted(prompt: Any, n: int, **options: Any) -> Any:
            seen.append(options)
            return fork_streams(prompt, n, max_new_tokens=1)

        monkeypatch.setattr(gateway.client, "fork_streams", noted)
        body = {"messages": USER, "max_completion_tokens": 5, "top_k": 3, "top_p": 0.5, "min_p": 0.25, "seed": -1}
        body |= {"logit_bias": {"7": -100}, "frequency_penalty": 0.5, "presence_penalty": -0.5, "stop": ["a", "b"]}
        body |= {"repetition_penalty": 1.5, "ignore_eos": True, "user": "x", "metadata": {"a": 1}, "store": True}
        assert (await gateway.http.post("/v1/chat/completions", json=body)).status_code == 200
        (options,) = seen
        assert options["max_new_tokens"] == 5
        assert options["temperature"] == 1.0
        assert options["logit_bias"] == {7: -100}
        assert options["stop"] == ("a", "b")
        assert options["seed"] == 2**63 - 1
        assert (options["top_k"], options["top_p"], options["min_p"]) == (3, 0.5, 0.25)
        assert (options["frequency_penalty"], options["presence_penalty"]) == (0.5, -0.5)
        assert (options["repetition_penalty"], options["ignore_eos"]) == (1.5, True)


@pytest.mark.parametrize(
    ("field", "kind", "source"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}},
            "json_schema",
            '{"type": "null"}',
        ),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["yes", 'n"o']}}, "lark", r'start: "yes" | "n\"o"'),
        ({"guided_json": {"type": "null"}}, "json_schema", '{"type": "null"}'),
        ({"guided_regex": "[0-9]"}, "regex", "[0-9]"),
        ({"response_format": {"type": "text"}}, None, ""),
    ],
)
def test_constraints_become_a_grammar(field: dict[str, Any], kind: str | None, source: str) -> None:
    from swarm_gateway.http.body import decode
    from swarm_gateway.openai.chat import chat_request
    from swarm_gateway.openai.requests import ChatCompletionRequest

    body = decode(json.dumps({"messages": USER, **field}).encode(), ChatCompletionRequest)
    grammar = chat_request(body, MODEL).grammar
    assert (grammar and (str(grammar.kind), grammar.source)) == (kind and (kind, source))


@virtual_time
async def test_errors_are_the_client_s_own_exceptions() -> None:
    async with gateway_swarm() as gateway:
        client = gateway.openai()
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(**{**GREEDY, "model": "gpt-9"})
        assert unknown.value.code == "model_not_found"
        assert unknown.value.param == "model"
        with pytest.raises(openai.BadRequestError) as long:
            await client.chat.completions.create(**{**GREEDY, "messages": [{"role": "user", "content": "x" * 600}]})
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.chat.completions.create(**{**GREEDY, "temperature": -1})
        assert wrong.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as suffix:
            await client.completions.create(model=MODEL, prompt="x", suffix="y")
        assert suffix.value.param == "suffix"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-9")
