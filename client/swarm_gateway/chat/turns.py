"""A conversation as chat messages, collected piece by piece: pieces of one speaker in a row become one message.

Many chat templates accept roles that alternate only, and APIs that have blocks or items cut one turn into several.
"""

from __future__ import annotations

from typing import Any


class Turns:
    """Pieces of a turn are joined with line breaks. Takes time linear in the length of the conversation."""

    def __init__(self) -> None:
        self._turns: list[dict[str, Any]] = []  # texts as lists of pieces

    def say(self, role: str, text: str) -> None:
        self._turn(role)["content"].append(text)

    def reason(self, text: str) -> None:
        self._turn("assistant").setdefault("reasoning_content", []).append(text)

    def call(self, call_id: str, name: str, arguments: dict[str, Any]) -> None:
        function = {"name": name, "arguments": arguments}
        calls = self._turn("assistant").setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, text: str) -> None:
        """What a tool gave; always a message of its own."""
        self._turns.append({"role": "tool", "tool_call_id": call_id, "content": [text]})

    @property
    def last_role(self) -> str | None:
        return self._turns[-1]["role"] if self._turns else None

    def messages(self) -> list[dict[str, Any]]:
        """As `ChatRequest.messages`."""
        return [
            {
                name: "\n".join(filter(None, value)) if name in ("content", "reasoning_content") else value
                for name, value in turn.items()
            }
            for turn in self._turns
        ]

    def _turn(self, role: str) -> dict[str, Any]:
        if self.last_role != role:
            self._turns.append({"role": role, "content": []})
        return self._turns[-1]
