"""Which parser an answer gets."""

from __future__ import annotations

import pytest
from parsing import WEATHER, short

from swarm_gateway.chat.events import ChatRequest, ToolChoice, ToolChoiceMode, ToolDefinition
from swarm_gateway.tools.select import CallFormat, call_format, keeps_control_tokens, knows_tools, parser_for

TOOL = ToolDefinition("get_weather", parameters=WEATHER)
CHATML = "{% for message in messages %}<|im_start|>{{ message.role }}{% endfor %}"


def request(*tools: ToolDefinition, mode: ToolChoiceMode = ToolChoiceMode.AUTO) -> ChatRequest:
    return ChatRequest("m", ({"role": "user", "content": "?"},), tools=tools, tool_choice=ToolChoice(mode))


@pytest.mark.parametrize(
    ("template", "model", "expected"),
    [
        (None, "", CallFormat.HERMES),
        (CHATML, "Llama-3-chatml", CallFormat.HERMES),
        ("{% if tools %}<tool_call>{{ '{\"name\"' }}", "Qwen3-8B", CallFormat.HERMES),
        ("{% if tools %}<tool_call>\n<function=example>", "", CallFormat.QWEN_XML),
        ("{% if tools %}{{ '<|python_tag|>' }}<|eom_id|>", "", CallFormat.LLAMA),
        ('{% if tools %}{"name": f, "parameters": dictionary of argument name and its value}', "", CallFormat.LLAMA),
        ("{% if tools %}[AVAILABLE_TOOLS][TOOL_CALLS][", "", CallFormat.MISTRAL_LIST),
        ("{% if tools %}[TOOL_CALLS]{{ name }}[ARGS]", "", CallFormat.MISTRAL_NAMED),
        ("{% if tools %}<|start|>assistant<|channel|>final", "", CallFormat.HARMONY),
        ("{% if tools %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>x\n```json", "", CallFormat.DEEPSEEK_BLOCK),
        ("{% if tools %}<｜tool▁call▁begin｜>x<｜tool▁sep｜>{", "", CallFormat.DEEPSEEK_BARE),
        ("{{ message.tool_calls }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>x\n```json", "R1", CallFormat.HERMES),
        ("<|start|>assistant<|channel|>final", "", CallFormat.HARMONY),
        ("{{ tools }} ```json", "", CallFormat.HERMES),
        ("{{ tools | tojson }}", "openai/gpt-oss-20b", CallFormat.HARMONY),
    ],
)
def test_the_template_tells_the_form(template: str | None, model: str, expected: CallFormat) -> None:
    assert call_format(template, model) is expected


def test_which_templates_know_tools() -> None:
    assert not knows_tools(None)
    assert not knows_tools(CHATML)
    assert not knows_tools("{{ message.tool_calls }} {{ builtin_tools }}")
    assert knows_tools("{% if tools %}")


def test_control_tokens_stay_where_they_are_tags() -> None:
    assert keeps_control_tokens(CallFormat.LLAMA, request(TOOL), {"<|python_tag|>", "<|eot_id|>"})
    assert not keeps_control_tokens(CallFormat.LLAMA, request(), {"<|python_tag|>", "<|eot_id|>"})
    assert keeps_control_tokens(CallFormat.MISTRAL_LIST, request(TOOL), {"[TOOL_CALLS]"})
    assert keeps_control_tokens(CallFormat.HARMONY, request(), {"<|channel|>"})
    assert not keeps_control_tokens(CallFormat.HERMES, request(TOOL), {"<|im_end|>"})
    assert keeps_control_tokens(CallFormat.HERMES, request(), {"<think>"})


def test_calls_are_text_without_tools_or_with_choice_none() -> None:
    answer = '<tool_call>{"name": "get_weather"}</tool_call>'
    for asked in (request(), request(TOOL, mode=ToolChoiceMode.NONE)):
        parser = parser_for(CHATML, asked)
        assert short(parser.push(answer) + parser.finish()) == [("text", answer)]


@pytest.mark.parametrize(
    ("prompt_end", "expected"),
    [
        ("<|im_start|>assistant\n<think>\n", [("think", "a"), ("text", "b")]),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", [("text", "a</think>b")]),
        ("<|im_start|>assistant\n", [("text", "a</think>b")]),
    ],
)
def test_the_prompt_may_open_the_reasoning(prompt_end: str, expected: list[tuple[str, ...]]) -> None:
    parser = parser_for("<think> {{ tools }}", request(TOOL), prompt_end=prompt_end)
    assert short(parser.push("a</think>b") + parser.finish()) == expected


def test_ids_are_given() -> None:
    parser = parser_for(CHATML, request(TOOL), new_id=lambda: "call_0")
    events = parser.push('<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>') + parser.finish()
    assert short(events) == [("call", "get_weather", "{}")]
