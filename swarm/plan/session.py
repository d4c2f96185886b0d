"""One generation as a state machine: events in, actions out (design sections 2 and 4).

Owns a session's tokens: the prompt, what was generated, and how much of it has been sent down the chain. A driver
performs the actions and reports events; nothing here knows sockets, clocks or tokenizers, so every interleaving can be
tested by calling `handle`.

The rule that makes recovery free: rows are cut from the one list of known tokens. A prompt is known from the start, a
generated token becomes known when the tail reports it, and after a repair the cursor moves back to what the new chain
already holds. Prefill, decoding and replay are the same loop.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarm.errors import ContextOverflow, InvalidRequest


class FinishReason(enum.StrEnum):
    EOS = "eos"  # the model ended its turn
    LENGTH = "length"  # max_new_tokens, or the end of the model's context
    STOP = "stop"  # a stop string
    CANCELLED = "cancelled"


# Events -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChainReady:
    """Every hop has opened the session. `held`: tokens whose keys and values the whole chain already holds."""

    held: int = 0


@dataclass(frozen=True, slots=True)
class StepSettled:
    """The tail's result for one step; `tokens` is empty for a prefill chunk that was not to be sampled."""

    epoch: int
    step: int
    tokens: tuple[int, ...]
    trace: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class HopLost:
    """A hop died, refused to go on, or fell silent past its deadline."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The user, or the reader of the text, wants no more."""

    reason: FinishReason


Event = ChainReady | StepSettled | HopLost | StopRequested

# Actions ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendStep:
    """Send `tokens`, committed on arrival after the first `base` tokens; the tail draws the next one if `sample`."""

    epoch: int
    step: int
    base: int
    tokens: tuple[int, ...]
    sample: bool


@dataclass(frozen=True, slots=True)
class EmitTokens:
    """Hand new tokens to the user. `trace`: (queue ms, compute ms) of each hop for the step that made them."""

    tokens: tuple[int, ...]
    trace: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class RepairChain:
    """Find a chain without `lost`, open the session on it, then report ChainReady.

    `settled`: tokens that have passed the whole chain, so every hop that lives on holds at least their keys and values.
    """

    lost: str
    reason: str
    settled: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason


Action = SendStep | EmitTokens | RepairChain | Finish


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """What to generate. Lengths in tokens.

    `prefill_chunk`: the most rows in one step. `window`: the most unanswered steps; more than one lets prefill chunks
    follow each other through the hops.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    prefill_chunk: int = 256
    window: int = 4

    @classmethod
    def checked(
        cls,
        prompt: Sequence[int],
        max_new_tokens: int,
        *,
        eos_ids: Sequence[int],
        context_length: int,
        vocab_size: int,
        prefill_chunk: int = 256,
    ) -> GenerationPlan:
        """A plan that a swarm can serve. Raises InvalidRequest and ContextOverflow."""
        if not prompt:
            raise InvalidRequest("the prompt is empty; give at least one token of text")
        if max_new_tokens < 1:
            raise InvalidRequest(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
        bad = next((t for t in prompt if not 0 <= t < vocab_size), None)
        if bad is not None:
            raise InvalidRequest(f"token id {bad} is outside the model's vocabulary of {vocab_size}")
        if len(prompt) >= context_length:
            raise ContextOverflow(
                f"the prompt has {len(prompt)} tokens and the model's context holds {context_length}; shorten it"
            )
        room = context_length - len(prompt)
        return cls(tuple(prompt), min(max_new_tokens, room), frozenset(eos_ids), prefill_chunk)


class Phase(enum.Enum):
    WAITING = "waiting for a chain"
    RUNNING = "running"
    DONE = "done"


@dataclass(slots=True)
class Generation:
    """The state of one generation. `handle(event)` returns what to do next; a finished generation ignores events."""

    plan: GenerationPlan
    known: list[int] = field(init=False)  # prompt, then generated tokens
    phase: Phase = field(init=False, default=Phase.WAITING)
    epoch: int = field(init=False, default=0)
    _cursor: int = field(init=False, default=0)  # known tokens already sent in this epoch
    _next_step: int = field(init=False, default=0)
    _settled_to: int = field(init=False, default=0)  # known tokens that have passed the whole chain
    _in_flight: dict[int, SendStep] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.known = list(self.plan.prompt)

    @property
    def generated(self) -> tuple[int, ...]:
        return tuple(self.known[len(self.plan.prompt) :])

    @property
    def max_tokens(self) -> int:
        """KV tokens a hop must be able to hold. The last token drawn is never sent back in."""
        return len(self.plan.prompt) + self.plan.max_new_tokens

    def handle(self, event: Event) -> list[Action]:
        if self.phase is Phase.DONE:
            return []
        if isinstance(event, ChainReady):
            return self._chain_ready(event)
        if isinstance(event, StepSettled):
            return self._settled(event)
        if isinstance(event, HopLost):
            return self._lost(event)
        self.phase = Phase.DONE
        return [Finish(event.reason)]

    def _chain_ready(self, event: ChainReady) -> list[Action]:
        if self.phase is not Phase.WAITING:
            return []
        self.phase = Phase.RUNNING
        # The last known token must be sent even if held, for its row is what the next token is drawn from.
        self._cursor = self._settled_to = min(event.held, len(self.known) - 1)
        return self._send()

    def _lost(self, event: HopLost) -> list[Action]:
        if self.phase is Phase.WAITING:
            return []  # a repair is under way already
        self.phase = Phase.WAITING
        self.epoch += 1  # whatever is still in flight belongs to the past
        self._in_flight.clear()
        return [RepairChain(event.peer, event.reason, self._settled_to)]

    def _settled(self, event: StepSettled) -> list[Action]:
        if event.epoch != self.epoch or event.step not in self._in_flight:
            return []  # late news from before a repair
        sent = self._in_flight.pop(event.step)
        self._settled_to = max(self._settled_to, sent.base + len(sent.tokens))
        if not sent.sample:
            return self._send()
        actions: list[Action] = []
        tokens, reason = self._accept(event.tokens)
        if tokens:
            self.known.extend(tokens)
            actions.append(EmitTokens(tokens, event.trace))
        if reason is not None:
            self.phase = Phase.DONE
            return [*actions, Finish(reason)]
        return [*actions, *self._send()]

    def _accept(self, tokens: Sequence[int]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Cut a step's tokens at the end of the turn or of the budget. The end-of-turn token itself is kept."""
        left = self.plan.max_new_tokens - (len(self.known) - len(self.plan.prompt))
        for i, token in enumerate(tokens[:left]):
            if token in self.plan.eos_ids:
                return tuple(tokens[: i + 1]), FinishReason.EOS
        if len(tokens) >= left:
            return tuple(tokens[:left]), FinishReason.LENGTH
        return tuple(tokens), None

    def _send(self) -> list[Action]:
        actions: list[Action] = []
        while self._cursor < len(self.known) and len(self._in_flight) < self.plan.window:
            end = min(self._cursor + self.plan.prefill_chunk, len(self.known))
            sent = SendStep(
                self.epoch,
                self._next_step,
                self._cursor,
                tuple(self.known[self._cursor : end]),
                sample=end == len(self.known),
            )
            actions.append(sent)
            self._in_flight[sent.step] = sent
            self._next_step += 1
            self._cursor = end
        return actions
