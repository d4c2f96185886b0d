"""One chat answer independent of the HTTP API: the request, and the events of the answer. Every API translates its own
JSON to a `ChatRequest` and these events back. Owns the types only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

from swarm.types import Chain, Grammar, TokenLogprobs


class ToolChoiceMode(StrEnum):
    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"  # at least one call, of any tool


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`name`: the one tool that must be called; then `mode` is REQUIRED."""

    mode: ToolChoiceMode = ToolChoiceMode.AUTO
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """A function that the model may call. `parameters`: the JSON schema of its arguments, an object's.

    `strict`: the arguments must match the schema, so they are generated under a grammar.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    def to_template(self) -> dict[str, Any]:
        """As chat templates want it: OpenAI's form."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """`messages`: in OpenAI's chat form with text contents; an assistant's may have `tool_calls` (arguments as objects)
    and `reasoning_content`, a tool's has `tool_call_id`. `grammar`: of the answer's text; tool calls have their own.

    `options`: keyword arguments of `SwarmClient.stream` (`GenerationKeywords`), without `grammar`.
    `template_options`: further variables of the chat template, such as `enable_thinking`.
    """

    model: str
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[ToolDefinition, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    grammar: Grammar | None = None
    n: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    template_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer's text. `logprobs`: of the tokens that came with it; the text may lag behind them."""

    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what a model that reasons writes before its answer. `logprobs` as for TextDelta."""

    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of call number `index` of the answer. The first delta of a call has its `id` and `name`; `arguments` is JSON
    text, in pieces."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class WaitingForChain:
    """There is no chain now (a node was lost, or none serves some layers); the answer goes on when there is one."""

    reason: str


class StopCause(StrEnum):
    END_OF_TURN = "end_of_turn"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens. `cached_tokens` of the prompt were in the prefix caches of all hops; `reasoning_tokens` of the
    completion came before the answer's text."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of every answer that did not raise."""

    cause: StopCause
    usage: TokenUsage
    stop_string: str | None = None
    chain: Chain = field(default_factory=lambda: Chain(()))
    repairs: tuple[str, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


OutputEvent: TypeAlias = TextDelta | ReasoningDelta | ToolCallDelta
AnswerEvent: TypeAlias = OutputEvent | WaitingForChain | Finished


class OutputParser(Protocol):
    """Splits what a model writes into text, reasoning and tool calls while it comes. One for each answer.

    All `TextDelta` joined are the answer's text however the input was cut into pieces. Never raises: what is not a
    well-formed call is text.
    """

    def push(self, text: str) -> list[OutputEvent]: ...

    def finish(self) -> list[OutputEvent]:
        """What was held back, at the end of the answer."""
        ...
