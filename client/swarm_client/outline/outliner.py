"""The outline strategy: an outline first, then its points side by side through the chain (Jupiter §V-B).

Owns what the outlined answers of one client share: the templates, and how many generations may run at once. One answer
is `stream`'s, whether a request fits `router`'s.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarm.errors import InvalidRequest
from swarm_client.api.options import ChatMessage, GenerationOptions
from swarm_client.outline.router import OutlineDecision, route
from swarm_client.outline.stream import AskOptions, OutlineStream, Tokenizer
from swarm_client.outline.templates import BUILT_IN, Template

SPARE_SESSIONS = 2  # of those that a node allows one client: for the outline, and an ordinary answer beside it
TITLES_TOKENS = 64  # for a point's own title, in its question and its heading; the outline has those of all


@dataclass(frozen=True, slots=True)
class SkeletonDecoder:
    """`ask` begins an ordinary generation. `context_length`: tokens of the model. `slots`: points written at once."""

    ask: AskOptions
    tokenizer: Tokenizer
    context_length: int
    slots: asyncio.Semaphore
    templates: tuple[Template, ...] = BUILT_IN
    clock: Callable[[], float] = time.perf_counter

    def route(self, messages: Sequence[ChatMessage], options: GenerationOptions) -> OutlineDecision:
        """Whether an outline fits the request, and the conversation with an outline in it the model's context."""
        routing = route(messages, options.max_new_tokens, self.templates)
        if routing.template is None:
            return routing
        template = routing.template
        try:
            outline = self.tokenizer.apply_chat_template(template.outline_prompt(messages, routing.points))
            point = self.tokenizer.apply_chat_template(template.point_prompt(messages, [""], 1))
        except InvalidRequest as error:
            return OutlineDecision(None, f"an outline cannot be asked for in this conversation: {error}")
        needed = len(outline), len(point) + template.point_tokens + TITLES_TOKENS
        if max(needed) + template.outline_tokens > self.context_length:
            return OutlineDecision(None, "the conversation leaves no room for an outline in the model's context")
        return routing

    def stream(
        self, messages: Sequence[ChatMessage], options: GenerationOptions, routing: OutlineDecision
    ) -> OutlineStream:
        """An answer as `routing` says. Raises InvalidRequest."""
        return OutlineStream(self.ask, self.tokenizer, messages, options, routing, self.slots, self.clock)


def slots(max_sessions_per_peer: int) -> asyncio.Semaphore:
    """How many points a client may write at once on the same nodes."""
    return asyncio.Semaphore(max(1, max_sessions_per_peer - SPARE_SESSIONS))
