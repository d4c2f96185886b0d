"""The grammar of an answer with calls: which text, reasoning, calls and JSON a request allows, in the model's own form.
Owns the Lark source; llguidance's syntax: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md

Special tokens appear by their ids, other tags as text. `%json` embeds each tool's schema by itself, so that its `$ref`
keep their meaning, after a fixed name: what is fixed is proposed by the drafter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import regex_to_lark

from swarm.errors import InvalidRequest
from swarm.types import MAX_GRAMMAR_LENGTH, Grammar, GrammarKind
from swarm_gateway.chat.events import ChatRequest, ToolChoiceMode, ToolDefinition
from swarm_gateway.tools.deepseek import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from swarm_gateway.tools.schema import check_schema, embedded, property_schema
from swarm_gateway.tools.select import CallFormat, call_format, thinking_tags, wants_calls

_XML_KEY = re.compile(r"[^<>\s][^<>\n]{0,199}")


@dataclass(frozen=True, slots=True)
class _CallForm:
    """Calls as text: `trigger` begins a list of them; `before` has NAME where the name stands."""

    trigger: str
    before: str
    after: str
    between: str
    opening: str = ""
    closing: str = ""


_FORMS = {
    CallFormat.HERMES: _CallForm(
        "<tool_call>", '\n{"name": "NAME", "arguments": ', "}\n</tool_call>", between="\n<tool_call>"
    ),
    CallFormat.QWEN_XML: _CallForm(
        "<tool_call>", "\n<function=NAME>\n", "</function>\n</tool_call>", between="\n<tool_call>"
    ),
    CallFormat.LLAMA: _CallForm("<|python_tag|>", '{"name": "NAME", "parameters": ', "}", between="; "),
    CallFormat.MISTRAL_LIST: _CallForm(
        "[TOOL_CALLS]", '{"name": "NAME", "arguments": ', "}", between=", ", opening="[", closing="]"
    ),
    CallFormat.MISTRAL_NAMED: _CallForm("[TOOL_CALLS]", "NAME[ARGS]", "", between="[TOOL_CALLS]"),
    # One call an answer: `<|call|>` ends the turn.
    CallFormat.HARMONY: _CallForm(
        "<|channel|>", "commentary to=functions.NAME <|constrain|>json<|message|>", "", between=""
    ),
    CallFormat.DEEPSEEK_BLOCK: _CallForm(
        CALLS_BEGIN, f"{CALL_BEGIN}function{SEPARATOR}NAME\n```json\n", f"\n```{CALL_END}", "\n", closing=CALLS_END
    ),
    CallFormat.DEEPSEEK_BARE: _CallForm(
        CALLS_BEGIN, f"{CALL_BEGIN}NAME{SEPARATOR}", CALL_END, between="", closing=CALLS_END
    ),
}


def answer_grammar(
    template: str | None,
    request: ChatRequest,
    special_tokens: Mapping[str, int],
    *,
    model: str = "",
    prompt_end: str = "",
) -> Grammar | None:
    """None: the answer is free. `special_tokens`: the tokenizer's, with their ids. `prompt_end` as for `parser_for`.

    Compiles the tools' schemas to see whether that can be done, which takes milliseconds each: not for the event loop's
    thread. Raises InvalidRequest naming a tool whose schema cannot be used, or when the whole is too long.
    """
    calls = wants_calls(request)
    required = calls and request.tool_choice.mode is ToolChoiceMode.REQUIRED
    bound = calls and (required or not request.parallel_tool_calls or any(tool.strict for tool in request.tools))
    if not bound and request.grammar is None:
        return None
    form = call_format(template, model)
    opening, closing = thinking_tags(form, request)
    opened = prompt_end.rstrip().endswith(opening) and form is not CallFormat.HARMONY
    closed = prompt_end.rstrip().endswith(closing)  # as by `enable_thinking` false
    thinks = form is CallFormat.HARMONY or (opening in (template or "") and not closed) or opened
    if not calls and not thinks:
        return request.grammar
    lark = _LarkAnswer(form, request, special_tokens)
    body = lark.required() if required else lark.auto() if calls else lark.answer()
    source = lark.source(lark.thought(opened, opening, closing) + body if thinks else body)
    if len(source) > MAX_GRAMMAR_LENGTH:
        raise InvalidRequest(f"the tools' grammar has more than {MAX_GRAMMAR_LENGTH} characters")
    return Grammar(GrammarKind.LARK, source)


class _LarkAnswer:
    """Collects the rules of one grammar; its methods return what stands at the right of a rule."""

    def __init__(self, form: CallFormat, request: ChatRequest, special_tokens: Mapping[str, int]) -> None:
        self._form = form
        self._calls = _FORMS[form]
        self._request = request
        self._special = special_tokens
        self._rules: list[str] = []
        self._length = 0  # of the rules
        self._tags = re.compile("|".join(re.escape(token) for token in special_tokens if token) or r"(?!)")

    def source(self, start: str) -> str:
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules, "TEXT: /(.|\\n)*/"]) + "\n"

    def required(self) -> str:
        return self.spelled(self._trigger()) + self._call_list()

    def auto(self) -> str:
        """Text or calls, or text and then calls; with a form for the text (`response_format`), that or calls."""
        calls = self._rule("calls", self._call_list())
        if self._form is CallFormat.HARMONY:
            preamble = self.spelled("<|channel|>commentary<|message|>") + self._until("<|end|>")
            final = self.spelled("<|channel|>final<|message|>") + self._text()
            call = f"{self.spelled('<|channel|>')}{calls}"
            return f"(({preamble}{self.spelled('<|start|>assistant')})? {call} | {final})"
        if self._form is CallFormat.LLAMA:
            tag = "<|python_tag|>"
            head = f"({self.spelled(tag)})? " if tag in self._special else ""
            if self._request.grammar is None:
                self._rules.append("NO_CALL: /([^{\\s](.|\\n)*)?/")
            return f"({head}{calls} | {'NO_CALL' if self._request.grammar is None else self._text()})"
        if self._request.grammar is not None:
            return f"({self.spelled(self._trigger())}{calls} | {self._text()})"
        return f"({self._until(self._trigger())}{calls} | TEXT)"

    def answer(self) -> str:
        if self._form is CallFormat.HARMONY:
            return self.spelled("<|channel|>final<|message|>") + self._text()
        return self._text()

    def thought(self, opened: bool, opening: str, closing: str) -> str:
        """Reasoning before the answer: what is left of it when the prompt opened it, else as the model likes. Where the
        answer is text anyway, text holds the reasoning too, unless its tags are special tokens."""
        if self._form is CallFormat.HARMONY:
            analysis = self.spelled("<|channel|>analysis<|message|>") + self._until("<|end|>")
            return f"({analysis}{self.spelled('<|start|>assistant')})? "
        white = "/[ \\n]{0,4}/ " if self._request.tool_choice.mode is ToolChoiceMode.REQUIRED else ""
        white = "/[ \\n]{0,4}/ " if self._request.grammar is not None else white
        if opened:
            return self._until(closing) + white
        if not white and opening not in self._special:
            return ""
        return f"({self.spelled(opening)}{self._until(closing)}{white})? "

    def spelled(self, text: str) -> str:
        """A fixed text, with special tokens as such."""
        parts: list[str] = []
        at = 0
        for found in self._tags.finditer(text):
            parts += [json.dumps(text[at : found.start()])] * (found.start() > at)
            parts.append(f"<[{self._special[found[0]]}]>")
            at = found.end()
        parts += [json.dumps(text[at:])] * (len(text) > at)
        return "".join(part + " " for part in parts)

    def _trigger(self) -> str:
        """Llama writes calls without one."""
        return "" if self._form is CallFormat.LLAMA else self._calls.trigger

    def _until(self, tag: str) -> str:
        """Any text, and then `tag`. Special tokens are never part of a text; as text, the tag must end it lazily."""
        if tag in self._special:
            return f"TEXT {self.spelled(tag)}"
        return self._rule("until", f"TEXT {json.dumps(tag)}", option="[lazy]") + " "

    def _text(self) -> str:
        """The answer's text."""
        grammar = self._request.grammar
        if grammar is None:
            return "TEXT"
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                return self._rule("answer", f"%json {embedded(_schema(grammar.source))}")
            case GrammarKind.REGEX:
                return self._rule("answer", f"/(?:{regex_to_lark(grammar.source)})/")
            case GrammarKind.LARK:
                return self._rule("answer", f"%lark {{\n{grammar.source}\n}}")

    def _call_list(self) -> str:
        choice = self._request.tool_choice
        tools = [tool for tool in self._request.tools if choice.name in (None, tool.name)]
        call = self._rule("call", " | ".join(self._call(tool) for tool in tools))
        more = ""
        if self._request.parallel_tool_calls and choice.name is None and self._calls.between:
            more = f"({self.spelled(self._calls.between)}{call})* "
        return f"{self.spelled(self._calls.opening)}{call} {more}{self.spelled(self._calls.closing)}"

    def _call(self, tool: ToolDefinition) -> str:
        strict = tool.strict or self._request.tool_choice.mode is ToolChoiceMode.REQUIRED
        schema = {"type": "object", **(tool.parameters if strict else {})}
        check_schema(tool.name, schema)
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)  # what is declared is enough
        if self._form is CallFormat.QWEN_XML:
            arguments = self._xml_parameters(tool.name, schema)
        else:
            arguments = self._rule("arguments", f"%json {embedded(schema)}") + " "
        before = self._calls.before.replace("NAME", tool.name)
        return f"{self.spelled(before)}{arguments}{self.spelled(self._calls.after)}"

    def _xml_parameters(self, name: str, schema: Mapping[str, Any]) -> str:
        """In the schema's order; a string as it is, others as JSON. Without declared ones, any."""
        properties = schema.get("properties")
        if not isinstance(properties, dict) or not properties:
            key = self._rule("key", "/[a-zA-Z0-9_-]{1,64}/")
            return f'("<parameter=" {key} ">\\n" {self._until("</parameter>")}"\\n")* '
        parts: list[str] = []
        required = schema.get("required") or ()
        for key, value in properties.items():
            if not _XML_KEY.fullmatch(key):
                raise InvalidRequest(f"tool {name}: the parameter {key[:80]!r} cannot be written by this model")
            whole = property_schema(schema, value)
            check_schema(name, whole)
            body = self._xml_value(whole)
            parts.append(f'({self.spelled(f"<parameter={key}>")}"\\n" {body}"\\n"){"" if key in required else "?"} ')
        return "".join(parts)

    def _xml_value(self, schema: Mapping[str, Any]) -> str:
        """Of strings, an enumeration is kept to, and a pattern, format or length is not."""
        end = "\n</parameter>"
        if schema.get("type") != "string":
            return self._rule("value", f"%json {embedded(schema)}") + f" {json.dumps(end)} "
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if choices is None:
            return self._until(end.strip())
        spelled = " | ".join(json.dumps(choice + end) for choice in choices if isinstance(choice, str))
        return f"({spelled or json.dumps(end)}) "

    def _rule(self, name: str, body: str, option: str = "") -> str:
        rule = f"{name}_{len(self._rules)}"
        self._rules.append(f"{rule}{option}: {body}")
        self._length += len(self._rules[-1])
        if self._length > MAX_GRAMMAR_LENGTH:  # before more of it is made
            raise InvalidRequest(f"the tools' grammar has more than {MAX_GRAMMAR_LENGTH} characters")
        return rule


def _schema(source: str) -> dict[str, Any]:
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the answer's schema is no JSON: {error}") from None
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidRequest("the answer's schema must be an object")
    return schema
