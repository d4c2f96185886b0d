"""DeepSeek V3 and R1: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, then the arguments as a block of JSON in
Markdown; V3.1: the name before the separator and the bare arguments after it.

Format: the chat templates of deepseek-ai/DeepSeek-V3-0324, DeepSeek-R1-0528 and DeepSeek-V3.1.
"""

from __future__ import annotations

import re

from swarm_gateway.tools.stream import StreamingParser

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_NAME = re.compile(
    rf"\s*(?:function{SEPARATOR})?(?P<name>[a-zA-Z0-9_-]{{1,64}})(?:{SEPARATOR}\s*|\s*```(?:json)?\s*)",
)


class DeepSeekParser(StreamingParser):
    CALL_TAGS = (CALL_BEGIN,)
    CONTROLS = (CALLS_BEGIN, CALLS_END, "<｜end▁of▁sentence｜>")
    AFTER_CALL = ("```", CALL_END, CALLS_END)

    def _open(self, tag: str) -> None:
        self._held.append(tag)
        self._state = self._name

    def _name(self) -> bool:
        return self._named_arguments(_NAME)
