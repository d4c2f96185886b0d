"""Parts of a request without a fixed type: JSON schemas, arguments of calls, items of several kinds. Owns their bounds
and errors; whole bodies are those of `body`."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from swarm.types import MAX_GRAMMAR_LENGTH
from swarm_gateway.errors import ApiError

_T = TypeVar("_T")


def to_struct(value: Any, kind: type[_T], where: str) -> _T:
    """`where`: the path of `value` in the request. Raises ApiError 400, which names the field."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        sentence, _, path = str(error).partition(" - at `$")
        raise invalid(where + re.sub(r"\[\.\.\.\].*", "", path.rstrip("`")), sentence) from None


def schema_text(schema: Any, param: str) -> str:
    """A JSON schema as text. Raises ApiError 400 if it is longer than a grammar may be."""
    text = msgspec.json.encode(schema).decode()
    if len(text) > MAX_GRAMMAR_LENGTH:
        raise invalid(param, f"the schema is longer than {MAX_GRAMMAR_LENGTH} characters")
    return text


def invalid(param: str, sentence: str) -> ApiError:
    return ApiError(400, "invalid_request", f"{param}: {sentence}", param=param)
