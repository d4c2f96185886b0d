"""Tools' JSON schemas as parts of grammars: whether llguidance can take one, and the form of the JSON under it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from swarm.errors import InvalidRequest

MAX_MULTIPLE_OF = 10_000  # as at the tail: llguidance's time and memory grow with it, and none of its limits hold them
_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as json.dumps, on one line


def embedded(schema: Mapping[str, Any]) -> str:
    """For `%json`. With free white space a small model may write blanks for ever."""
    return json.dumps({**schema, "x-guidance": _FORM})


def property_schema(schema: Mapping[str, Any], value: Any) -> dict[str, Any]:
    """One property's schema by itself, with the definitions that it may refer to."""
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {**definitions, **value} if isinstance(value, Mapping) else definitions


def check_schema(tool: str, schema: Mapping[str, Any]) -> None:
    """Raises InvalidRequest naming the tool."""
    common = 1
    for number in _multiples(schema):
        digits = Decimal(number).normalize().as_tuple().digits  # powers of ten cost nothing
        common = math.lcm(common, int("".join(map(str, digits))) or 1)
        if common > MAX_MULTIPLE_OF:
            raise InvalidRequest(f"tool {tool}: multiples beyond {MAX_MULTIPLE_OF} (multipleOf) are not supported")
    limits = LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=25_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
    )
    try:
        failed, messages = LLMatcher.validate_grammar_with_warnings(
            LLMatcher.grammar_from_json_schema(embedded(schema)), limits=limits
        )
    except (ValueError, UnicodeEncodeError) as error:  # the latter: lone surrogates
        failed, messages = True, [str(error)]
    if failed:
        reason = " ".join(" ".join(messages).split())[:300]
        raise InvalidRequest(f"tool {tool}: its schema cannot be used as a grammar: {reason}")


def _multiples(schema: object) -> Iterator[str]:
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            multiple = value.get("multipleOf")
            if isinstance(multiple, int | float) and not isinstance(multiple, bool):
                # Python writes no integer of thousands of digits; such a one is refused anyway.
                yield str(multiple) if abs(multiple) < 10**300 else str(MAX_MULTIPLE_OF + 1)
            waiting.extend(value.values())
        elif isinstance(value, list | tuple):
            waiting.extend(value)
