"""Which form a model's calls have, by what its chat template contains; the parser for an answer of it. Owns the table
of families."""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from enum import StrEnum

from swarm_gateway.chat.events import ChatRequest, OutputParser, ToolChoiceMode
from swarm_gateway.tools.deepseek import DeepSeekParser
from swarm_gateway.tools.harmony import HarmonyParser
from swarm_gateway.tools.hermes import HermesParser
from swarm_gateway.tools.llama import LlamaParser
from swarm_gateway.tools.mistral import MistralParser
from swarm_gateway.tools.plain import MistralPlainParser, PlainParser
from swarm_gateway.tools.qwen_xml import QwenXmlParser
from swarm_gateway.tools.stream import ParserSetup, StreamingParser
from swarm_gateway.tools.validate import new_call_id


class CallFormat(StrEnum):
    """How a model writes calls. `LIST` and `NAMED`, `BLOCK` and `BARE`: the older and the newer form of a family."""

    HERMES = "hermes"
    QWEN_XML = "qwen_xml"
    LLAMA = "llama"
    MISTRAL_LIST = "mistral_list"
    MISTRAL_NAMED = "mistral_named"
    HARMONY = "harmony"
    DEEPSEEK_BLOCK = "deepseek_block"
    DEEPSEEK_BARE = "deepseek_bare"


_PARSERS: dict[CallFormat, type[StreamingParser]] = {
    CallFormat.HERMES: HermesParser,
    CallFormat.QWEN_XML: QwenXmlParser,
    CallFormat.LLAMA: LlamaParser,
    CallFormat.MISTRAL_LIST: MistralParser,
    CallFormat.MISTRAL_NAMED: MistralParser,
    CallFormat.HARMONY: HarmonyParser,
    CallFormat.DEEPSEEK_BLOCK: DeepSeekParser,
    CallFormat.DEEPSEEK_BARE: DeepSeekParser,
}
_MISTRAL = (CallFormat.MISTRAL_LIST, CallFormat.MISTRAL_NAMED)
# Checked in this order: a template may mention another family's tag in a comment or for compatibility.
_MARKS = (
    ("<|channel|>", CallFormat.HARMONY),
    ("[ARGS]", CallFormat.MISTRAL_NAMED),
    ("[TOOL_CALLS]", CallFormat.MISTRAL_LIST),
    ("<function=", CallFormat.QWEN_XML),
    ("<tool_call>", CallFormat.HERMES),
    ("```json", CallFormat.DEEPSEEK_BLOCK),
    ("<｜tool▁sep｜>", CallFormat.DEEPSEEK_BARE),
    ("<|python_tag|>", CallFormat.LLAMA),
    ("dictionary of argument name and its value", CallFormat.LLAMA),  # 3.2's template names no tag
)
_NAMES = (
    ("gpt-oss", CallFormat.HARMONY),
    ("qwen3-coder", CallFormat.QWEN_XML),
    ("deepseek-v3.1", CallFormat.DEEPSEEK_BARE),
    ("llama-3", CallFormat.LLAMA),
    ("llama3", CallFormat.LLAMA),
)


def call_format(template: str | None, model: str = "") -> CallFormat:
    """Of a model with this chat template; where that names no form, by the model's name, else Hermes'.

    A template that shows no tools has calls in Hermes' form, which the prompt then describes (`prompt.with_tools`),
    even if it can render calls of the history, as DeepSeek's can. Harmony is more than calls.
    """
    source = template or ""
    if not knows_tools(template) and "<|channel|>" not in source:
        return CallFormat.HERMES
    for mark, form in _MARKS:
        if mark in source and not (mark == "```json" and "<｜tool▁sep｜>" not in source):
            return form
    return next((form for part, form in _NAMES if part in model.lower()), CallFormat.HERMES)


def knows_tools(template: str | None) -> bool:
    """Whether the template itself shows the model its tools."""
    return template is not None and re.search(r"\btools\b", template) is not None


def _parser_class(form: CallFormat, request: ChatRequest) -> type[StreamingParser]:
    if wants_calls(request) or form is CallFormat.HARMONY:
        return _PARSERS[form]
    return MistralPlainParser if form in _MISTRAL else PlainParser


def thinking_tags(form: CallFormat, request: ChatRequest) -> tuple[str, str]:
    """Around the model's reasoning; of no meaning for HARMONY."""
    return _parser_class(form, request).THINKING


def wants_calls(request: ChatRequest) -> bool:
    return bool(request.tools) and request.tool_choice.mode is not ToolChoiceMode.NONE


def keeps_control_tokens(form: CallFormat, request: ChatRequest, special_tokens: Container[str]) -> bool:
    """Whether the answer must be decoded with `skip_special_tokens=False`, because tags that the parser looks for are
    among the tokenizer's special tokens. The parser leaves those that are no text out."""
    parser = _parser_class(form, request)
    return any(tag in special_tokens for tag in (*parser.CALL_TAGS, *parser.THINKING, *parser.AFTER_CALL))


def parser_for(
    template: str | None,
    request: ChatRequest,
    *,
    model: str = "",
    prompt_end: str = "",
    new_id: Callable[[], str] = new_call_id,
) -> OutputParser:
    """A parser for one answer to `request`. `prompt_end`: the rendered prompt or its last line, which tells whether the
    template opened the model's reasoning."""
    form = call_format(template, model)
    parser = _parser_class(form, request)
    setup = ParserSetup(
        schemas={tool.name: tool.parameters for tool in request.tools} if wants_calls(request) else {},
        reasoning=prompt_end.rstrip().endswith(parser.THINKING[0]),
        new_id=new_id,
    )
    return parser(setup)
