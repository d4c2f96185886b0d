"""Runs output parsers and puts their events into a short form for comparison."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from swarm_gateway.chat.events import OutputEvent, ReasoningDelta, TextDelta, ToolCallDelta
from swarm_gateway.tools.stream import ParserSetup, StreamingParser, join_events

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "units": {"type": ["string", "null"]}},
    "required": ["city"],
}
SCHEMAS: Mapping[str, Mapping[str, Any]] = {"get_weather": WEATHER, "search": {}, "write_file": {"type": "object"}}


def setup(reasoning: bool = False) -> ParserSetup:
    counter = itertools.count()
    return ParserSetup(schemas=SCHEMAS, reasoning=reasoning, new_id=lambda: f"call_{next(counter)}")


def parse(parser: StreamingParser, pieces: Iterable[str]) -> list[tuple[str, ...]]:
    events: list[OutputEvent] = []
    for piece in pieces:
        events += parser.push(piece)
    return short(events + parser.finish())


def short(events: Iterable[OutputEvent]) -> list[tuple[str, ...]]:
    """("text", ...), ("think", ...) or ("call", name, arguments), neighbours joined."""
    result: list[tuple[str, ...]] = []
    for event in join_events(events):
        match event:
            case TextDelta():
                result.append(("text", event.text))
            case ReasoningDelta():
                result.append(("think", event.text))
            case ToolCallDelta():
                calls = sum(kind[0] == "call" for kind in result)
                assert event.index == calls, "a call's deltas are not next to each other"
                assert event.id == f"call_{calls}"
                result.append(("call", event.name, event.arguments))
    return result


Maker = Callable[[ParserSetup], StreamingParser]
