"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and since 2025
`[TOOL_CALLS]name[ARGS]{...}` for each call, perhaps with `[CALL_ID]id` before `[ARGS]`.

Format: https://github.com/mistralai/mistral-common, tokenizer versions 3 to 13.
"""

from __future__ import annotations

import re

from swarm_gateway.tools.stream import StreamingParser

_NAME = re.compile(r"\s*(?P<name>[a-zA-Z0-9_-]{1,64})(?:\[CALL_ID\][a-zA-Z0-9_-]{1,64})?(?:\[ARGS\])?\s*")


class MistralParser(StreamingParser):
    THINKING = ("[THINK]", "[/THINK]")
    CALL_TAGS = ("[TOOL_CALLS]",)
    CONTROLS = ("</s>",)

    def _open(self, tag: str) -> None:
        self._held.append(tag)
        self._state = self._list_or_name

    def _list_or_name(self) -> bool:
        if not self._skip_white():
            return False
        if self._buffer[0] != "[":
            self._state = self._name
        else:
            self._take_one()
            self._expect_object()
        return True

    def _name(self) -> bool:
        return self._named_arguments(_NAME)

    def _after_object(self) -> bool:
        self._state = self._item_end
        return True

    def _item_end(self) -> bool:
        if not self._skip_white():
            self._held.clear()
            return False
        self._held.clear()
        if self._buffer[0] == ",":
            self._take_one()
            self._expect_object()
        else:
            self._buffer = self._buffer.removeprefix("]")
            self._state = self._closing
        return True

    def _take_one(self) -> None:
        self._held.append(self._buffer[0])
        self._buffer = self._buffer[1:]
