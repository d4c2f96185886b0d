"""Items of a conversation in the Responses API: what a client sends, in one canonical form, and as chat messages.

The canonical form is what `GET /v1/responses/{id}/input_items` lists and what a later response continues from.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from swarm_gateway.chat.turns import Turns
from swarm_gateway.http.values import invalid, to_struct

MAX_PARTS = 1_000  # of one item

Item: TypeAlias = dict[str, Any]
CallId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]


class InputTextPart(msgspec.Struct, tag_field="type", tag="input_text", frozen=True):
    text: str


class OutputTextPart(msgspec.Struct, tag_field="type", tag="output_text", frozen=True):
    text: str


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal", frozen=True):
    refusal: str


class ImagePart(msgspec.Struct, tag_field="type", tag="input_image", frozen=True):
    """Known, to be refused in a sentence."""


class FilePart(msgspec.Struct, tag_field="type", tag="input_file", frozen=True):
    """Known, to be refused in a sentence."""


class ReasoningPart(msgspec.Struct, frozen=True):
    type: Literal["reasoning_text", "summary_text"]
    text: str


Part: TypeAlias = InputTextPart | OutputTextPart | RefusalPart | ImagePart | FilePart
Content: TypeAlias = str | Annotated[list[Part], Meta(max_length=MAX_PARTS)]


class MessageItem(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: CallId | None = None


class FunctionCallItem(msgspec.Struct, frozen=True):
    """`arguments`: a JSON object, as text."""

    call_id: CallId
    name: Annotated[str, Meta(min_length=1, max_length=128)]
    arguments: str
    id: CallId | None = None


class FunctionCallOutputItem(msgspec.Struct, frozen=True):
    call_id: CallId
    output: Content
    id: CallId | None = None


class ReasoningItem(msgspec.Struct, frozen=True):
    """`encrypted_content`, of another service, cannot be read and is left out."""

    summary: Annotated[list[ReasoningPart], Meta(max_length=MAX_PARTS)] = []
    content: Annotated[list[ReasoningPart], Meta(max_length=MAX_PARTS)] | None = None
    id: CallId | None = None


def canonical_items(items: str | Sequence[Item]) -> list[Item]:
    """The `input` of a request, each item with an id. Raises ApiError 400."""
    if isinstance(items, str):
        return [_message(MessageItem("user", items), "input")]
    return [_canonical(item, f"input[{index}]") for index, item in enumerate(items)]


def _canonical(item: Item, where: str) -> Item:
    match item.get("type", "message"):
        case "message":
            return _message(to_struct(item, MessageItem, where), where)
        case "function_call":
            call = to_struct(item, FunctionCallItem, where)
            _arguments(call.arguments, f"{where}.arguments")
            return function_call_item(call.id or new_id("fc"), call.call_id, call.name, call.arguments, "completed")
        case "function_call_output":
            output = to_struct(item, FunctionCallOutputItem, where)
            text = _text(output.output, f"{where}.output")
            found = {"id": output.id or new_id("fco"), "type": "function_call_output", "call_id": output.call_id}
            return {**found, "output": text, "status": "completed"}
        case "reasoning":
            thought = to_struct(item, ReasoningItem, where)
            text = "".join(part.text for part in thought.content or thought.summary)
            return reasoning_item(thought.id or new_id("rs"), text, "completed")
        case other:
            raise invalid(f"{where}.type", f"items of type {str(other)[:100]!r} are not served")


def _message(message: MessageItem, where: str) -> Item:
    text = _text(message.content, f"{where}.content")
    if message.role == "assistant":
        return message_item(message.id or new_id("msg"), text, "completed")
    found = {"id": message.id or new_id("msg"), "type": "message", "role": message.role, "status": "completed"}
    return {**found, "content": [{"type": "input_text", "text": text}]}


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def message_item(item_id: str, text: str, status: str, logprobs: Sequence[Item] = ()) -> Item:
    """An assistant's message."""
    content = [output_text(text, logprobs)]
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def output_text(text: str, logprobs: Sequence[Item] = ()) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def function_call_item(item_id: str, call_id: str, name: str, arguments: str, status: str) -> Item:
    found = {"id": item_id, "type": "function_call", "call_id": call_id, "name": name}
    return {**found, "arguments": arguments, "status": status}


def reasoning_item(item_id: str, text: str, status: str) -> Item:
    content = [{"type": "reasoning_text", "text": text}]
    found = {"id": item_id, "type": "reasoning", "summary": [], "content": content}
    return {**found, "encrypted_content": None, "status": status}


def to_messages(instructions: str | None, items: Iterable[Item]) -> list[dict[str, Any]]:
    """Chat messages of canonical items. Raises ApiError 400 for an output whose call is not among them."""
    turns = Turns()
    if instructions:
        turns.say("system", instructions)
    calls: set[str] = set()
    for item in items:
        match item["type"]:
            case "message":
                role = "system" if item["role"] == "developer" else item["role"]
                turns.say(role, item["content"][0]["text"])
            case "reasoning":
                turns.reason(item["content"][0]["text"])
            case "function_call":
                calls.add(item["call_id"])
                turns.call(item["call_id"], item["name"], _arguments(item["arguments"], "input"))
            case _:
                if item["call_id"] not in calls:
                    raise invalid("input", f"there is no function_call with the call_id {item['call_id'][:100]!r}")
                turns.result(item["call_id"], item["output"])
    return turns.messages()


def _text(content: Content, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        match part:
            case InputTextPart() | OutputTextPart():
                texts.append(part.text)
            case RefusalPart():
                texts.append(part.refusal)
            case _:
                kind = part.__struct_config__.tag
                raise invalid(f"{where}[{index}]", f"parts of type '{kind}' are not served: the models here read text")
    return "\n".join(texts)


def _arguments(text: str, where: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise invalid(where, "the arguments of a call must be the JSON text of an object")
    return value
