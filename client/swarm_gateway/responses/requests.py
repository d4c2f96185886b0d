"""The body of `POST /v1/responses` and its meaning as a `ChatRequest`.

Fields as in the types of the `openai` package; unknown ones are ignored. What would change the answer and cannot be
done here (built-in tools, images, conversations, prompts stored at OpenAI) is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from swarm.types import MAX_LOGPROBS, Grammar, GrammarKind
from swarm_gateway.chat.events import ChatRequest, ToolChoice, ToolChoiceMode, ToolDefinition
from swarm_gateway.http.values import invalid, schema_text, to_struct
from swarm_gateway.responses.items import Item, to_messages

MAX_ITEMS = 10_000
MAX_FUNCTIONS = 128
LOGPROBS = "message.output_text.logprobs"
NO_THINKING = ("none", "minimal")

FunctionName: TypeAlias = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
ShortText: TypeAlias = Annotated[str, Meta(max_length=512)]


class FunctionTool(msgspec.Struct, frozen=True):
    name: FunctionName
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: ShortText | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, frozen=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(msgspec.Struct, frozen=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesBody(msgspec.Struct, frozen=True, kw_only=True):
    """`input`: see `items`; `tools`, `tool_choice`: see below. `conversation`, `prompt`: refused unless null."""

    model: Annotated[str, Meta(max_length=512)] = ""
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_ITEMS)] = ""
    instructions: str | None = None
    stream: bool | None = None
    background: bool | None = None
    store: bool | None = None
    previous_response_id: ShortText | None = None
    include: Annotated[list[ShortText], Meta(max_length=32)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_FUNCTIONS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[Annotated[str, Meta(max_length=64)], ShortText], Meta(max_length=16)] | None = None
    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    conversation: Any = None
    prompt: Any = None

    @property
    def shows_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())


def check_served(request: ResponsesBody) -> None:
    """Raises ApiError 400 for what no gateway of ours can do."""
    for name in ("conversation", "prompt"):
        if getattr(request, name) is not None:
            raise invalid(name, "it is kept by OpenAI, not here; send the items or a previous_response_id")
    if request.store is False and request.background:
        raise invalid("background", "an answer in the background must be stored to be asked for")


def chat_request(request: ResponsesBody, items: Sequence[Item]) -> ChatRequest:
    """`items`: the whole conversation in canonical form. Raises ApiError 400."""
    tools = [_function(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or ())]
    if len({tool.name for tool in tools}) < len(tools):
        raise invalid("tools", "tool names must be unique")
    allowed, choice = _tool_choice(request.tool_choice or "auto", tools)
    options: dict[str, Any] = {
        "temperature": 1.0 if request.temperature is None else request.temperature,  # OpenAI's default
        "top_p": 1.0 if request.top_p is None else request.top_p,
    }
    if request.max_output_tokens is not None:
        options["max_new_tokens"] = request.max_output_tokens
    if request.shows_logprobs:
        options["logprobs"] = request.top_logprobs or 0
    return ChatRequest(
        model=request.model,
        messages=tuple(to_messages(request.instructions, items)),
        tools=tuple(allowed),
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        grammar=_grammar(request.text),
        options=options,
        template_options=_template_options(request.reasoning),
    )


def _function(tool: dict[str, Any], where: str) -> ToolDefinition:
    if tool.get("type") != "function":
        raise invalid(
            f"{where}.type", f"tools of type {str(tool.get('type'))[:100]!r} are not served; only functions are"
        )
    function = to_struct(tool, FunctionTool, where)
    parameters = function.parameters or {"type": "object", "properties": {}}
    schema_text(parameters, f"{where}.parameters")
    return ToolDefinition(function.name, function.description or "", parameters, strict=bool(function.strict))


def _tool_choice(choice: str | dict[str, Any], tools: list[ToolDefinition]) -> tuple[list[ToolDefinition], ToolChoice]:
    """The tools that may be called, and the choice."""
    known = {tool.name: tool for tool in tools}
    if isinstance(choice, str):
        if choice == "required" and not tools:
            raise invalid("tool_choice", "it demands a call, and there are no tools")
        return tools, ToolChoice(ToolChoiceMode(choice))
    match choice:
        case {"type": "function", "name": str(name)} if name in known:
            return tools, ToolChoice(ToolChoiceMode.REQUIRED, name)
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(listed)}:
            names = [tool.get("name") for tool in listed if isinstance(tool, dict)]
            if names and len(names) == len(listed) and all(isinstance(n, str) and n in known for n in names):
                return [tool for tool in tools if tool.name in names], ToolChoice(ToolChoiceMode(mode))
    raise invalid("tool_choice", "it must name a function of `tools`: none, auto, required, function or allowed_tools")


def _grammar(text: TextConfig | None) -> Grammar | None:
    wanted = text.format if text is not None else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
    if wanted.schema is None or not wanted.name:
        raise invalid("text.format", "a json_schema needs a name and a schema")
    return Grammar(GrammarKind.JSON_SCHEMA, schema_text(wanted.schema, "text.format.schema"))


def _template_options(reasoning: ReasoningConfig | None) -> dict[str, Any]:
    """Absent: as the model's template has it."""
    if reasoning is None or reasoning.effort is None:
        return {}
    if reasoning.effort in NO_THINKING:
        return {"enable_thinking": False}
    return {"enable_thinking": True, "reasoning_effort": reasoning.effort}
