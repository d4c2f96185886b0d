"""Bounded number types and the base class of the planner's JSON types; unknown fields are errors.

Owns the bounds. They are checked where JSON is decoded (`schemas.parse`), not when Python makes an object; constraints
on all objects are checked by the planners.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

MAX_LAYERS = 1000
MAX_NODES = 4096
MAX_DEVICES = 256

Layers = Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
Edge = Annotated[int, Meta(ge=0, le=MAX_LAYERS)]
LayerCapacity = Annotated[int, Meta(ge=0, le=1 << 31)]
Amount = Annotated[float, Meta(ge=0, le=1e30)]
Amounts = Annotated[Sequence[Amount], Meta(max_length=MAX_LAYERS)]
Speed = Annotated[float, Meta(ge=1e-9, le=1e30)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Region = Annotated[str, Meta(max_length=256)]

if TYPE_CHECKING:
    NodeId = str
else:  # JSON may number the nodes; `schemas.IdMap` turns the numbers into strings before planning
    NodeId = Annotated[str, Meta(min_length=1, max_length=256)] | Annotated[int, Meta(ge=0, le=1 << 53)]


class Schema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every type in a request's JSON."""
