"""Random JSON schemas of rising depth, as programs ask models for them: seeded, so that every run has the same.

Strings and arrays are bounded, so that an answer ends; every schema is one that llguidance supports.
"""

from __future__ import annotations

import random
from typing import Any

SCALARS = ("string", "integer", "number", "boolean", "enum", "const")
WORDS = (
    "name", "age", "city", "color", "price", "status", "title", "items", "count", "country", "email", "rating",
    "category", "description", "author", "year", "language", "address", "phone", "enabled", "size", "weight",
)  # fmt: skip
CHOICES = ("red", "green", "blue", "small", "medium", "large", "open", "closed", "pending", "yes", "no", "unknown")


def random_schema(seed: int, depth: int) -> dict[str, Any]:
    """An object with objects, arrays and unions up to `depth` levels below it."""
    return _object(random.Random(f"schema {seed}"), depth)


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    if depth <= 0:
        return _scalar(rng)
    kind = rng.choices(("scalar", "object", "array", "anyOf", "oneOf"), (4, 3, 2, 1, 1))[0]
    match kind:
        case "object":
            return _object(rng, depth - 1)
        case "array":
            low = rng.randint(0, 2)
            return {
                "type": "array",
                "items": _any(rng, depth - 1),
                "minItems": low,
                "maxItems": low + rng.randint(1, 2),
            }
        case "anyOf":
            return {"anyOf": [{"type": "null"}, _any(rng, depth - 1)]}
        case "oneOf":  # told apart by a constant, as a tagged union
            names = rng.sample(CHOICES, 2)
            return {"oneOf": [_object(rng, depth - 1, kind=name) for name in names]}
    return _scalar(rng)


def _object(rng: random.Random, depth: int, kind: str = "") -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(2, 4))
    properties = {"kind": {"const": kind}} if kind else {}
    properties |= {name: _any(rng, depth) for name in names}
    required = [name for name in properties if name == "kind" or rng.random() < 0.8]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _scalar(rng: random.Random) -> dict[str, Any]:
    match rng.choice(SCALARS):
        case "string":
            return {"type": "string", "maxLength": rng.choice((8, 16, 24))}
        case "integer":
            low = rng.choice((0, 1, -10))
            return {"type": "integer", "minimum": low, "maximum": low + rng.choice((9, 100, 5000))}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": rng.choice((1, 100))}
        case "boolean":
            return {"type": "boolean"}
        case "const":
            return {"const": rng.choice((*CHOICES, 7, True))}
    return {"enum": rng.sample(CHOICES, rng.randint(2, 5))}
