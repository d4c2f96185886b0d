"""The grammars of answers with calls: what they allow, and that the parsers read what they allow."""

from __future__ import annotations

import functools
import json
import random
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from parsing import short
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from swarm.errors import InvalidRequest
from swarm.types import Grammar, GrammarKind
from swarm_gateway.chat.events import ChatRequest, ToolChoice, ToolChoiceMode, ToolDefinition
from swarm_gateway.tools.grammar import answer_grammar
from swarm_gateway.tools.select import CallFormat, call_format, parser_for

_TAGS = (
    "<|eos|> <|python_tag|> [TOOL_CALLS] [ARGS] <|start|> <|channel|> <|message|> <|constrain|> <|end|> <|call|> "
    "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜>"
)
CONTROLS = tuple(_TAGS.split())
TEMPLATES = {
    CallFormat.HERMES: "{{ tools }} <tool_call>",
    CallFormat.QWEN_XML: "{{ tools }} <tool_call> <function=",
    CallFormat.LLAMA: "{{ tools }} <|python_tag|>",
    CallFormat.MISTRAL_LIST: "{{ tools }} [TOOL_CALLS]",
    CallFormat.MISTRAL_NAMED: "{{ tools }} [TOOL_CALLS] [ARGS]",
    CallFormat.HARMONY: "{{ tools }} <|channel|>",
    CallFormat.DEEPSEEK_BLOCK: "{{ tools }} <｜tool▁sep｜> ```json",
    CallFormat.DEEPSEEK_BARE: "{{ tools }} <｜tool▁sep｜>",
}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"$ref": "#/$defs/count"},
        "at": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "number"}}}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "$defs": {"count": {"type": "integer", "minimum": 0, "maximum": 14}},
}
TOOLS = (ToolDefinition("get_weather", parameters=WEATHER), ToolDefinition("ping"))
REQUIRED = ToolChoice(ToolChoiceMode.REQUIRED)
HERMES = TEMPLATES[CallFormat.HERMES]
PING = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'


@functools.cache
def byte_tokenizer() -> tuple[Tokenizer, LLTokenizer, dict[str, int]]:
    """One token a byte, and special ones for the families' tags."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROLS])
    special = {text: tokenizer.token_to_id(text) for text in CONTROLS}
    return tokenizer, LLTokenizer(tokenizer.to_str(), eos_token=special["<|eos|>"]), special


def matcher(grammar: Grammar) -> LLMatcher:
    assert grammar.kind is GrammarKind.LARK
    made = LLMatcher(byte_tokenizer()[1], LLMatcher.grammar_from_lark(grammar.source))
    assert not made.is_error(), made.get_error() + grammar.source
    return made


def accepts(grammar: Grammar | None, text: str) -> bool:
    assert grammar is not None
    state = matcher(grammar)
    ids = byte_tokenizer()[0].encode(text, add_special_tokens=False).ids
    return state.try_consume_tokens(ids) == len(ids) and state.is_accepting()


def request(choice: ToolChoice = REQUIRED, **changes: Any) -> ChatRequest:
    return replace(ChatRequest("m", (), tools=TOOLS, tool_choice=choice), **changes)


def grammar_of(asked: ChatRequest, template: str | None = HERMES, prompt_end: str = "") -> Grammar | None:
    return answer_grammar(template, asked, byte_tokenizer()[2], prompt_end=prompt_end)


def write(grammar: Grammar, rng: random.Random) -> str:
    """An answer that the grammar allows: random tokens, where those that end something are likelier."""
    tokenizer, _, special = byte_tokenizer()
    eos = special["<|eos|>"]
    closing = {tokenizer.token_to_id(char) for char in '"}]<'}
    value_end = tokenizer.encode("\n</parameter>", add_special_tokens=False).ids
    state, ids = matcher(grammar), list[int]()
    while len(ids) < 4000:
        if rng.random() < 0.1:
            ids += value_end[: state.try_consume_tokens(value_end)]
        bits = state.compute_bitmask()
        allowed = [i for i in range(tokenizer.get_vocab_size()) if bits[i // 8] >> (i % 8) & 1]
        assert allowed
        likely = [i for i in allowed if i in closing or i == eos or i in special.values()]
        token = rng.choice(likely if likely and rng.random() < 0.6 else allowed)
        if token == eos:
            break
        assert state.consume_token(token)
        ids.append(token)
    return tokenizer.decode(ids, skip_special_tokens=False)


def test_the_templates_are_of_their_families() -> None:
    assert {form: call_format(template) for form, template in TEMPLATES.items()} == {form: form for form in CallFormat}


@pytest.mark.parametrize("form", CallFormat)
def test_required_answers_parse_as_calls_that_match(form: CallFormat) -> None:
    asked = request()
    grammar = grammar_of(asked, TEMPLATES[form])
    assert grammar is not None
    rng = random.Random(form)
    schemas = {tool.name: {"type": "object", **tool.parameters} for tool in TOOLS}
    seen = set()
    for _ in range(12):
        parser = parser_for(TEMPLATES[form], asked, new_id=iter(f"call_{i}" for i in range(1000)).__next__)
        text = write(grammar, rng)
        events = short(parser.push(text) + parser.finish())
        assert events, text
        for kind, *call in events:
            if form is CallFormat.HARMONY and kind == "think":
                continue
            assert kind == "call", (text, events)
            name, arguments = call
            jsonschema.validate(json.loads(arguments), schemas[name])
            seen.add(name)
    assert seen == set(schemas)


@pytest.mark.parametrize("form", CallFormat)
def test_a_named_tool_is_the_only_one(form: CallFormat) -> None:
    asked = request(ToolChoice(ToolChoiceMode.REQUIRED, "ping"))
    grammar = grammar_of(asked, TEMPLATES[form])
    assert grammar is not None
    assert "get_weather" not in grammar.source
    parser = parser_for(TEMPLATES[form], asked, new_id=lambda: "call_0")
    events = short(parser.push(write(grammar, random.Random(3))) + parser.finish())
    assert [event[1] for event in events if event[0] == "call"] == ["ping"]


@pytest.mark.parametrize("form", CallFormat)
def test_strict_tools_bind_calls_and_no_text(form: CallFormat) -> None:
    strict = tuple(replace(tool, strict=True) for tool in TOOLS)
    grammar = grammar_of(request(ToolChoice(), tools=strict), TEMPLATES[form])
    final = "<|channel|>final<|message|>" if form is CallFormat.HARMONY else ""
    assert accepts(grammar, final + "It is 20 < 30 [degrees], {well}.")
    calls = {
        CallFormat.HERMES: 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": ARGS}\n</tool_call>',
        CallFormat.QWEN_XML: "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nX\n</parameter>\n"
        "<parameter=days>\nDAYS\n</parameter>\n</function>\n</tool_call>",
        CallFormat.LLAMA: '{"name": "get_weather", "parameters": ARGS}',
        CallFormat.MISTRAL_LIST: 'I look.[TOOL_CALLS][{"name": "get_weather", "arguments": ARGS}]',
        CallFormat.MISTRAL_NAMED: "I look.[TOOL_CALLS]get_weather[ARGS]ARGS",
        CallFormat.HARMONY: "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.get_weather <|constrain|>json<|message|>ARGS",
        CallFormat.DEEPSEEK_BLOCK: "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        "get_weather\n```json\nARGS\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        CallFormat.DEEPSEEK_BARE: "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>ARGS"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    }
    for days, valid in (("3", True), ("99", False), ('"3"', False)):
        arguments = f'{{"city": "X", "days": {days}}}'
        text = calls[form].replace("[ARGS]ARGS", "[ARGS]" + arguments)
        text = text if form is CallFormat.MISTRAL_NAMED else text.replace("ARGS", arguments).replace("DAYS", days)
        assert accepts(grammar, text) is valid, text
        assert not accepts(grammar, text.replace("get_weather", "get_rain"))


def test_what_needs_no_grammar() -> None:
    assert grammar_of(request(ToolChoice())) is None
    assert grammar_of(request(ToolChoice(ToolChoiceMode.NONE))) is None
    regex = Grammar(GrammarKind.REGEX, "a+")
    assert grammar_of(request(ToolChoice(ToolChoiceMode.NONE), grammar=regex)) is regex


def test_one_call_or_several() -> None:
    several, one = grammar_of(request()), grammar_of(request(parallel_tool_calls=False))
    assert accepts(several, PING)
    assert accepts(several, f"{PING}\n{PING}")
    assert accepts(one, PING)
    assert not accepts(one, f"{PING}\n{PING}")
    automatic = grammar_of(request(ToolChoice(), parallel_tool_calls=False))
    assert accepts(automatic, f"Text.\n{PING}")
    assert accepts(automatic, "Text.")
    assert not accepts(automatic, f"{PING}\n{PING}")


@pytest.mark.parametrize(
    ("answer", "good", "bad"),
    [
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object", "required": ["a"]}'), '{"a": 1}', "{}"),
        (Grammar(GrammarKind.REGEX, "[a-z]/x|y"), "b/x", "z"),
        (Grammar(GrammarKind.LARK, 'start: "no" | a\na: /[0-9]{3}/'), "123", "12"),
    ],
)
def test_a_call_or_an_answer_of_a_form(answer: Grammar, good: str, bad: str) -> None:
    grammar = grammar_of(request(ToolChoice(), grammar=answer))
    assert accepts(grammar, PING)
    assert accepts(grammar, good)
    assert not accepts(grammar, bad)
    assert not accepts(grammar, f"Text {PING}")
    harmony = grammar_of(request(ToolChoice(), grammar=answer), TEMPLATES[CallFormat.HARMONY])
    assert accepts(harmony, f"<|channel|>final<|message|>{good}")
    assert not accepts(harmony, f"<|channel|>final<|message|>{bad}")


def test_reasoning_comes_first() -> None:
    template = "<think> " + HERMES
    thought = "Is <tool_call> right?\n</think>\n\n"
    opened = grammar_of(request(), template, "<think>\n")
    assert accepts(opened, thought + PING)
    assert not accepts(opened, PING)
    free = grammar_of(request(), template, "<|im_start|>assistant\n")
    assert accepts(free, "<think>" + thought + PING)
    assert accepts(free, PING)
    assert not accepts(free, "<think>" + thought)
    form = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer"}')
    answer = grammar_of(request(ToolChoice(), tools=(), grammar=form), template, "<think>\n")
    assert accepts(answer, thought + "12")
    assert not accepts(answer, "12")
    closed = grammar_of(request(), template, "<think>\n\n</think>\n\n")
    assert accepts(closed, PING)
    assert not accepts(closed, "<think>" + thought + PING)
    strict = grammar_of(request(ToolChoice(), tools=(replace(TOOLS[1], strict=True),)), template, "<think>\n")
    assert accepts(strict, thought + "Text.")
    assert accepts(strict, thought + PING)
    assert not accepts(strict, thought + PING.replace("ping", "pong"))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string", "pattern": "^(?=a)"}}},
        {"properties": {"a": {"$ref": "#/nowhere"}}},
        {"properties": {"a": {"type": "integer", "multipleOf": 1_234_567}}},
        {"properties": {"a": {"multipleOf": 10**5000 + 1}}},
        {"properties": {"a": {"type": "integer", "multipleOf": True}}},
        {"properties": {"a": {"type": "integer", "multipleOf": 101}, "b": {"type": "integer", "multipleOf": 103.5}}},
        {"properties": {"a": {"type": "no type"}}},
        {"properties": {"a": {"type": "string", "enum": 3}}},
        {"properties": [1]},
        {"required": 4},
        {"properties": {"a": {"enum": ["\ud800"]}}, "required": ["a"]},
    ],
)
def test_a_schema_that_cannot_be_used_names_the_tool(schema: dict[str, Any]) -> None:
    tools = (*TOOLS, ToolDefinition("odd_one", parameters=schema))
    for form in (CallFormat.HERMES, CallFormat.QWEN_XML):
        with pytest.raises(InvalidRequest, match="odd_one"):
            grammar_of(request(tools=tools), TEMPLATES[form])
    assert grammar_of(request(ToolChoice(), tools=tools)) is None


def test_a_grammar_has_a_bound() -> None:
    long = {"type": "object", "properties": {"a": {"enum": ["x" * 30_000]}}}
    tools = tuple(ToolDefinition(f"t{i}", parameters=long) for i in range(3))
    with pytest.raises(InvalidRequest, match="more than 65536"):
        grammar_of(request(tools=tools))


@pytest.mark.real_model
def test_with_a_model_s_own_tokens(real_model: Any) -> None:
    from swarm_kernels.models.open import GgufSource
    from swarm_kernels.tokenizer.gguf import read_gguf_tokenizer

    assert isinstance(real_model, GgufSource)
    tokenizer = read_gguf_tokenizer(real_model.header, str(real_model.path)).tokenizer
    eos = tokenizer.token_to_id("<|im_end|>")
    asked = request(ToolChoice(), tools=tuple(replace(tool, strict=True) for tool in TOOLS))
    grammar = answer_grammar("<|im_start|>", asked, {"<|im_end|>": eos})
    assert grammar is not None
    made = LLMatcher(LLTokenizer(tokenizer.to_str(), eos_token=eos), LLMatcher.grammar_from_lark(grammar.source))
    start = tokenizer.encode("I look.\n<tool_call>").ids
    assert made.try_consume_tokens(start) == len(start)
    forced = tokenizer.decode(made.compute_ff_tokens())
    assert forced == '\n{"name": "'
    rest = tokenizer.encode(PING.removeprefix("<tool_call>")).ids
    assert made.try_consume_tokens(rest) == len(rest)
    assert made.is_accepting()


def test_definitions_that_are_copied_often_are_refused_at_once() -> None:
    """Each parameter of Qwen3-Coder's form has a grammar of its own, with all definitions."""
    definitions = {f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(199)}
    definitions["d199"] = {"type": "string"}
    parameters = {f"p{i}": {"$ref": "#/$defs/d0"} for i in range(200)}
    tool = ToolDefinition("wide", parameters={"type": "object", "$defs": definitions, "properties": parameters})
    with pytest.raises(InvalidRequest, match="more than 65536"):
        grammar_of(request(tools=(tool,)), TEMPLATES[CallFormat.QWEN_XML])
