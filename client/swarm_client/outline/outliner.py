"""Skeleton decoding: an outline first, then its points in parallel through the chain (Jupiter §V-B).

Owns what the outlined answers of one client share: the templates, and the limit of concurrent generations. `stream`
runs one answer; `router` decides whether a request fits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm.errors import InvalidRequest
from swarm_client.api.options import ChatMessage, GenerationOptions
from swarm_client.outline.router import OutlineDecision, route
from swarm_client.outline.stream import OutlineStream, StartGeneration, Tokenizer
from swarm_client.outline.templates import BUILT_IN, Template


@dataclass(frozen=True, slots=True)
class OutlinePolicy:
    """`title_tokens`: reserved for a point's title in its prompt and heading; a larger value refuses outlines earlier,
    a smaller one risks a context overflow.
    """

    title_tokens: int = 64


POLICY = OutlinePolicy()


@dataclass(frozen=True, slots=True)
class SkeletonDecoder:
    """`start_generation` starts an ordinary generation. `context_length`: tokens of the model. `slots`: limits the
    points generated in parallel.
    """

    start_generation: StartGeneration
    tokenizer: Tokenizer
    context_length: int
    slots: asyncio.Semaphore
    templates: tuple[Template, ...] = BUILT_IN
    clock: Callable[[], float] = time.perf_counter

    def route(self, messages: Sequence[ChatMessage], options: GenerationOptions) -> OutlineDecision:
        """Whether an outline fits the request, and the longest prompt fits the model's context."""
        routing = route(messages, options.max_new_tokens, self.templates)
        if routing.template is None:
            return routing
        template = routing.template
        try:
            outline = self.tokenizer.apply_chat_template(template.outline_prompt(messages, routing.points))
            point = self.tokenizer.apply_chat_template(template.point_prompt(messages, [""], 1))
        except InvalidRequest as error:
            return OutlineDecision(None, f"an outline cannot be requested in this conversation: {error}")
        needed = len(outline), len(point) + template.point_tokens + POLICY.title_tokens
        if max(needed) + template.outline_tokens > self.context_length:
            return OutlineDecision(None, "the conversation leaves no room for an outline in the model's context")
        return routing

    def stream(
        self, messages: Sequence[ChatMessage], options: GenerationOptions, routing: OutlineDecision
    ) -> OutlineStream:
        """An answer with or without an outline, by `routing`. Raises InvalidRequest."""
        return OutlineStream(self.start_generation, self.tokenizer, messages, options, routing, self.slots, self.clock)
