"""The events of one answer as Anthropic's Messages API has them: a stream of events, or one message. Owns the order of
the stream (`message_start`, each block's start, deltas and stop, `message_delta`, `message_stop`)."""

from __future__ import annotations

import base64
import hashlib
import secrets
from typing import Any

import msgspec

from swarm_gateway.chat.events import (
    AnswerEvent,
    Finished,
    ReasoningDelta,
    StopCause,
    TextDelta,
    TokenUsage,
    ToolCallDelta,
    WaitingForChain,
)

Event = dict[str, Any]

PING: Event = {"type": "ping"}
STOP_REASONS = {
    StopCause.END_OF_TURN: "end_turn",
    StopCause.STOP_STRING: "stop_sequence",
    StopCause.LENGTH: "max_tokens",
    StopCause.TOOL_CALLS: "tool_use",
    StopCause.CANCELLED: "end_turn",
}


class MessageAnswer:
    """Fed with the events of one answer; `start` and `push` return the stream's events, `message` the whole.

    `max_tokens`: as asked for; an answer that got less room ends for the model's context window. `prompt_tokens`:
    for `message_start`. `shows_thinking`: if not, blocks of thinking are empty.
    """

    def __init__(self, model: str, max_tokens: int, prompt_tokens: int = 0, *, shows_thinking: bool = True) -> None:
        self._model = model
        self._max_tokens = max_tokens
        self._shows_thinking = shows_thinking
        self._id = f"msg_{secrets.token_hex(12)}"
        self._content: list[dict[str, Any]] = []
        self._texts: list[str] = []  # of the open block
        self._is_open = False
        self._call: int | None = None  # of the open block
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None
        self._usage = TokenUsage(prompt_tokens)

    def start(self) -> list[Event]:
        return [{"type": "message_start", "message": self.message()}, PING]

    def push(self, event: AnswerEvent) -> list[Event]:
        match event:
            case TextDelta():
                return self._extend("text", {"type": "text_delta", "text": event.text}) if event.text else []
            case ReasoningDelta():
                return self._think(event.text) if event.text else []
            case ToolCallDelta():
                return self._tool_call(event)
            case WaitingForChain():
                return [PING]
            case Finished():
                return self._finish(event)

    def message(self) -> dict[str, Any]:
        """The whole message; as it is in `message_start` before anything was pushed."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self._content),
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": self._usage_json(),
        }

    def _usage_json(self) -> dict[str, Any]:
        """`input_tokens` are those that no cache had."""
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        }

    def _think(self, text: str) -> list[Event]:
        events = self._open({"type": "thinking", "thinking": "", "signature": ""})
        self._texts.append(text)
        return [*events, self._delta({"type": "thinking_delta", "thinking": text})] if self._shows_thinking else events

    def _tool_call(self, event: ToolCallDelta) -> list[Event]:
        events: list[Event] = []
        if event.index != self._call:
            block = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
            events = [*self._close(), *self._open(block)]
            self._call = event.index
        if event.arguments:
            events += self._extend("tool_use", {"type": "input_json_delta", "partial_json": event.arguments})
        return events

    def _extend(self, kind: str, delta: Event) -> list[Event]:
        events = self._open({"type": "text", "text": ""}) if kind == "text" else []
        self._texts.append(delta["text"] if kind == "text" else delta["partial_json"])
        return [*events, self._delta(delta)]

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _open(self, block: dict[str, Any]) -> list[Event]:
        """Nothing if a block of this type is open; calls are closed before by number."""
        if self._is_open and self._content[-1]["type"] == block["type"]:
            return []
        events = self._close()
        self._content.append(block)
        self._is_open = True
        return [*events, {"type": "content_block_start", "index": len(self._content) - 1, "content_block": dict(block)}]

    def _close(self) -> list[Event]:
        if not self._is_open:
            return []
        block, text = self._content[-1], "".join(self._texts)
        events: list[Event] = []
        match block["type"]:
            case "text":
                block["text"] = text
            case "thinking":
                block["thinking"] = text if self._shows_thinking else ""
                block["signature"] = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
                events = [self._delta({"type": "signature_delta", "signature": block["signature"]})]
            case _:
                block["input"] = _arguments(text)
        self._texts, self._is_open, self._call = [], False, None
        return [*events, {"type": "content_block_stop", "index": len(self._content) - 1}]

    def _finish(self, event: Finished) -> list[Event]:
        events = self._close()
        self._usage = event.usage
        self._stop_reason = STOP_REASONS[event.cause]
        if event.cause == StopCause.LENGTH and event.usage.completion_tokens < self._max_tokens:
            self._stop_reason = "model_context_window_exceeded"
        self._stop_sequence = event.stop_string
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        return [
            *events,
            {"type": "message_delta", "delta": delta, "usage": self._usage_json()},
            {"type": "message_stop"},
        ]


def _arguments(text: str) -> dict[str, Any]:
    """Of a call that was cut off at the token limit: none, since its text is no JSON."""
    try:
        arguments = msgspec.json.decode(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}
