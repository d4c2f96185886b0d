"""One valid value of a type that msgspec decodes, with every field filled: what a fuzzer starts from."""

from __future__ import annotations

import enum
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec


def filled(kind: Any, bounds: msgspec.Meta | None = None) -> Any:
    """A value of `kind` within `bounds`: as much as is needed for every field to be there, and no more."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return filled(inner[0], next((meta for meta in inner[1:] if isinstance(meta, msgspec.Meta)), None))
    if origin in (Union, types.UnionType):
        return filled(next(member for member in inner if member is not type(None)))
    if origin is Literal:
        return inner[0]
    if origin in (list, tuple) and (origin is list or Ellipsis in inner):
        item = filled(inner[0])
        values = [item] * max(1, (bounds and bounds.min_length) or 1)
        return values if origin is list else tuple(values)
    if origin is tuple:
        return tuple(filled(member) for member in inner)
    if origin is dict:
        return {filled(inner[0]): filled(inner[1])}
    return _plain(kind, bounds)


def _plain(kind: Any, bounds: msgspec.Meta | None) -> Any:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind, include_extras=True)
        return kind(**{field: filled(hints[field]) for field in kind.__struct_fields__})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return next(iter(kind))
    least = (bounds and bounds.min_length) or 1
    if kind in (bytes, str):
        return b"\x07" * least if kind is bytes else "a" * least
    if kind is bool:
        return True
    if kind in (int, float):
        low = (bounds and bounds.ge) or 0
        if bounds and bounds.gt is not None and bounds.gt >= low:
            low = bounds.gt + (1 if kind is int else 0.5)
        return kind(low)
    if hasattr(kind, "__dataclass_fields__"):
        hints = get_type_hints(kind, include_extras=True)
        return kind(**{field: filled(hints[field]) for field in kind.__dataclass_fields__})
    return None
