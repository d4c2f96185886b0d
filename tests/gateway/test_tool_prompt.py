"""What a model is shown of tools and calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from parsing import SCHEMAS, parse, setup

from swarm_gateway.chat.events import ChatRequest, ToolChoice, ToolChoiceMode, ToolDefinition
from swarm_gateway.tools.hermes import HermesParser
from swarm_gateway.tools.prompt import template_input

TOOLS = tuple(ToolDefinition(name, f"does {name}", schema) for name, schema in SCHEMAS.items())
ARGUMENTS = {"city": 'Zürich {"</tool>"}', "days": 2}


def call(name: str, call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


USER = {"role": "user", "content": "Weather?"}
HISTORY = (
    USER,
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm.",
        "tool_calls": [call("get_weather", "call_1", **ARGUMENTS), call("search", "call_2")],
    },
    result("call_2", "found"),
    result("call_1", "sunny"),
)


def request(*messages: Any, tools: tuple[ToolDefinition, ...] = TOOLS, mode: str = "auto") -> ChatRequest:
    return ChatRequest("m", messages, tools=tools, tool_choice=ToolChoice(ToolChoiceMode(mode)))


def test_a_template_without_tools_gets_them_as_text() -> None:
    messages, tools = template_input("<|im_start|>", request({"role": "system", "content": "Be brief."}, USER))
    assert tools == ()
    assert [message["role"] for message in messages] == ["system", "user"]
    text = messages[0]["content"]
    assert text.startswith("Be brief.\n\n# Tools\n")
    listed = text.split("<tools>\n")[1].split("\n</tools>")[0]
    assert [json.loads(line) for line in listed.splitlines()] == [tool.to_template() for tool in TOOLS]
    assert '{"name": <function-name>, "arguments": <args-json-object>}' in text
    assert template_input(None, request(USER))[0][0]["role"] == "system"


def test_calls_and_results_of_the_history_as_text() -> None:
    messages, _ = template_input(None, request(*HISTORY, tools=()))
    assert messages[0] == USER
    assert messages[2] == {
        "role": "user",
        "content": "<tool_response>\nfound\n</tool_response>\n<tool_response>\nsunny\n</tool_response>",
    }
    assert set(messages[1]) == {"role", "content"}
    written = json.dumps(ARGUMENTS, ensure_ascii=False)
    assert parse(HermesParser(setup()), messages[1]["content"]) == [
        ("call", "get_weather", written),
        ("call", "search", "{}"),
    ]


def test_a_template_with_tools_gets_the_messages_as_they_are() -> None:
    messages, tools = template_input("{{ tools }} <tool_call>", request(*HISTORY))
    assert messages == HISTORY
    assert list(tools) == [tool.to_template() for tool in TOOLS]
    assert template_input("{{ tools }} <tool_call>", request(USER, mode="none")) == ((USER,), ())


def test_llama_gets_one_call_a_message() -> None:
    messages, _ = template_input("{{ tools }} <|python_tag|>", request(*HISTORY, USER))
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "tool", "user"]
    assert [len(message["tool_calls"]) for message in messages if "tool_calls" in message] == [1, 1]
    assert [message["content"] for message in messages if message["role"] == "tool"] == ["sunny", "found"]


def test_mistral_gets_ids_of_nine_letters_and_digits() -> None:
    messages, _ = template_input("{{ tools }} [TOOL_CALLS]", request(*HISTORY))
    ids = [made["id"] for made in messages[1]["tool_calls"]]
    assert all(len(made) == 9 and made.isalnum() for made in ids)
    assert [message["tool_call_id"] for message in messages[2:]] == ids[::-1]
    kept = template_input("{{ tools }} [TOOL_CALLS]", request(result("a1b2c3d4e", "x")))[0][0]
    assert kept["tool_call_id"] == "a1b2c3d4e"


def test_deepseek_gets_arguments_as_text() -> None:
    messages, _ = template_input("{{ tools }} <｜tool▁sep｜>", request(*HISTORY))
    assert [json.loads(made["function"]["arguments"]) for made in messages[1]["tool_calls"]] == [ARGUMENTS, {}]
    assert HISTORY[1]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS  # the request is as it was


def test_no_calls_are_no_key() -> None:
    message = {"role": "assistant", "content": "Hi", "tool_calls": []}
    for tag in ("<tool_call>", "<|python_tag|>", "<｜tool▁sep｜>"):
        assert template_input("{{ tools }} " + tag, request(message))[0] == ({"role": "assistant", "content": "Hi"},)


@pytest.mark.parametrize(("content", "thinking"), [("", "Hm."), ("I look.", None)])
def test_harmony_gets_the_reasoning_where_it_can(content: str, thinking: str | None) -> None:
    messages, _ = template_input("{{ tools }} <|channel|>", request({**HISTORY[1], "content": content}))
    assert messages[0].get("thinking") == thinking
