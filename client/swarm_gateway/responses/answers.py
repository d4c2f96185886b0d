"""The events of one answer as the Responses API has them. Owns the order of the stream and the state of the response.

Each item goes `output_item.added`, its part, `output_item.done`; the last event is `response.completed`, `.incomplete`
or `.failed`; a cancelled answer has none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from swarm.types import TokenLogprobs
from swarm_gateway.chat.events import (
    AnswerEvent,
    Finished,
    ReasoningDelta,
    StopCause,
    TextDelta,
    ToolCallDelta,
    WaitingForChain,
)
from swarm_gateway.errors import ApiError
from swarm_gateway.responses.items import Item, function_call_item, message_item, new_id, output_text, reasoning_item
from swarm_gateway.responses.requests import ResponsesBody
from swarm_gateway.responses.resource import response_head, usage_json

StreamEvent = dict[str, Any]
TERMINAL = ("completed", "incomplete", "failed", "cancelled")


class ResponseAnswer:
    """Fed with the events of one answer; `start`, `push` and `fail` return the stream's events, `response` the whole.

    `token_text`: a token's text, for log-probabilities. `clock`: seconds since 1970.
    """

    def __init__(
        self,
        request: ResponsesBody,
        model: str,
        token_text: Callable[[int], str],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.id = new_id("resp")
        self._clock = clock
        self._token_text = token_text
        self._head = response_head(request, self.id, model, int(clock()))
        self._output: list[Item] = []
        self._open: Item | None = None  # the last of the output, while it grows
        self._texts: list[str] = []  # of the open item
        self._logprobs: list[Item] = []  # of the open message
        self._call: int | None = None  # of the open item
        self._sequence = 0

    @property
    def status(self) -> str:
        return str(self._head["status"])

    @property
    def done(self) -> bool:
        return self.status in TERMINAL

    @property
    def output(self) -> list[Item]:
        """Finished items."""
        return self._output if self._open is None else self._output[:-1]

    def response(self) -> dict[str, Any]:
        """As it is now; an item that grows has the text so far."""
        if self._open is None:
            return {**self._head, "output": list(self._output)}
        return {**self._head, "output": [*self._output[:-1], self._item("in_progress")]}

    def queued(self) -> list[StreamEvent]:
        """Instead of `start`: it waits for its turn."""
        self._head["status"] = "queued"
        return [self._state("response.created"), self._state("response.queued")]

    def start(self) -> list[StreamEvent]:
        """It begins."""
        created = [] if self.status == "queued" else [self._state("response.created")]
        self._head["status"] = "in_progress"
        return [*created, self._state("response.in_progress")]

    def push(self, event: AnswerEvent) -> list[StreamEvent]:
        match event:
            case TextDelta():
                return self._text(event)
            case ReasoningDelta():
                return self._reasoning(event.text) if event.text else []
            case ToolCallDelta():
                return self._tool_call(event)
            case Finished():
                return self._finish(event)
            case WaitingForChain():
                return []

    def fail(self, error: ApiError) -> list[StreamEvent]:
        """The answer raised."""
        code = (
            "rate_limit_exceeded"
            if error.status == 429
            else "invalid_prompt"
            if error.status == 400
            else "server_error"
        )
        events = self._close("incomplete")
        self._end("failed", error={"code": code, "message": error.message})
        events.append(self._event("error", code=error.code, message=error.message, param=error.param))
        return [*events, self._state("response.failed")]

    def cancel(self) -> None:
        """Ends it without a further event; what is written stays."""
        self._end("cancelled")

    def _event(self, kind: str, **fields: Any) -> StreamEvent:
        event = {"type": kind, **fields, "sequence_number": self._sequence}
        self._sequence += 1
        return event

    def _state(self, kind: str) -> StreamEvent:
        return self._event(kind, response=self.response())

    def _of_item(self, kind: str, **fields: Any) -> StreamEvent:
        """An event of the open item. All of our items have one part."""
        assert self._open is not None
        if not kind.startswith("response.function_call"):
            fields["content_index"] = 0
        return self._event(kind, item_id=self._open["id"], output_index=len(self._output) - 1, **fields)

    def _text(self, event: TextDelta) -> list[StreamEvent]:
        if not event.text and not event.logprobs:
            return []
        events = self._begin("message", message_item(new_id("msg"), "", "in_progress"))
        logprobs = [self._logprob_json(entry) for entry in event.logprobs]
        self._texts.append(event.text)
        self._logprobs += logprobs
        return [*events, self._of_item("response.output_text.delta", delta=event.text, logprobs=logprobs)]

    def _reasoning(self, text: str) -> list[StreamEvent]:
        events = self._begin("reasoning", reasoning_item(new_id("rs"), "", "in_progress"))
        self._texts.append(text)
        return [*events, self._of_item("response.reasoning_text.delta", delta=text)]

    def _tool_call(self, event: ToolCallDelta) -> list[StreamEvent]:
        events: list[StreamEvent] = []
        if event.index != self._call:
            events = self._close()
            item = function_call_item(new_id("fc"), event.id, event.name, "", "in_progress")
            events += self._begin("function_call", item)
            self._call = event.index
        if event.arguments:
            self._texts.append(event.arguments)
            events.append(self._of_item("response.function_call_arguments.delta", delta=event.arguments))
        return events

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _begin(self, kind: str, item: Item) -> list[StreamEvent]:
        """Nothing if an item of this kind is open."""
        if self._is_open(kind):
            return []
        events = self._close()
        self._output.append(item)
        self._open = item
        index = len(self._output) - 1
        shown = item if kind == "function_call" else {**item, "content": []}
        events.append(self._event("response.output_item.added", item=shown, output_index=index))
        if kind != "function_call":
            events.append(self._of_item("response.content_part.added", part=item["content"][0]))
        return events

    def _close(self, status: str = "completed") -> list[StreamEvent]:
        if self._open is None:
            return []
        item, text = self._item(status), "".join(self._texts)
        match item["type"]:
            case "message":
                done = [self._of_item("response.output_text.done", text=text, logprobs=self._logprobs)]
            case "reasoning":
                done = [self._of_item("response.reasoning_text.done", text=text)]
            case _:
                named = {"arguments": text, "name": item["name"]}
                done = [self._of_item("response.function_call_arguments.done", **named)]
        if "content" in item:
            done.append(self._of_item("response.content_part.done", part=item["content"][0]))
        done.append(self._event("response.output_item.done", item=item, output_index=len(self._output) - 1))
        self._output[-1] = item
        self._open, self._call, self._texts, self._logprobs = None, None, [], []
        return done

    def _item(self, status: str) -> Item:
        """The open item with all of its text."""
        assert self._open is not None
        item, text = {**self._open, "status": status}, "".join(self._texts)
        match item["type"]:
            case "message":
                item["content"] = [output_text(text, self._logprobs)]
            case "reasoning":
                item["content"] = [{"type": "reasoning_text", "text": text}]
            case _:
                item["arguments"] = text
        return item

    def _finish(self, event: Finished) -> list[StreamEvent]:
        """An answer without any item gets an empty message: there is always something to show."""
        cut = event.cause in (StopCause.LENGTH, StopCause.CANCELLED)
        events = [] if self._output else self._begin("message", message_item(new_id("msg"), "", "in_progress"))
        events += self._close("incomplete" if cut else "completed")
        usage = usage_json(event.usage)
        if event.cause is StopCause.CANCELLED:
            self._end("cancelled", usage=usage)
            return events
        details = {"reason": "max_output_tokens"} if cut else None
        self._end("incomplete" if cut else "completed", usage=usage, incomplete_details=details)
        return [*events, self._state(f"response.{self.status}")]

    def _end(self, status: str, **fields: Any) -> None:
        self._close("incomplete")  # of an answer that was broken off
        completed = {"completed_at": int(self._clock())} if status == "completed" else {}
        self._head.update(fields, status=status, **completed)

    def _logprob_json(self, entry: TokenLogprobs) -> Item:
        top = [self._token_json(token, logprob) for token, logprob in entry.top]
        return {**self._token_json(entry.token, entry.logprob), "top_logprobs": top}

    def _token_json(self, token: int, logprob: float) -> Item:
        text = self._token_text(token)
        return {"token": text, "bytes": list(text.encode()), "logprob": max(logprob, -9999.0)}  # JSON has no -inf
