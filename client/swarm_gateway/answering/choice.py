"""One choice of an answer: the client's chunks become events. Owns which log-probabilities go with which text."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from swarm.planner.generation.state_machine import FinishReason
from swarm.types import TokenLogprobs
from swarm_client.api.results import GenerationResult, TextChunk
from swarm_gateway.chat.events import (
    AnswerEvent,
    Finished,
    OutputEvent,
    OutputParser,
    ReasoningDelta,
    StopCause,
    TextDelta,
    TokenUsage,
    ToolCallDelta,
    WaitingForChain,
)

_CAUSES = {
    FinishReason.EOS: StopCause.END_OF_TURN,
    FinishReason.STOP: StopCause.STOP_STRING,
    FinishReason.LENGTH: StopCause.LENGTH,
    FinishReason.CANCELLED: StopCause.CANCELLED,
}


class ChoiceReader:
    """`eos`: tokens that end the answer; they have no text, so their log-probabilities are left out, as in OpenAI's
    API."""

    def __init__(self, parser: OutputParser, eos: Collection[int]) -> None:
        self._parser = parser
        self._eos = frozenset(eos)
        self._logprobs: list[TokenLogprobs] = []  # of tokens whose text has not come yet
        self._reasoning_tokens = 0
        self._reasons = False
        self._calls = False

    def push(self, chunk: TextChunk) -> list[AnswerEvent]:
        if chunk.waiting:
            return [WaitingForChain(chunk.waiting)]
        self._logprobs += [entry for entry in chunk.logprobs if entry.token not in self._eos]
        events = self._with_logprobs(self._parser.push(chunk.text))
        if events:
            self._reasons = isinstance(events[-1], ReasoningDelta)
        if self._reasons:
            self._reasoning_tokens += len(chunk.token_ids)
        return events

    def finish(self, result: GenerationResult) -> list[AnswerEvent]:
        """The rest, and Finished."""
        events = self._with_logprobs(self._parser.finish())
        if self._logprobs and not self._calls:
            events.append(TextDelta("", tuple(self._logprobs)))
        cause = _CAUSES[result.finish_reason]
        if self._calls and cause is StopCause.END_OF_TURN:
            cause = StopCause.TOOL_CALLS
        usage = TokenUsage(
            len(result.prompt_token_ids), len(result.token_ids), result.cached_prompt_tokens, self._reasoning_tokens
        )
        events.append(Finished(cause, usage, result.stop_string, result.chain, result.repairs, result.prompt_logprobs))
        return events

    def _with_logprobs(self, events: list[OutputEvent]) -> list[AnswerEvent]:
        """What is waiting goes with the first text; those of a call's tokens go nowhere."""
        found: list[AnswerEvent] = []
        for event in events:
            if isinstance(event, ToolCallDelta):
                self._calls = True
                self._logprobs.clear()
            elif self._logprobs:
                event = replace(event, logprobs=tuple(self._logprobs))
                self._logprobs.clear()
            found.append(event)
        return found
