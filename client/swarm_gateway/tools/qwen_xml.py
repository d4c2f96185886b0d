"""Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`, each tag and
value on its own lines.

Format: the chat template of Qwen/Qwen3-Coder-30B-A3B-Instruct. Values are bare text: a parameter whose schema is a
string's becomes a string as it comes; another one becomes JSON when it is whole, if it is JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from swarm_gateway.chat.events import OutputEvent
from swarm_gateway.tools.json_stream import is_json
from swarm_gateway.tools.stream import MAX_HEADER_LENGTH, ParserSetup, StreamingParser, TagSplitter, starts_with

_CALL, _FUNCTION, _PARAMETER, _FUNCTION_END = "<tool_call>", "<function=", "<parameter=", "</function>"
_NAME = re.compile(r"\s*([a-zA-Z0-9_-]{1,64})\s*")
_KEY = re.compile(r"\s*([^<>\s][^<>\n]*?)\s*")
_PYTHON = {"True": "true", "False": "false", "None": "null"}


class QwenXmlParser(StreamingParser):
    CALL_TAGS = (_CALL, _FUNCTION)
    AFTER_CALL = ("</tool_call>",)

    def __init__(self, setup: ParserSetup) -> None:
        super().__init__(setup)
        self._name = ""
        self._parameters = 0
        self._as_string = False
        self._value: list[str] = []  # of a parameter that is no string
        self._value_end = TagSplitter("\n</parameter>", "</parameter>")

    def finish(self) -> list[OutputEvent]:
        if self._state == self._in_value:
            self._value_piece(self._buffer)
        if self._state in (self._parameter, self._key, self._value_start, self._in_value):
            self._buffer = ""  # the call was announced; its arguments end here
            self._held.clear()
        return super().finish()

    def _open(self, tag: str) -> None:
        self._held.append(tag)
        self._state = self._function_tag if tag == _CALL else self._function_name

    def _function_tag(self) -> bool:
        if not self._skip_white():
            return False
        if self._buffer.startswith("{"):
            self._expect_object()
            return True
        return self._follows((_FUNCTION,), lambda _: self._function_name)

    def _follows(self, tags: tuple[str, ...], then: Callable[[str], Callable[[], bool]]) -> bool:
        kind, tag = starts_with(self._buffer, tags)
        if kind == "text":
            return self._give_up()
        if kind == "tag":
            self._held.append(tag)
            self._buffer = self._buffer[len(tag) :]
            self._state = then(tag)
        return kind == "tag"

    def _attribute(self, pattern: re.Pattern[str]) -> str | None:
        """What is before the next `>`. None: not yet, or it is malformed and the state says so."""
        end = self._buffer.find(">", 0, MAX_HEADER_LENGTH)
        if end < 0 and len(self._buffer) < MAX_HEADER_LENGTH:
            return None
        found = pattern.fullmatch(self._buffer, 0, end) if end >= 0 else None
        if found is None:
            self._give_up()
            return None
        self._buffer = self._buffer[end + 1 :]
        self._held.clear()
        return found[1]

    def _function_name(self) -> bool:
        name = self._attribute(_NAME)
        if name is not None:
            self._begin_call(name)
            self._name, self._parameters = name, 0
            self._state = self._parameter
        return self._state != self._function_name

    def _parameter(self) -> bool:
        return self._skip_white() and self._follows((_PARAMETER, _FUNCTION_END), self._after_tag)

    def _after_tag(self, tag: str) -> Callable[[], bool]:
        self._held.clear()
        if tag == _FUNCTION_END:
            self._arguments("}" if self._parameters else "{}")
            return self._closing
        self._held.append(tag)
        return self._key

    def _key(self) -> bool:
        key = self._attribute(_KEY)
        if key is not None:
            self._arguments(("{" if self._parameters == 0 else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            self._parameters += 1
            self._as_string = self._is_string(key)
            self._arguments('"' if self._as_string else "")
            self._state = self._value_start
        return self._state != self._key

    def _is_string(self, key: str) -> bool:
        """Without a schema it is a string too: the text says nothing else."""
        properties = self._setup.schemas.get(self._name, {}).get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        return not isinstance(schema, dict) or schema.get("type") == "string"

    def _value_start(self) -> bool:
        if not self._buffer:
            return False
        self._buffer = self._buffer.removeprefix("\n")
        self._state = self._in_value
        return True

    def _in_value(self) -> bool:
        text, tag, self._buffer = self._value_end.split(self._buffer)
        self._value_piece(text)
        if tag:
            self._arguments('"' if self._as_string else self._whole_value())
            self._state = self._parameter
        return bool(tag)

    def _value_piece(self, text: str) -> None:
        if self._as_string:
            self._arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value.append(text)

    def _whole_value(self) -> str:
        value = "".join(self._value)
        self._value.clear()
        bare = value.strip()
        bare = _PYTHON.get(bare, bare)
        return bare if is_json(bare) else json.dumps(value, ensure_ascii=False)
