"""Answers without calls: reasoning and text. Also the parser when a request gives no tools."""

from __future__ import annotations

from swarm_gateway.tools.stream import StreamingParser


class PlainParser(StreamingParser):
    """`<think>...</think>`, then text."""


class MistralPlainParser(StreamingParser):
    """Magistral's reasoning, then text."""

    THINKING = ("[THINK]", "[/THINK]")
    CONTROLS = ("</s>",)
