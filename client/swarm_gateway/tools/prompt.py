"""What a model is shown of the tools and of the calls before: through its own template, or, where that knows no tools,
as text in Hermes' form. Owns that text and what some families' templates demand of messages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from swarm_gateway.chat.events import ChatRequest, ToolDefinition
from swarm_gateway.tools.select import CallFormat, call_format, knows_tools, wants_calls

Message: TypeAlias = Mapping[str, Any]

# As in Qwen2.5's template, which many models were trained with.
_INTRODUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
_ALPHANUMERIC = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def template_input(
    template: str | None, request: ChatRequest, *, model: str = ""
) -> tuple[tuple[Message, ...], tuple[dict[str, Any], ...]]:
    """(messages, tools) for the chat template. With `tool_choice` none the model is not shown the tools, so that it
    writes no calls that would be text; calls of the history stay."""
    tools = request.tools if wants_calls(request) else ()
    if not knows_tools(template):
        return tuple(with_tools(request.messages, tools)), ()
    form = call_format(template, model)
    messages: Iterable[Message] = map(_without_empty_calls, request.messages)
    if form in (CallFormat.MISTRAL_LIST, CallFormat.MISTRAL_NAMED):
        messages = map(_with_short_ids, messages)
    elif form is CallFormat.HARMONY:
        messages = map(_with_thinking, messages)
    elif form is CallFormat.LLAMA:
        messages = one_call_each(tuple(messages))
    elif form in (CallFormat.DEEPSEEK_BLOCK, CallFormat.DEEPSEEK_BARE):
        messages = map(_with_argument_text, messages)
    return tuple(messages), tuple(tool.to_template() for tool in tools)


def with_tools(messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> list[dict[str, Any]]:
    """Messages with text contents alone: a system message that lists the tools, and calls and their results as text."""
    rewritten: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if after_result:
                rewritten[-1]["content"] += "\n" + content
            else:
                rewritten.append({"role": "user", "content": content})
        else:
            calls = [_call_text(call["function"]) for call in message.get("tool_calls") or ()]
            rewritten.append({"role": role, "content": "\n".join([content] * bool(content) + calls)})
        after_result = role == "tool"
    if not tools:
        return rewritten
    listed = "\n".join(json.dumps(tool.to_template(), ensure_ascii=False) for tool in tools)
    introduction = _INTRODUCTION.format(tools=listed)
    if rewritten and rewritten[0]["role"] == "system":
        rewritten[0]["content"] = f"{rewritten[0]['content']}\n\n{introduction}".lstrip()
    else:
        rewritten.insert(0, {"role": "system", "content": introduction})
    return rewritten


def _call_text(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Llama 3's template takes one call a message: each of several gets a message of its own, and its result after
    it."""
    split: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            split.append(message)
            continue
        results: list[Message] = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        for number, call in enumerate(calls):
            content = message.get("content") if number == 0 else ""
            split.append({**message, "content": content, "tool_calls": [call]})
            split += [result for result in results if result.get("tool_call_id") == call.get("id")]
        known = {call.get("id") for call in calls}
        split += [result for result in results if result.get("tool_call_id") not in known]
    return split


def _without_empty_calls(message: Message) -> Message:
    """Templates ask whether there is the key."""
    if message.get("tool_calls") or "tool_calls" not in message:
        return message
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _with_argument_text(message: Message) -> Message:
    """DeepSeek's templates join the arguments with other text: they must be JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        text = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": text}})
    return {**message, "tool_calls": calls}


def _with_short_ids(message: Message) -> Message:
    """Mistral's templates refuse ids that are not 9 letters and digits. An id always becomes the same one, so that
    a conversation's prompts share their beginning."""
    changed = dict(message)
    if message.get("tool_calls"):
        changed["tool_calls"] = [{**call, "id": _short_id(call.get("id", ""))} for call in message["tool_calls"]]
    if "tool_call_id" in message:
        changed["tool_call_id"] = _short_id(message["tool_call_id"])
    return changed


def _short_id(call_id: str) -> str:
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    digest = hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).digest()
    return "".join(_ALPHANUMERIC[byte % len(_ALPHANUMERIC)] for byte in digest[:9])


def _with_thinking(message: Message) -> Message:
    """gpt-oss' template calls reasoning `thinking`, and refuses it beside a content when there are calls."""
    thought = message.get("reasoning_content")
    if not thought or (message.get("tool_calls") and message.get("content")):
        return message
    return {**message, "thinking": thought}
