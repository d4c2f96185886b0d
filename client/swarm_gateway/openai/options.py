"""From the fields of a completion request to the options of a generation. Owns the defaults and which fields exclude
each other."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from swarm.types import MAX_GRAMMAR_LENGTH, Grammar, GrammarKind
from swarm_gateway.errors import ApiError
from swarm_gateway.openai.requests import SamplingFields

TEMPERATURE = 1.0  # OpenAI's default


def generation_options(request: SamplingFields, max_tokens: int | None) -> dict[str, Any]:
    """Keyword arguments of `SwarmClient.stream`, without `grammar`. Raises ApiError, status 400."""
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    options: dict[str, Any] = {
        "temperature": TEMPERATURE if request.temperature is None else request.temperature,
        "top_p": max(request.top_p, 1e-6) if request.top_p is not None else 1.0,  # 0: the likeliest token
        "top_k": max(request.top_k or 0, 0),  # -1 is off
        "stop": tuple(text for text in stop if text),
        "logit_bias": _logit_bias(request.logit_bias or {}),
    }
    if max_tokens is not None:
        options["max_new_tokens"] = max(1, max_tokens)
    if request.seed is not None:
        options["seed"] = request.seed % (1 << 63)
    given = (
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "ignore_eos",
        "skip_special_tokens",
    )
    options |= {name: value for name in given if (value := getattr(request, name)) is not None}
    return options


def grammar_of(request: SamplingFields) -> Grammar | None:
    """What the answer must match. Raises ApiError, status 400, for two at once or a wrong one."""
    found = [*_response_format(request), *_structured(request), *_guided(request)]
    if len(found) > 1:
        names = ", ".join(param for param, _, _ in found)
        raise ApiError(400, "invalid_request", f"give one of {names}, not several", param=found[1][0])
    if not found:
        return None
    param, kind, source = found[0]
    if not 0 < len(source) <= MAX_GRAMMAR_LENGTH:
        sentence = f"{param} is empty or longer than {MAX_GRAMMAR_LENGTH} characters"
        raise ApiError(400, "invalid_request", sentence, param=param)
    return Grammar(kind, source)


_Found = list[tuple[str, GrammarKind, str]]
"""(name of the field, kind, source)"""


def _response_format(request: SamplingFields) -> _Found:
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [("response_format", GrammarKind.JSON_SCHEMA, '{"type":"object"}')]
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        sentence = "response_format.json_schema needs a `schema`"
        raise ApiError(400, "invalid_request", sentence, param="response_format.json_schema.schema")
    return [("response_format", GrammarKind.JSON_SCHEMA, json.dumps(wanted.json_schema.schema))]


def _structured(request: SamplingFields) -> _Found:
    wanted = request.structured_outputs
    if wanted is None:
        return []
    where = "structured_outputs."
    found = _constraints(wanted.json, wanted.regex, wanted.choice, wanted.grammar, where)
    if wanted.json_object:
        found.append((where + "json_object", GrammarKind.JSON_SCHEMA, '{"type":"object"}'))
    return found


def _guided(request: SamplingFields) -> _Found:
    return _constraints(
        request.guided_json, request.guided_regex, request.guided_choice, request.guided_grammar, "guided_"
    )


def _constraints(
    schema: Mapping[str, Any] | str | None, regex: str | None, choice: list[str] | None, grammar: str | None, where: str
) -> _Found:
    found: _Found = []
    if schema is not None:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        found.append((where + "json", GrammarKind.JSON_SCHEMA, text))
    if regex is not None:
        found.append((where + "regex", GrammarKind.REGEX, regex))
    if choice is not None:
        found.append((where + "choice", GrammarKind.LARK, "start: " + " | ".join(map(json.dumps, choice))))
    if grammar is not None:
        found.append((where + "grammar", GrammarKind.LARK, grammar))
    return found


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    """JSON has no integer keys."""
    biases: dict[int, float] = {}
    for text, bias in given.items():
        if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
            raise ApiError(400, "invalid_request", f"logit_bias: {text[:40]!r} is no token id", param="logit_bias")
        biases[int(text)] = bias
    return biases
