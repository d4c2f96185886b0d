"""The parsers of what models write: recorded forms, any cut, random and hostile text."""

from __future__ import annotations

import gc
import itertools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser_cases import FAMILIES, Expected
from parsing import parse, setup

from swarm_gateway.chat.events import TextDelta, ToolCallDelta
from swarm_gateway.tools.harmony import HarmonyParser
from swarm_gateway.tools.hermes import HermesParser
from swarm_gateway.tools.json_stream import JsonScanner, is_json
from swarm_gateway.tools.plain import PlainParser
from swarm_gateway.tools.stream import StreamingParser

CASES = [(parser, text, expected) for parser, cases in FAMILIES for text, expected in cases]
PARSERS = [parser for parser, _ in FAMILIES]
FRAGMENTS = sorted(
    {tag for parser in PARSERS for tag in (*parser.CALL_TAGS, *parser.CONTROLS, *parser.THINKING, *parser.AFTER_CALL)}
    | set('{}[],:";\\')
    | {
        "```",
        "<function=search>",
        "<parameter=q>",
        "</parameter>",
        "\n</",
        "</function>",
        "[ARGS]",
        "1",
        "-2.5",
        "true",
    }
    | {
        '{"name": "search", "arguments": {',
        '{"name": "search", "parameters": {',
        "search",
        "function",
        "\n",
        "é",
        "to=",
    }
    | {"functions.search", "analysis", "final", "json", '"q": ', "\\u00e9", "\x00", "get_weather", " "}
)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@pytest.mark.parametrize(("parser", "text", "expected"), CASES)
def test_what_models_write(parser: type[StreamingParser], text: str, expected: Expected) -> None:
    assert parse(parser(setup()), [text]) == expected
    assert parse(parser(setup()), text) == expected  # one character at a time
    for cut in range(len(text)):
        assert parse(parser(setup()), [text[:cut], text[cut:]]) == expected


@pytest.mark.parametrize("parser", PARSERS)
@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=6)), max_size=25),
    cuts=st.lists(st.integers(0, 200), max_size=10),
)
def test_cuts_do_not_change_the_events(parser: type[StreamingParser], parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    whole = parse(parser(setup()), [text])
    assert parse(parser(setup()), pieces_of(text, cuts)) == whole
    assert parse(parser(setup()), text) == whole


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    "unit", ["<tool_call>", '<tool_call>{"name": ', "[TOOL_CALLS]", "<|start|>", "<|channel|>", " ", "<", '{"a":[']
)
def test_long_answers_take_linear_time(parser: type[StreamingParser], unit: str) -> None:
    """Eight times the text: quadratic work would take 64 times as long."""

    def cpu_s(length: int) -> float:
        text = unit * (length // len(unit))
        gc.collect()
        gc.disable()  # or it walks what all tests before have left
        try:
            began = time.process_time()
            assert parse(parser(setup()), [text])
            return time.process_time() - began
        finally:
            gc.enable()

    assert min(cpu_s(200_000) for _ in range(2)) < 30 * (cpu_s(25_000) + 0.01)


@pytest.mark.parametrize("parser", PARSERS)
def test_a_million_characters_of_half_a_tag(parser: type[StreamingParser]) -> None:
    text = "<tool_cal" * 111_111
    assert parse(parser(setup()), [text]) == [("text", text)]


def test_small_pieces_take_linear_time() -> None:
    text = '<tool_call>{"name": "search", "x": [' + '"ab", ' * 20_000
    began = time.process_time()
    parse(HermesParser(setup()), text)
    assert time.process_time() - began < 5.0


def test_text_that_is_no_tag_comes_at_once() -> None:
    parser = HermesParser(setup())
    assert parser.push("Hello <") == [TextDelta("Hello ")]
    assert parser.push("b> x <tool") == [TextDelta("<b> x ")]
    assert parser.push("box") == [TextDelta("<toolbox")]


def test_arguments_come_as_they_are_written() -> None:
    parser = HermesParser(setup())
    parser.push('<tool_call>{"name": "search", "arguments": {"q": "on')
    assert parser.push("e t") == [ToolCallDelta(0, arguments="e t")]
    assert parser.push("wo") == [ToolCallDelta(0, arguments="wo")]


@pytest.mark.parametrize("parser", [HermesParser, PlainParser])
def test_reasoning_that_the_prompt_opened(parser: type[StreamingParser]) -> None:
    answer = "\nIs it <think>?\n</think>\n\nYes."
    assert parse(parser(setup(reasoning=True)), answer) == [("think", "Is it <think>?\n"), ("text", "Yes.")]
    assert parse(parser(setup(reasoning=True)), "never ends") == [("think", "never ends")]


def test_harmony_never_thinks_in_tags() -> None:
    assert parse(HarmonyParser(setup(reasoning=True)), "<think>a") == [("text", "<think>a")]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=10,
)


@given(
    value=JSON_VALUES, ascii_only=st.booleans(), indent=st.sampled_from([None, 1]), after=st.sampled_from(["", " x"])
)
def test_the_scanner_takes_what_python_writes(value: object, ascii_only: bool, indent: int | None, after: str) -> None:
    text = json.dumps([value], ensure_ascii=ascii_only, indent=indent)
    for step in (1, 3, len(text) + 2):
        scanner, rest, taken = JsonScanner(), "", ""
        for start in range(0, len(text + after), step):
            rest += (text + after)[start : start + step]
            rest = rest[scanner.feed(rest) :]
            taken += scanner.take()
        assert (scanner.done, taken, rest) == (True, text, after)


@given(text=st.text(alphabet='{}[]",:0123456789.-+eE truefalsn\\u\n', max_size=14))
def test_the_scanner_agrees_with_python(text: str) -> None:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        json.loads(text, parse_constant=refuse)
        valid = True
    except ValueError:
        valid = False
    assert is_json(text) == valid


def test_the_scanner_bounds_depth_and_numbers() -> None:
    assert is_json("[" * 200 + "]" * 200)
    assert not is_json("[" * 201 + "]" * 201)
    assert is_json("1" * 400)
    assert not is_json("1" * 401)
