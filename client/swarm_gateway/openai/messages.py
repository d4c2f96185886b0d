"""OpenAI's messages and tools as a ChatRequest has them: text contents, arguments as objects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from swarm_gateway.chat.events import ToolChoice, ToolChoiceMode, ToolDefinition
from swarm_gateway.errors import ApiError
from swarm_gateway.openai.requests import ChatCompletionRequest, MessageParam, ToolParam

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def chat_messages(messages: Sequence[MessageParam]) -> tuple[dict[str, Any], ...]:
    """Raises ApiError, status 400, for a content that is no text."""
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def tool_definitions(tools: Sequence[ToolParam] | None) -> tuple[ToolDefinition, ...]:
    return tuple(
        ToolDefinition(
            t.function.name, t.function.description or "", t.function.parameters or {}, bool(t.function.strict)
        )
        for t in tools or ()
    )


def tool_choice(request: ChatCompletionRequest) -> ToolChoice:
    choice = request.tool_choice
    if choice is None:
        return ToolChoice()
    if isinstance(choice, str):
        return ToolChoice(ToolChoiceMode(choice))
    return ToolChoice(ToolChoiceMode.REQUIRED, choice.function.name)


def _message(message: MessageParam, where: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role  # what templates know it as
    content = _text(message, where)
    if content is None and not message.tool_calls:
        if role != "assistant":
            raise ApiError(400, "invalid_request", f"{where} has no content", param=f"{where}.content")
        content = ""
    made: dict[str, Any] = {"role": role, "content": content}
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            made[name] = value
    return made


def _text(message: MessageParam, where: str) -> str | None:
    if not isinstance(message.content, list):
        return message.content
    for part in message.content:
        if part.type not in _TEXT_PARTS:
            sentence = f"{where}: content of type '{part.type[:40]}' is not supported; this model reads text"
            raise ApiError(400, "unsupported", sentence, param=f"{where}.content")
    return "".join(part.text for part in message.content)


def _arguments(text: str) -> Any:
    """An object for the template; what a model once wrote that is no JSON stays text."""
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
