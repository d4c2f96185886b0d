"""The bodies of `/v1/messages` and `/v1/messages/count_tokens` and their meaning as a `ChatRequest`.

Fields as in the types of the `anthropic` package; fields that it does not have are ignored, as are those that only
concern Anthropic's service (`metadata`, `service_tier`, `cache_control`). What would change the answer and cannot be
done here (images, documents, Anthropic's own tools) is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from swarm.types import Grammar, GrammarKind
from swarm_client.api.options import MAX_STOP_LENGTH, MAX_STOP_STRINGS
from swarm_gateway.chat.events import ChatRequest, ToolChoice, ToolChoiceMode, ToolDefinition
from swarm_gateway.chat.turns import Turns
from swarm_gateway.errors import ApiError
from swarm_gateway.http.values import invalid, schema_text

MAX_MESSAGES = 10_000
MAX_BLOCKS = 1_000  # of one message
MAX_TOOLS = 128

Identifier: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
ToolName: TypeAlias = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]


class TextBlock(msgspec.Struct, tag_field="type", tag="text", frozen=True):
    text: str


class ImageBlock(msgspec.Struct, tag_field="type", tag="image", frozen=True):
    """Known, to be refused in a sentence."""


class DocumentBlock(msgspec.Struct, tag_field="type", tag="document", frozen=True):
    """Known, to be refused in a sentence."""


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking", frozen=True):
    thinking: str
    signature: str = ""  # not checked: what a client says about its own conversation is its own affair


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking", frozen=True):
    """Never written here; that of another service cannot be read, so it is left out."""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use", frozen=True):
    id: Identifier
    name: Annotated[str, Meta(min_length=1, max_length=128)]
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result", frozen=True):
    tool_use_id: Identifier
    content: str | Annotated[list[TextBlock | ImageBlock | DocumentBlock], Meta(max_length=MAX_BLOCKS)] = ""
    is_error: bool = False


ContentBlock: TypeAlias = (
    TextBlock | ImageBlock | DocumentBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock
)
TextContent: TypeAlias = str | Annotated[list[TextBlock], Meta(max_length=MAX_BLOCKS)]


class InputMessage(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], Meta(max_length=MAX_BLOCKS)]


class ThinkingConfig(msgspec.Struct, frozen=True):
    """`budget_tokens` cannot be enforced on a model that is only asked by its template to think."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=1024)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class ToolChoiceParam(msgspec.Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class MessagesTool(msgspec.Struct, frozen=True):
    """`type`: "custom" or absent; every other one is a tool of Anthropic's own."""

    name: ToolName
    type: Annotated[str, Meta(max_length=128)] | None = None
    description: str = ""
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensBody(msgspec.Struct, frozen=True, kw_only=True):
    """What `/v1/messages/count_tokens` and `/v1/messages` have in common: all that makes the prompt."""

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: TextContent = ""
    tools: Annotated[list[MessagesTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # as betas before `output_config` had it


class MessagesBody(CountTokensBody, frozen=True, kw_only=True):
    """The body of `/v1/messages`."""

    max_tokens: Annotated[int, Meta(ge=1, le=1 << 31)]
    stream: bool = False
    stop_sequences: (
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]], Meta(max_length=MAX_STOP_STRINGS)
        ]
        | None
    ) = None
    temperature: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"


def chat_request(request: MessagesBody) -> ChatRequest:
    """Raises ApiError 400."""
    options: dict[str, Any] = {
        "max_new_tokens": request.max_tokens,
        "temperature": 1.0 if request.temperature is None else request.temperature,  # Anthropic's default
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "top_k": request.top_k or 0,
        "stop": tuple(request.stop_sequences or ()),
    }
    return prompt_request(request, options)


def prompt_request(request: CountTokensBody, options: dict[str, Any] | None = None) -> ChatRequest:
    """All that makes the prompt. Raises ApiError 400."""
    tools = tuple(_tool(i, tool) for i, tool in enumerate(request.tools or ()))
    if len({tool.name for tool in tools}) < len(tools):
        raise invalid("tools", "tool names must be unique")
    choice = request.tool_choice or ToolChoiceParam("auto")
    thinks = request.thinking is not None and request.thinking.type != "disabled"
    return ChatRequest(
        model=request.model,
        messages=tuple(_conversation(request)),
        tools=tools,
        tool_choice=_tool_choice(choice, tools),
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        grammar=_grammar(request),
        options=options or {},
        template_options={"enable_thinking": thinks},  # a client that did not ask expects text as the first block
    )


def _tool(index: int, tool: MessagesTool) -> ToolDefinition:
    if tool.type not in (None, "custom") or tool.input_schema is None:
        what = f"tools of type '{tool.type}' are not served" if tool.type not in (None, "custom") else "it has none"
        raise invalid(f"tools.{index}", f"a tool needs an input_schema, and {what}")
    schema_text(tool.input_schema, f"tools.{index}.input_schema")
    return ToolDefinition(tool.name, tool.description, tool.input_schema, strict=bool(tool.strict))


def _tool_choice(choice: ToolChoiceParam, tools: tuple[ToolDefinition, ...]) -> ToolChoice:
    match choice.type:
        case "none":
            return ToolChoice(ToolChoiceMode.NONE)
        case "auto":
            return ToolChoice(ToolChoiceMode.AUTO)
        case "any" if tools:
            return ToolChoice(ToolChoiceMode.REQUIRED)
        case "tool" if any(tool.name == choice.name for tool in tools):
            return ToolChoice(ToolChoiceMode.REQUIRED, choice.name)
        case _:
            raise invalid("tool_choice", "it demands a tool that `tools` does not have")


def _grammar(request: CountTokensBody) -> Grammar | None:
    wanted = request.output_config.format if request.output_config is not None else None
    wanted = wanted or request.output_format
    if wanted is None:
        return None
    return Grammar(GrammarKind.JSON_SCHEMA, schema_text(wanted.schema, "output_config.format.schema"))


def _conversation(request: CountTokensBody) -> list[dict[str, Any]]:
    """In OpenAI's chat form. Turns of the same role in a row become one, as Anthropic documents it."""
    turns = Turns()
    system = _text(request.system, "system")
    if system:
        turns.say("system", system)
    for i, message in enumerate(request.messages):
        content = message.content
        blocks: list[ContentBlock] = [TextBlock(content)] if isinstance(content, str) else content
        for j, block in enumerate(blocks):
            _add(turns, message.role, block, f"messages.{i}.content.{j}")
    if turns.last_role == "assistant":
        raise invalid("messages", "the last message must be the user's: continuing an assistant message is not served")
    return turns.messages()


def _add(turns: Turns, role: str, block: ContentBlock, where: str) -> None:
    match block, role:
        case TextBlock(), _:
            turns.say(role, block.text)
        case ToolResultBlock(), "user":
            text = _text(block.content, where)
            turns.result(block.tool_use_id, f"Error: {text}" if block.is_error else text)
        case ThinkingBlock(), "assistant":
            turns.reason(block.thinking)
        case ToolUseBlock(), "assistant":
            turns.call(block.id, block.name, block.input)
        case RedactedThinkingBlock(), "assistant":
            pass
        case _:
            raise _unserved(where, block, role)


def _text(content: str | list[TextBlock] | list[TextBlock | ImageBlock | DocumentBlock], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for j, block in enumerate(content):
        if not isinstance(block, TextBlock):
            raise _unserved(f"{where}.content.{j}", block, "user")
        texts.append(block.text)
    return "\n".join(texts)


def _unserved(where: str, block: ContentBlock, role: str) -> ApiError:
    kind = block.__struct_config__.tag
    if isinstance(block, ImageBlock | DocumentBlock):
        return invalid(where, f"blocks of type '{kind}' are not served: the models here read text")
    return invalid(where, f"a message of role '{role}' cannot have a block of type '{kind}'")
