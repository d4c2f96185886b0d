"""The JSON objects of OpenAI's answers. Owns their fields."""

from __future__ import annotations

import msgspec

from swarm import __version__
from swarm_gateway.chat.events import StopCause, TokenUsage

FINGERPRINT = f"swarm-{__version__}"
FINISH_REASONS = {
    StopCause.END_OF_TURN: "stop",
    StopCause.STOP_STRING: "stop",
    StopCause.LENGTH: "length",
    StopCause.TOOL_CALLS: "tool_calls",
    StopCause.CANCELLED: "stop",
}


class PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class CompletionUsage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TokenLogprob(msgspec.Struct):
    """`bytes`: of the token's UTF-8; None if the token ends inside a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChosenLogprob]


class CalledFunction(msgspec.Struct, omit_defaults=True):
    name: str = ""
    arguments: str | None = None


class CalledTool(msgspec.Struct, omit_defaults=True):
    """In a stream (with `index`) a part of a call, else all of it."""

    function: CalledFunction
    id: str = ""
    type: str = ""
    index: int | None = None


class AssistantMessage(msgspec.Struct, omit_defaults=True):
    content: str | None  # None: only calls
    role: str = msgspec.field(default_factory=lambda: "assistant")
    tool_calls: list[CalledTool] | None = None
    reasoning_content: str | None = None


class MessageDelta(msgspec.Struct, omit_defaults=True):
    role: str = ""
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CalledTool] | None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None


class ChatDelta(msgspec.Struct):
    index: int
    delta: MessageDelta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str = FINGERPRINT
    choices: list[ChatChoice]
    usage: CompletionUsage


class ChatChunk(msgspec.Struct, kw_only=True):
    """`usage`: absent unless asked for; then null but in the last chunk, which has no choice."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str = FINGERPRINT
    choices: list[ChatDelta]
    usage: CompletionUsage | msgspec.UnsetType | None = msgspec.UNSET


class TextLogprobs(msgspec.Struct):
    """Lists of one length; `token_logprobs` and `top_logprobs` are null for the first token of an echoed prompt."""

    tokens: list[str] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)
    text_offset: list[int] = msgspec.field(default_factory=list)


class TextChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: str | None = None
    logprobs: TextLogprobs | None = None


class Completion(msgspec.Struct, kw_only=True):
    """Of a stream, too: then `choices` are parts."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str = FINGERPRINT
    choices: list[TextChoice]
    usage: CompletionUsage | msgspec.UnsetType | None = msgspec.UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    """`max_model_len`: tokens of prompt and answer; null while the swarm is out of reach."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "swarm"
    max_model_len: int | None = None


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


class Tokenized(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    prompt: str


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(msgspec.Struct):
    error: ErrorBody


def usage_of(usages: list[TokenUsage], prompt_tokens: int) -> CompletionUsage:
    """Of all choices together; the prompt counts once, however many continue it."""
    completion = sum(usage.completion_tokens for usage in usages)
    return CompletionUsage(
        prompt_tokens,
        completion,
        prompt_tokens + completion,
        PromptDetails(min(prompt_tokens, max((usage.cached_tokens for usage in usages), default=0))),
        CompletionDetails(sum(usage.reasoning_tokens for usage in usages)),
    )
