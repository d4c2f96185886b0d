"""The reading of an answer that has neither tool calls nor reasoning: all of it is text."""

from __future__ import annotations

from swarm_gateway.chat.events import OutputEvent, TextDelta


class PlainText:
    """An OutputParser."""

    def push(self, text: str) -> list[OutputEvent]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[OutputEvent]:
        return []
