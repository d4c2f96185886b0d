"""The bodies of OpenAI's chat completions and completions, and vLLM's further fields. Bounds on every field; unknown
fields are ignored, as clients send many that mean nothing here (`user`, `metadata`, `store`, `service_tier`, ...).

https://platform.openai.com/docs/api-reference/chat, https://docs.vllm.ai/en/latest/serving/openai_compatible_server
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from swarm.types import MAX_LOGIT_BIAS, MAX_LOGPROBS

MAX_MESSAGES = 4096
MAX_PARTS = 1024  # of one message
MAX_TOOLS = 128
MAX_N = 16
MAX_PROMPTS = 64
MAX_TOKENS = 1 << 18  # of one text
MAX_INT = (1 << 63) - 1

Name = Annotated[str, Meta(max_length=256)]
StopStrings = (
    Annotated[str, Meta(max_length=256)] | Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=16)]
)
Penalty = Annotated[float, Meta(ge=-2, le=2)]
LogprobCount = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Tokens = Annotated[int, Meta(ge=1, le=1 << 31)]


class ContentPart(msgspec.Struct):
    type: Name
    text: str = ""


class FunctionCall(msgspec.Struct):
    name: Name
    arguments: str = ""


class ToolCallParam(msgspec.Struct):
    function: FunctionCall
    id: Name = ""
    type: Name = "function"


class MessageParam(msgspec.Struct):
    """One message of a conversation. `content` of None: only calls."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Meta(max_length=MAX_PARTS)] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCallParam], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Name | None = None
    reasoning_content: str | None = None


class FunctionParam(msgspec.Struct):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolParam(msgspec.Struct):
    function: FunctionParam
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct):
    name: Name


class NamedToolChoice(msgspec.Struct):
    function: FunctionName
    type: Literal["function"] = "function"


class SchemaParam(msgspec.Struct):
    name: Name = ""
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaParam | None = None


class StructuredOutputs(msgspec.Struct):
    """vLLM's; one of these at a time."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=1024)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What both kinds of completions share. None: the default."""

    model: Name = ""
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 20)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LOGIT_BIAS)] | None
    ) = None
    seed: Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)] | None = None
    stop: StopStrings | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in log-probabilities, as "token_id:17": texts are not unique
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(min_length=1, max_length=1024)] | None = None
    guided_grammar: str | None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatCompletionRequest(SamplingFields, kw_only=True):
    messages: Annotated[list[MessageParam], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    tools: Annotated[list[ToolParam], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Name | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    functions: list[Any] | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    """`prompt`: a text, several, token ids, or several lists of them."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: LogprobCount | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """vLLM's: of a text, or of a conversation by the model's chat template."""

    model: Name = ""
    prompt: str | None = None
    messages: Annotated[list[MessageParam], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    tools: Annotated[list[ToolParam], Meta(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
    model: Name = ""
