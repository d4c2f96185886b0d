"""Nous Hermes and Qwen 2.5/3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one tag for each call.

Format: https://github.com/NousResearch/Hermes-Function-Calling; the chat templates of Qwen2.5 and Qwen3.
"""

from __future__ import annotations

from swarm_gateway.tools.stream import StreamingParser


class HermesParser(StreamingParser):
    CALL_TAGS = ("<tool_call>",)
    AFTER_CALL = ("</tool_call>",)

    def _open(self, tag: str) -> None:
        self._held.append(tag)
        self._expect_object()
