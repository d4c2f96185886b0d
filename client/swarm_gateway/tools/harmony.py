"""gpt-oss' harmony: messages on channels, `<|channel|>analysis<|message|>...<|end|><|start|>assistant` and so on.
`analysis` is reasoning, a message to `functions.NAME` a call, `final` and the other `commentary` the answer.

Format: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re

from swarm_gateway.tools.stream import MAX_HEADER_LENGTH, ParserSetup, StreamingParser, TagSplitter, starts_with

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
_TO = "to="
_HEADER = re.compile(
    r"(?:<\|start\|>)?(?:assistant)?\s*(?:to=(?P<to>[\w.-]+))?\s*"
    r"(?:<\|channel\|>(?P<channel>\w+)\s*(?:to=(?P<to_after>[\w.-]+))?)?\s*(?:<\|constrain\|>)?\s*\w*\s*"
)
_FUNCTION = re.compile(r"functions\.([a-zA-Z0-9_-]{1,64})")


class HarmonyParser(StreamingParser):
    CALL_TAGS = (START, CHANNEL)
    CONTROLS = (MESSAGE, CONSTRAIN, END, RETURN, CALL)
    AFTER_CALL = (CALL, END, RETURN)

    def __init__(self, setup: ParserSetup) -> None:
        super().__init__(setup)
        self._name = ""
        self._message_end = TagSplitter(START, CHANNEL, END, RETURN, CALL)
        self._state = self._beginning

    def _beginning(self) -> bool:
        """The prompt ends with `<|start|>assistant`, which a recipient may follow."""
        if not self._skip_white():
            return False
        kind, tag = starts_with(self._buffer, (_TO,))
        if kind == "part":
            return False
        self._white.extend(self._held)
        self._held.clear()
        self._state = self._header if tag else self._in_text
        return True

    def _open(self, tag: str) -> None:
        self._held.append(tag)
        self._state = self._header

    def _header(self) -> bool:
        end = self._buffer.find(MESSAGE, 0, MAX_HEADER_LENGTH)
        if end < 0 and len(self._buffer) < MAX_HEADER_LENGTH:
            return False
        header = _HEADER.fullmatch("".join(self._held) + self._buffer[:end]) if end >= 0 else None
        if header is None:
            return self._give_up()
        self._held.append(self._buffer[: end + len(MESSAGE)])
        self._buffer = self._buffer[end + len(MESSAGE) :]
        to = header["to"] or header["to_after"]
        function = _FUNCTION.fullmatch(to) if to else None
        if function is not None:
            self._name = function[1]
            self._state = self._call
            return True
        self._held.clear()
        self._new_text()
        self._state = self._in_analysis if to or header["channel"] == "analysis" else self._in_text
        return True

    def _call(self) -> bool:
        if not self._skip_white():
            return False
        if self._buffer.startswith("{"):
            self._expect_arguments(self._name)
            return True
        return self._give_up()

    def _in_analysis(self) -> bool:
        """Also a message to one of the model's built-in tools, which nobody here runs."""
        text, tag, self._buffer = self._message_end.split(self._buffer)
        self._reason(text)
        if tag:
            self._new_text()
            self._state = self._in_text
        if tag in self.CALL_TAGS:
            self._open(tag)
        return bool(tag)
