"""Grammars that callers ask for, as values of `GenerationOptions.grammar`.

Only builds them: whether one can be used is known when it is compiled, before the answer begins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from swarm.errors import InvalidRequest
from swarm.types import MAX_GRAMMAR_LENGTH, Grammar, GrammarKind

_OBJECT = '{"type": "object"}'


def json_schema_grammar(schema: Mapping[str, Any]) -> Grammar:
    """Answers that the JSON schema accepts, on one line as `json.dumps` writes it. Raises InvalidRequest."""
    try:
        text = json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the schema is no JSON: {error}") from None
    return _grammar(GrammarKind.JSON_SCHEMA, text)


def json_object_grammar() -> Grammar:
    """Any JSON object."""
    return _grammar(GrammarKind.JSON_SCHEMA, _OBJECT)


def regex_grammar(text: str) -> Grammar:
    """Answers that the whole regular expression matches, in the syntax of Rust's `regex`. Raises InvalidRequest."""
    return _grammar(GrammarKind.REGEX, text)


def _grammar(kind: GrammarKind, source: str) -> Grammar:
    if not 0 < len(source) <= MAX_GRAMMAR_LENGTH:
        raise InvalidRequest(f"a grammar has 1 to {MAX_GRAMMAR_LENGTH} characters, not {len(source)}")
    return Grammar(kind, source)
