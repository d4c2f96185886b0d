"""Chat templates with tools, tool calls and reasoning, against transformers; hostile templates and chats."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from chat_templates import LLAMA, MISTRAL, QWEN
from jinja2 import TemplateError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from swarm.errors import InvalidRequest
from swarm_kernels.tokenizer import chat_template
from swarm_kernels.tokenizer.chat_template import MAX_CHAT_LENGTH, MAX_CHAT_VALUES, ChatTemplate
from swarm_kernels.tokenizer.hf import read_hf_tokenizer
from swarm_kernels.tokenizer.parts import TokenizerParts
from swarm_kernels.tokenizer.tokenizer import ChatTokenizer

PLAIN = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'The weather of a <city> & "more"',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "", "parameters": {"type": "object"}}}


def _call(name: str, arguments: dict[str, Any], number: int) -> dict[str, Any]:
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


USER = {"role": "user", "content": "How warm is it in Zürich?"}
CALLS = {"role": "assistant", "content": None, "tool_calls": [_call("weather", {"city": "Zürich", "n": [1, None]}, 1)]}
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": '{"celsius": 21.5}'}
SYSTEM = {"role": "system", "content": " Be brief. "}
THOUGHT = {"role": "assistant", "content": "21.5 degrees.", "reasoning_content": "It said 21.5.\n"}
TWO_CALLS = {**CALLS, "content": "", "tool_calls": [*CALLS["tool_calls"], _call("clock", {}, 2)]}  # type: ignore[misc]
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [SYSTEM, USER],
    [USER, CALLS, RESULT],
    [SYSTEM, USER, CALLS, RESULT, THOUGHT],
    [USER, THOUGHT, USER],
    [USER, TWO_CALLS, RESULT, {**RESULT, "tool_call_id": "call00002", "content": "noon"}],
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"enable_thinking": False},
    {"tools_in_user_message": False, "date_string": "1 Jan"},
]


def _ours(template: str) -> ChatTokenizer:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTokenizer(TokenizerParts(Tokenizer(models.BPE()), template, special))


def _transformers(template: str) -> Callable[..., str]:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template

    def render(chat: list[Any], prompt: bool, tools: list[Any] | None, options: dict[str, Any]) -> str:
        try:
            text: str = tokenizer.apply_chat_template(
                chat, tools=tools, tokenize=False, add_generation_prompt=prompt, **options
            )
        except (TemplateError, TypeError):
            return "refused"
        return text

    return render


@pytest.mark.parametrize("template", [QWEN, LLAMA, MISTRAL], ids=["qwen", "llama", "mistral"])
@pytest.mark.parametrize("tools", [None, [WEATHER], [WEATHER, CLOCK]], ids=["none", "one", "two"])
def test_tools_give_what_transformers_gives(template: str, tools: list[Any] | None) -> None:
    ours, theirs = _ours(template), _transformers(template)
    assert ours.supports_tools
    rendered = 0
    for chat, options, prompt in itertools.product(CHATS, OPTIONS, (True, False)):
        try:
            text = ours.render_chat(chat, prompt, tools=tools, template_options=options)
        except InvalidRequest:
            text = "refused"
        assert text == theirs(chat, prompt, tools, options)
        rendered += text != "refused"
    assert rendered >= 24  # of 36; the rest are roles and numbers of calls that the templates themselves refuse


def test_which_templates_know_tools() -> None:
    assert not _ours(PLAIN).supports_tools
    assert not _ours("{% set tools = [1] %}{{ tools }}").supports_tools
    assert not ChatTokenizer(TokenizerParts(Tokenizer(models.BPE()))).supports_tools


@pytest.mark.parametrize("beside", [True, False])
def test_a_template_for_tools_of_its_own(tmp_path: Path, beside: bool) -> None:
    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with_tools = "{{ tools | length }} tools"
    if beside:
        (tmp_path / "chat_template.jinja").write_text(PLAIN)
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(with_tools)
    else:
        both = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": with_tools}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": both}))
    ours = ChatTokenizer(read_hf_tokenizer(tmp_path))
    assert ours.supports_tools
    assert ours.render_chat([USER]) == "<user>How warm is it in Zürich?"
    assert ours.render_chat([USER], tools=[]) == "<user>How warm is it in Zürich?"
    assert ours.render_chat([USER], tools=[WEATHER]) == "1 tools"


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "bos_token", "range", "raise_exception", "_x", "a b", ""]
)
def test_an_option_may_not_replace_what_the_template_relies_on(name: str) -> None:
    with pytest.raises(InvalidRequest, match="no option of a chat template"):
        _ours(QWEN).render_chat([USER], template_options={name: 1})


LOOPS = [
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% set r = range(100000) %}{% for i in r %}{% for j in r %}{% for k in r %}{% endfor %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for i in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
    "{% set s = namespace(x='ab') %}{% for i in range(60) %}{% set s.x = s.x * 2 %}{% endfor %}{{ s.x }}",
    "{% for i in range(100000) %}{{ messages[0].content }}{{ 'x' * 10000 }}{% endfor %}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ [0] * 10 ** 9 }}",
]


@pytest.mark.parametrize("template", LOOPS)
def test_a_template_that_does_not_end_is_stopped(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 0.2)
    started = datetime.now()
    with pytest.raises(InvalidRequest, match="does not take these messages"):
        _ours(template).render_chat([USER])
    assert (datetime.now() - started).total_seconds() < 5


def _nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([{"role": "user", "content": "x" * (MAX_CHAT_LENGTH + 1)}], None),
        ([{"role": "user", "content": "x" * (MAX_CHAT_LENGTH // 2)}] * 3, None),
        ([USER] * (MAX_CHAT_VALUES // 4), None),
        ([USER], [{"type": "function", "function": {"x": ["y"] * MAX_CHAT_VALUES}}]),
        ([USER], [{"function": object()}]),
        ([USER], [{"function": {1: {"a"}}}]),
        ([USER], ["weather"]),
        ([USER], [{"function": _nested(100_000)}]),
        ([{"role": "assistant", "content": None}], None),
        ([{"role": "assistant", "content": None, "tool_calls": []}], None),
        ([{"role": "assistant", "content": None, "tool_calls": "calls"}], None),
        ([{"role": "assistant", "content": "", "tool_calls": [5]}], None),
        ([{"role": "user", "content": None, "tool_calls": [{}]}], None),
        ([{"role": "tool", "content": {"a": 1}}], None),
        ([USER, {"role": "assistant", "tool_calls": [{"function": 5}]}], None),
    ],
)
def test_malformed_or_huge_chats_are_invalid_requests(messages: list[Any], tools: list[Any] | None) -> None:
    with pytest.raises(InvalidRequest):
        _ours(QWEN).render_chat(messages, tools=tools)


@pytest.mark.parametrize("template", [QWEN, LLAMA, MISTRAL], ids=["qwen", "llama", "mistral"])
def test_random_json_renders_or_is_refused(template: str) -> None:
    rng, ours = random.Random(3), _ours(template)

    def value(depth: int) -> Any:
        kind = rng.randrange(8 if depth else 5)
        if kind >= 6:
            return {
                rng.choice(["role", "content", "function", "name", "arguments", "id"]): value(depth - 1) for _ in "ab"
            }
        if kind == 5:
            return [value(depth - 1) for _ in range(rng.randrange(3))]
        return rng.choice([None, True, 5, -1.5, "user", "assistant", "tool", "x", ""])

    def message() -> dict[str, Any]:
        return {
            "role": rng.choice(["user", "assistant", "tool", "system", "x"]),
            "content": rng.choice(["", "x", "{{ 1 }}", None]),
            **rng.choice([{}, {"tool_calls": value(3)}, {"tool_calls": [value(2)]}, {"reasoning_content": value(1)}]),
        }

    rendered = 0
    for _ in range(400):
        chat = [message() for _ in range(rng.randint(0, 4))]
        try:
            text = ours.render_chat(chat, tools=rng.choice([None, [value(3)]]))
        except InvalidRequest:
            continue
        assert "{{ 1 }}" in text or all(m["content"] != "{{ 1 }}" for m in chat if m["role"] == "user")
        rendered += 1
    assert rendered > 5


def test_templates_render_in_several_threads() -> None:
    template = ChatTemplate(PLAIN, {})
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda i: template.render([{"role": "user", "content": str(i)}], True), range(50)))
    assert texts == [f"<user>{i}" for i in range(50)]
