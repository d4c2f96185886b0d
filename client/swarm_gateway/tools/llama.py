"""Llama 3.1 to 3.3: an answer that is a call from its first character, `{"name": ..., "parameters": {...}}`, several
separated by `;`, perhaps after `<|python_tag|>`.

Format: the prompt formats in https://github.com/meta-llama/llama-models. Nothing but the name tells a call from an
answer in JSON, so that only names of given tools count.
"""

from __future__ import annotations

from swarm_gateway.tools.stream import StreamingParser, starts_with


class LlamaParser(StreamingParser):
    CALL_TAGS = ("<|python_tag|>",)
    CONTROLS = ("<|eom_id|>", "<|eot_id|>", "<|end_of_text|>")

    def _accepts(self, name: str) -> bool:
        return name in self._setup.schemas

    def _first_text(self) -> bool:
        if not self._skip_white():
            return False
        self._white.extend(self._held)
        self._held.clear()
        if self._buffer.startswith("{"):
            self._expect_object(needs_arguments=True)
        else:
            self._state = self._in_text
        return True

    def _open(self, tag: str) -> None:
        self._held.append(tag)
        self._expect_object(needs_arguments=True)

    def _after_object(self) -> bool:
        self._state = self._separator
        return True

    def _separator(self) -> bool:
        if not self._skip_white():
            self._held.clear()
            return False
        self._held.clear()
        kind, tag = starts_with(self._buffer, (";", *self.CALL_TAGS))
        if kind == "part":
            return False
        if kind == "text":
            self._state = self._in_text
            return True
        self._buffer = self._buffer[len(tag) :]
        self._open(tag)
        return True
