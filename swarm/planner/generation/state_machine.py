"""One generation as a state machine: events in, actions out (design sections 2, 4 and 8).

Owns a session's tokens: the prompt, what was generated, how much of it the chain holds, and the guesses under way. A
driver performs the actions and reports events; nothing here knows sockets, clocks, tokenizers or drafters, so every
interleaving can be tested by calling `handle`.

Two rules make it small. Rows are cut from the one list of known tokens: a prompt is known from the start, a generated
token when the tail reports it, and after a repair the cursor moves back to what the new chain holds, so prefill,
decoding and replay are one loop. And the tail draws after every row whatever was guessed: guesses are only matched with
what it drew, so they change when a token comes and never which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from swarm.errors import ProtocolError
from swarm.planner.generation.draft_tree import NO_SLOT, Hints, Node, PredictionTree
from swarm.planner.generation.events import (
    SEQUENTIAL,
    Action,
    ChainReady,
    Draft,
    Drafted,
    DraftsEnded,
    DropStale,
    EmitTokens,
    Event,
    Finish,
    FinishReason,
    GenerationPlan,
    HopLost,
    Policy,
    RepairChain,
    SendStep,
    StepSettled,
    StopRequested,
)

__all__ = [
    "Action",
    "ChainReady",
    "Draft",
    "Drafted",
    "DraftsEnded",
    "DropStale",
    "EmitTokens",
    "Event",
    "Finish",
    "FinishReason",
    "Generation",
    "GenerationPlan",
    "HopLost",
    "Phase",
    "Policy",
    "RepairChain",
    "SendStep",
    "StepSettled",
    "StopRequested",
    "Tally",
]

MAX_WIDTH = 8  # guesses asked for after one node; less likely ones are never worth a row
MAX_ASKED = 12  # nodes of one thorough question, whose time grows with them
PAGE_SLACK = 32  # tokens of room that pages only partly filled may waste


class Phase(Enum):
    WAITING = "waiting for a chain"
    RUNNING = "running"
    DONE = "done"


@dataclass(slots=True)
class Tally:
    """What guessing has brought so far, in counts."""

    steps: int = 0  # sent to draw at least one token
    rows: int = 0  # tree nodes sent
    expected: float = 0.0  # hits that the drafter's odds promised for them
    hits: int = 0  # tokens that had been sent as a guess before they were drawn
    misses: int = 0  # tokens that had not
    stale: int = 0  # steps in flight that a miss made void


@dataclass(slots=True)
class _Sent:
    step: SendStep
    nodes: tuple[Node, ...]  # whose draws the result brings, in order


@dataclass(slots=True)
class Generation:
    """The state of one generation. `handle(event)` returns what to do next; a finished generation ignores events.

    `policy` may be set at any time and counts from the next step on.
    """

    plan: GenerationPlan
    policy: Policy = SEQUENTIAL
    known: list[int] = field(init=False)  # prompt, then generated tokens
    phase: Phase = field(init=False, default=Phase.WAITING)
    epoch: int = field(init=False, default=0)
    tally: Tally = field(init=False, default_factory=Tally)
    _tree: PredictionTree = field(init=False)  # below the last known token
    _sent_to: int = field(init=False, default=0)  # known tokens the chain has committed once it ran all steps sent
    _settled_to: int = field(init=False, default=0)  # ... and those that every hop has committed already
    _chunks: list[int] = field(init=False, default_factory=list)  # of the prefill or replay under way, next one last
    _accepted: list[int] = field(init=False, default_factory=list)  # slots of the known tokens from _settled_to on
    _named: int = field(init=False, default=0)  # how many of them steps under way name for committing
    _next_step: int = field(init=False, default=0)
    _in_flight: dict[int, _Sent] = field(init=False, default_factory=dict)
    _asked: tuple[Node, ...] = field(init=False, default=())  # whom the drafter is guessing about
    _rounds: int = field(init=False, default=0)  # of drafting for the next step
    _thoughts: int = field(init=False, default=0)  # those of them that were thorough

    def __post_init__(self) -> None:
        self.known = list(self.plan.prompt)
        self._tree = PredictionTree(self.known[-1], len(self.known) - 1)

    @property
    def generated(self) -> tuple[int, ...]:
        return tuple(self.known[len(self.plan.prompt) :])

    @property
    def max_tokens(self) -> int:
        """KV tokens a hop must be able to hold. The last token drawn is never sent back in."""
        return self._end + self.plan.tree_room

    @property
    def _end(self) -> int:
        """The position that no token will have."""
        return len(self.plan.prompt) + self.plan.max_new_tokens

    def handle(self, event: Event) -> list[Action]:
        """Raises ProtocolError when the tail answers a step with more or fewer tokens than it was to draw."""
        if self.phase is Phase.DONE:
            return []
        match event:
            case ChainReady():
                return self._chain_ready(event)
            case StepSettled():
                return self._settled(event)
            case Drafted():
                return self._drafted(event)
            case DraftsEnded():
                self.policy, self._asked = SEQUENTIAL, ()
                return self._go_on() if self.phase is Phase.RUNNING else []
            case HopLost():
                return self._lost(event)
            case StopRequested():
                self.phase = Phase.DONE
                return [Finish(event.reason)]

    # Chains ----------------------------------------------------------------------------------------------------------

    def _chain_ready(self, event: ChainReady) -> list[Action]:
        if self.phase is not Phase.WAITING:
            return []
        self.phase = Phase.RUNNING
        # The last known token must be sent even if held, for its row is what the next token is drawn from.
        self._sent_to = self._settled_to = min(event.held, len(self.known) - 1)
        self._chunks = [chunk for chunk in reversed(event.chunks) if chunk > 0]
        return self._go_on()

    def _lost(self, event: HopLost) -> list[Action]:
        self.phase = Phase.WAITING  # or still: a repair has failed, and the next one is an epoch of its own
        self._void()
        self._accepted.clear()  # a replacement holds no slots: what lies beyond the settled tokens is sent again
        self._named = 0
        self._asked = ()  # nobody may have heard the question: it came after a step that could not be sent
        return [RepairChain(event.peer, event.reason, self._settled_to)]

    def _void(self) -> None:
        """Whatever is in flight belongs to the past."""
        self.epoch += 1
        self._in_flight.clear()
        self._tree.forget_slots()

    # Results ---------------------------------------------------------------------------------------------------------

    def _settled(self, event: StepSettled) -> list[Action]:
        sent = self._in_flight.get(event.step)
        if event.epoch != self.epoch or sent is None:
            return []  # late news from before a repair or a miss
        if len(event.tokens) != sent.step.draws:
            raise ProtocolError(f"the tail drew {len(event.tokens)} tokens where {sent.step.draws} were asked for")
        if max(event.tokens, default=0) >= self.plan.vocab_size:
            raise ProtocolError(f"the tail drew token {max(event.tokens)}, and the model has {self.plan.vocab_size}")
        del self._in_flight[event.step]
        del self._accepted[: len(sent.step.commit)]
        self._named -= len(sent.step.commit)
        self._settled_to = sent.step.after
        self._rounds = self._thoughts = 0
        for node, token in zip(sent.nodes, event.tokens, strict=True):
            node.drawn = token
        for node, hints in zip(sent.nodes, event.hints, strict=False):
            if all(token < self.plan.vocab_size for guesses in hints for token, _ in guesses):
                node.hints = hints
        actions: list[Action] = []
        tokens, hints, reason, missed = self._match()
        if tokens:
            self.known.extend(tokens)
            actions.append(EmitTokens(tokens, event.trace, hints))
        if reason is not None:
            self.phase = Phase.DONE
            return [*actions, Finish(reason)]
        if missed:
            actions += self._restart()
        return [*actions, *self._go_on()]

    def _match(self) -> tuple[tuple[int, ...], Hints, FinishReason | None, bool]:
        """Walk the tree along what the tail drew. -> (new tokens, what the tail thinks comes after them, why it ends if
        it does, whether the last was a miss)

        The end-of-turn token itself is kept.
        """
        tokens: list[int] = []
        hints: Hints = ()
        while (token := self._tree.root.drawn) is not None:
            tokens.append(token)
            hints = self._tree.root.hints
            if token in self.plan.eos_ids:
                return tuple(tokens), hints, FinishReason.EOS, False
            if len(self.known) + len(tokens) >= self._end:
                return tuple(tokens), hints, FinishReason.LENGTH, False
            slot = self._tree.advance(token)
            if slot == NO_SLOT:
                self.tally.misses += 1
                return tuple(tokens), hints, None, True
            self.tally.hits += 1
            self._accepted.append(slot)
        return tuple(tokens), hints, None, False

    def _restart(self) -> list[Action]:
        """The token drawn last was not on its way: it goes out alone, after what is accepted."""
        if not self._in_flight:
            return []
        self.tally.stale += len(self._in_flight)
        self._void()
        # Hops that dropped steps may lack commits that others have made. Named again from the last token that all of
        # them hold, each takes those it lacks (`messages.Step`).
        self._sent_to, self._named = self._settled_to, 0
        return [DropStale(self.epoch)]

    # Guessing --------------------------------------------------------------------------------------------------------

    def _drafted(self, event: Drafted) -> list[Action]:
        asked, self._asked = self._asked, ()
        unsaid = (0.0,) * (len(asked) - len(event.open))
        for node, candidates, still_open in zip(asked, event.candidates, (*event.open, *unsaid), strict=False):
            self._tree.add(node, candidates, still_open)
            for token in self.plan.eos_ids & node.children.keys():
                self._tree.close(node.children[token])
        return self._go_on() if asked else []

    def _ask(self, thoughts: int) -> list[Action]:
        """Ask for the guesses that the next step could carry; none if all are there.

        `thoughts`: of the questions so far, how many may have been thorough for there to be another.
        """
        policy = self.policy
        first = len(self.known) == len(self.plan.prompt)  # nobody should wait for guesses before the first word
        if first or not self._room():
            return []
        if self._rounds < policy.levels:
            sent_only = policy.levels == 1
            nodes = self._tree.frontier(policy.rows, policy.log_floor, self._end - 1, sent_only=sent_only)
            if nodes:
                self._rounds += 1
                return self._question(nodes, thorough=policy.ask is None)
        return self._ask_thoroughly() if policy.ask is not None and self._thoughts < thoughts else []

    def _ask_thoroughly(self) -> list[Action]:
        """Ask what takes time to say, where that may place enough belief to be worth it."""
        policy = self.policy
        nodes = self._tree.undecided(min(policy.rows, MAX_ASKED), policy.floor, self._end - 1)
        belief = math.fsum(self._tree.chance(node) * node.open for node in nodes)
        if not nodes or belief < (policy.muse if self._in_flight else policy.ask or 0.0):
            return []
        self._thoughts += 1
        return self._question(nodes, thorough=True)

    def _question(self, nodes: Sequence[Node], *, thorough: bool) -> list[Action]:
        self._asked = tuple(nodes)
        paths = tuple(self._tree.path(node) for node in nodes)
        return [Draft(paths, min(self.policy.rows, MAX_WIDTH), thorough)]

    def _room(self) -> int:
        """How many more tree nodes may be sent."""
        room = self.max_tokens - len(self.known) - PAGE_SLACK - self._tree.held
        return max(0, min(self.policy.rows, room))

    # Sending ---------------------------------------------------------------------------------------------------------

    def _go_on(self) -> list[Action]:
        actions: list[Action] = []
        while not self._asked and (asked := self._next()):
            actions += asked
        return actions

    def _next(self) -> list[Action]:
        """The next step, or the question that must be answered before it; nothing while enough is in flight."""
        start = self._sent_to + len(self._accepted) - self._named
        line = self.known[start : start + (self._chunks[-1] if self._chunks else self.plan.prefill_chunk)]
        if start + len(line) < len(self.known):  # a prompt or a replay: chunks follow each other
            return self._send(line, sample=False) if len(self._in_flight) < self.plan.window else []
        if not line and (not self.policy.rows or len(self._in_flight) >= self.policy.in_flight):
            return []
        if line and len(self._in_flight) >= self.plan.window:
            return []
        if self.policy.rows and (question := self._ask(self.policy.thoughts)):
            return question
        sent = self._send(line, sample=True)
        if sent or not self.policy.rows:
            return sent
        return self._ask(self.policy.levels)  # nothing is worth its way as yet

    def _send(self, line: Sequence[int], *, sample: bool) -> list[Action]:
        nodes: list[Node] = []
        if sample:
            policy = self.policy
            reach = 0.0 if line else policy.reach
            nodes = self._tree.send(self._room(), policy.levels, policy.log_floor, reach)
            if not line and not nodes:
                return []
            self._rounds = self._thoughts = 0
            self.tally.steps += 1
            self.tally.rows += len(nodes)
            self.tally.expected += sum(math.exp(node.score - self._tree.root.score) for node in nodes)
        if line and self._chunks:
            self._chunks.pop()
        step = SendStep(
            self.epoch,
            self._next_step,
            self._sent_to,
            tuple(line),
            sample,
            commit=tuple(self._accepted[self._named :]),
            rows=tuple(node.token for node in nodes),
            parents=self._tree.parent_slots(nodes),
            slots=tuple(node.slot for node in nodes),
        )
        self._next_step += 1
        self._sent_to, self._named = step.after, len(self._accepted)
        drawing = (self._tree.root, *nodes) if line and sample else tuple(nodes)
        self._in_flight[step.step] = _Sent(step, drawing)
        return [step]
