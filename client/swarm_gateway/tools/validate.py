"""What a request may say of tools, and the ids of calls. Owns the bounds; what exceeds them is an InvalidRequest."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable

from swarm.errors import InvalidRequest
from swarm.types import MAX_GRAMMAR_LENGTH
from swarm_gateway.chat.events import ChatRequest, ToolDefinition

MAX_TOOLS = 128  # as OpenAI
MAX_DESCRIPTION_LENGTH = 4096  # characters
MAX_SCHEMA_LENGTH = 32 << 10  # characters of JSON
MAX_SCHEMA_DEPTH = 64
TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_ID_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


def new_call_id(random_bytes: Callable[[int], bytes] = secrets.token_bytes) -> str:
    """`call_` and 24 characters that are safe in a URL: 144 bits, so that ids of different answers never meet."""
    return "call_" + "".join(_ID_ALPHABET[byte & 63] for byte in random_bytes(24))


def check_tools(request: ChatRequest) -> None:
    """Raises InvalidRequest naming the tool that is wrong, or when `tool_choice` wants what there is not."""
    tools = request.tools
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"{len(tools)} tools; at most {MAX_TOOLS}")
    seen: set[str] = set()
    total = 0
    for tool in tools:
        if not TOOL_NAME.fullmatch(tool.name):
            raise InvalidRequest(f"tool name {tool.name[:80]!r}: it must be 1 to 64 of a-z, A-Z, 0-9, _ and -")
        if tool.name in seen:
            raise InvalidRequest(f"tool {tool.name}: given twice")
        seen.add(tool.name)
        total += _checked_length(tool)
    if total > MAX_GRAMMAR_LENGTH:
        raise InvalidRequest(f"the tools' schemas have {total} characters; at most {MAX_GRAMMAR_LENGTH} together")
    choice = request.tool_choice
    if choice.name is not None and choice.name not in seen:
        raise InvalidRequest(f"tool_choice: there is no tool {choice.name[:80]!r}")
    if choice.mode == "required" and not tools:
        raise InvalidRequest("tool_choice: a call is required but no tools are given")


def _checked_length(tool: ToolDefinition) -> int:
    """Characters of the tool's schema as JSON."""
    if len(tool.description) > MAX_DESCRIPTION_LENGTH:
        length = len(tool.description)
        raise InvalidRequest(
            f"tool {tool.name}: its description has {length} characters; at most {MAX_DESCRIPTION_LENGTH}"
        )
    if _deeper_than(tool.parameters, MAX_SCHEMA_DEPTH):
        raise InvalidRequest(f"tool {tool.name}: its schema is nested deeper than {MAX_SCHEMA_DEPTH} levels")
    try:
        length = len(json.dumps(tool.parameters, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"tool {tool.name}: its schema is no JSON: {error}") from None
    if length > MAX_SCHEMA_LENGTH:
        raise InvalidRequest(f"tool {tool.name}: its schema has {length} characters; at most {MAX_SCHEMA_LENGTH}")
    if tool.parameters and tool.parameters.get("type", "object") != "object":
        raise InvalidRequest(f"tool {tool.name}: the schema of its parameters must be an object's")
    return length


def _deeper_than(value: object, levels: int) -> bool:
    """By levels and not recursively: what strangers send may be deeper than Python's stack. Takes time in proportion
    to the value: JSON has no shared parts."""
    layer: list[object] = [value]
    for _ in range(levels + 1):
        inner: list[object] = []
        for item in layer:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list | tuple):
                inner.extend(item)
        if not inner:
            return False
        layer = inner
    return True
