"""What the parsers of all families share: a buffer, a state, and the events so far. Owns how text, reasoning and calls
follow each other; each family's module says what its calls look like.

A state takes from the front of the buffer what can be decided whatever follows, and leaves the rest: so the joined
events do not depend on how the input was cut. Nothing is looked at twice but a bounded rest, so that time is in
proportion to the input.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from swarm_gateway.chat.events import OutputEvent, ReasoningDelta, TextDelta, ToolCallDelta
from swarm_gateway.tools.json_stream import CallObject, JsonScanner
from swarm_gateway.tools.validate import TOOL_NAME, new_call_id

MAX_HEADER_LENGTH = 300  # characters between a tag and the arguments of its call
MOST_AT_ONCE = 4096  # characters; taking a tag copies the rest of the buffer, which must not be a long answer


@dataclass(frozen=True, slots=True)
class ParserSetup:
    """`schemas`: of the parameters of each tool that may be called, by name. `reasoning`: the prompt ends inside the
    model's reasoning. `thinks`: whether reasoning at the answer's beginning is told apart from its text."""

    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reasoning: bool = False
    thinks: bool = True
    new_id: Callable[[], str] = new_call_id


class TagSplitter:
    """Finds the first of some tags in a text that comes in pieces."""

    def __init__(self, *tags: str) -> None:
        self._pattern = re.compile("|".join(map(re.escape, tags)) if tags else r"(?!)")
        self._prefixes = frozenset(tag[:size] for tag in tags for size in range(1, len(tag)))
        self._longest = max(map(len, self._prefixes), default=0)

    def split(self, text: str) -> tuple[str, str, str]:
        """(before the tag, the tag, the rest). Without a tag, the rest is what could be the beginning of one."""
        found = self._pattern.search(text)
        if found is not None:
            return text[: found.start()], found[0], text[found.end() :]
        for size in range(min(self._longest, len(text)), 0, -1):
            if text[-size:] in self._prefixes:
                return text[:-size], "", text[-size:]
        return text, "", ""


class StreamingParser:
    """An answer: perhaps reasoning, then text and calls. Of itself it knows no calls.

    White space at the beginning of the answer is left out when a call follows it, and always after reasoning and calls.
    A call that turns out malformed before its name and the beginning of its arguments are known is text. After that the
    arguments have been handed on as far as they were JSON, and the rest is text.
    """

    THINKING: ClassVar[tuple[str, str]] = ("<think>", "</think>")
    CALL_TAGS: ClassVar[tuple[str, ...]] = ()
    CONTROLS: ClassVar[tuple[str, ...]] = ()  # never text
    AFTER_CALL: ClassVar[tuple[str, ...]] = ()  # what closes a call, each optional

    def __init__(self, setup: ParserSetup) -> None:
        self._setup = setup
        self._buffer = ""
        self._events: list[OutputEvent] = []
        self._calls = 0
        self._held: list[str] = []  # of the text or call that is being recognised
        self._white: list[str] = []  # at the beginning of the text
        self._at_beginning = True  # of the text: nothing but white space so far
        self._keeps_white = True
        self._object = CallObject(self._accepts)
        self._scanner = JsonScanner()
        self._tags = TagSplitter(*self.CALL_TAGS, *self.CONTROLS)
        self._thought_end = TagSplitter(self.THINKING[1])
        self._state: Callable[[], bool] = self._beginning
        if setup.reasoning and setup.thinks:
            self._state = self._in_reasoning

    def push(self, text: str) -> list[OutputEvent]:
        for start in range(0, len(text), MOST_AT_ONCE):
            self._buffer += text[start : start + MOST_AT_ONCE]
            while self._state():
                pass
        return self._take()

    def finish(self) -> list[OutputEvent]:
        rest, self._buffer = self._buffer, ""
        if self._state == self._in_reasoning:
            self._reason(rest)
        elif self._unfinished_arguments():
            self._arguments(rest)
        elif self._state != self._closing:  # where the rest is part of a closing tag
            self._text("".join(self._held) + rest)
        if self._at_beginning and self._keeps_white:
            self._emit(TextDelta("".join(self._white)))
        self._held.clear()
        self._white.clear()
        self._state = self._ended
        return self._take()

    def _ended(self) -> bool:
        self._buffer = ""
        return False

    # -- events

    def _take(self) -> list[OutputEvent]:
        events, self._events = self._events, []
        return join_events(events)

    def _emit(self, event: OutputEvent) -> None:
        self._events.append(event)

    def _text(self, text: str) -> None:
        if self._at_beginning:
            body = text.lstrip()
            self._white.append(text[: len(text) - len(body)])
            if not body:
                return
            text = "".join(self._white) + body if self._keeps_white else body
            self._white.clear()
            self._at_beginning = False
        if text:
            self._emit(TextDelta(text))

    def _reason(self, text: str) -> None:
        if self._at_beginning:
            text = text.lstrip()
            self._at_beginning = not text
        if text:
            self._emit(ReasoningDelta(text))

    def _new_text(self) -> None:
        """What follows is text, whose white space at the beginning is no part of the answer."""
        self._white.clear()
        self._at_beginning = True
        self._keeps_white = False

    def _begin_call(self, name: str) -> None:
        self._emit(ToolCallDelta(self._calls, self._setup.new_id(), name))
        self._calls += 1
        self._held.clear()
        self._new_text()

    def _arguments(self, text: str) -> None:
        if text:
            self._emit(ToolCallDelta(self._calls - 1, arguments=text))

    # -- states: each returns whether another one may go on at once

    def _beginning(self) -> bool:
        text = self._buffer.lstrip()
        self._white.append(self._buffer[: len(self._buffer) - len(text)])
        self._buffer = text
        tag = self.THINKING[0]
        if not text or (self._setup.thinks and len(text) < len(tag) and tag.startswith(text)):
            return False
        if self._setup.thinks and text.startswith(tag):
            self._buffer = text[len(tag) :]
            self._new_text()
            self._state = self._in_reasoning
        else:
            self._state = self._first_text
        return True

    def _in_reasoning(self) -> bool:
        thought, tag, self._buffer = self._thought_end.split(self._buffer)
        self._reason(thought)
        if tag:
            self._new_text()
            self._state = self._first_text
        return bool(tag)

    def _first_text(self) -> bool:
        """The answer's first characters, for families where they tell a call from text."""
        self._state = self._in_text
        return True

    def _in_text(self) -> bool:
        text, tag, self._buffer = self._tags.split(self._buffer)
        self._text(text)
        if tag in self.CALL_TAGS:
            self._open(tag)
        return bool(tag)

    def _open(self, tag: str) -> None:
        """What follows `tag`, which is one of CALL_TAGS: sets the next state."""
        raise NotImplementedError

    def _give_up(self) -> bool:
        """What is held was no call."""
        held = "".join(self._held)
        self._held.clear()
        self._text(held)
        self._state = self._in_text
        return True

    def _skip_white(self) -> bool:
        """Whether something is left. The white space is held: it is text if this is no call."""
        rest = self._buffer.lstrip()
        self._held.append(self._buffer[: len(self._buffer) - len(rest)])
        self._buffer = rest
        return bool(rest)

    def _expect_object(self, *, needs_arguments: bool = False) -> None:
        self._object = CallObject(self._accepts, needs_arguments=needs_arguments)
        self._state = self._in_object

    def _accepts(self, name: str) -> bool:
        """Tags make clear that it is a call; one of an unknown tool is the caller's to refuse."""
        return TOOL_NAME.fullmatch(name) is not None

    def _in_object(self) -> bool:
        call = self._object
        announced = bool(call.name)
        used = call.feed(self._buffer)
        self._held.append(self._buffer[:used])
        self._buffer = self._buffer[used:]
        if call.name and not announced:
            self._begin_call(call.name)
        if call.name:
            self._held.clear()
            self._arguments(call.take())
        if call.failed and not call.has_whole_arguments:
            return self._give_up()
        if call.done or call.failed:
            self._state = self._after_object if call.name else self._in_text
            return True if call.name else self._give_up()
        return False

    def _after_object(self) -> bool:
        self._state = self._closing
        return True

    def _in_arguments(self) -> bool:
        """Arguments whose name came before them, outside JSON."""
        used = self._scanner.feed(self._buffer)
        self._buffer = self._buffer[used:]
        self._arguments(self._scanner.take())
        if self._scanner.done:
            self._state = self._closing
        elif self._scanner.failed:
            self._state = self._in_text
        return self._scanner.done or self._scanner.failed

    def _expect_arguments(self, name: str) -> None:
        self._begin_call(name)
        self._scanner = JsonScanner()
        self._state = self._in_arguments

    def _unfinished_arguments(self) -> bool:
        if self._state == self._in_object:
            return bool(self._object.name) and not self._object.has_whole_arguments
        return self._state == self._in_arguments

    def _closing(self) -> bool:
        """After a call: white space and what closes it."""
        if not self._skip_white():
            self._held.clear()
            return False
        self._held.clear()
        kind, tag = starts_with(self._buffer, self.AFTER_CALL)
        if kind == "part":
            return False
        self._buffer = self._buffer[len(tag) :]
        if not tag:
            self._state = self._in_text
        return True

    def _named_arguments(self, pattern: re.Pattern[str]) -> bool:
        """A name and then arguments: `pattern` matches what is before the arguments' brace, with the group "name"."""
        brace = self._buffer.find("{", 0, MAX_HEADER_LENGTH)
        if brace < 0 and len(self._buffer) < MAX_HEADER_LENGTH:
            return False
        header = pattern.fullmatch(self._buffer, 0, brace) if brace >= 0 else None
        if header is None:
            return self._give_up()
        self._buffer = self._buffer[brace:]
        self._expect_arguments(header["name"])
        return True


def starts_with(text: str, tags: Sequence[str]) -> tuple[str, str]:
    """("tag", the one that `text` starts with), ("part", "") when it could become one, else ("text", "")."""
    for tag in tags:
        if text.startswith(tag):
            return "tag", tag
    return ("part", "") if any(tag.startswith(text) for tag in tags) else ("text", "")


def join_events(events: Iterable[OutputEvent]) -> list[OutputEvent]:
    """A parser's events, which have no log-probabilities yet: neighbours of one kind, and of one call, as one."""
    joined: list[OutputEvent] = []
    parts: list[str] = []
    for event in events:
        if not (joined and _continues(joined[-1], event)):
            _fill(joined, parts)
            joined.append(event)
            parts = []
        parts.append(event.arguments if isinstance(event, ToolCallDelta) else event.text)
    _fill(joined, parts)
    return [event for event in joined if isinstance(event, ToolCallDelta) or event.text]


def _continues(last: OutputEvent, event: OutputEvent) -> bool:
    if isinstance(last, ToolCallDelta) and isinstance(event, ToolCallDelta):
        return last.index == event.index and not event.id
    return type(last) is type(event)


def _fill(joined: list[OutputEvent], parts: list[str]) -> None:
    """The last event with the text of all its parts: joined once, so that many small ones are linear."""
    if joined:
        last, text = joined[-1], "".join(parts)
        joined[-1] = replace(last, arguments=text) if isinstance(last, ToolCallDelta) else replace(last, text=text)
