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
from swarm.planner.generation.draft_tree import NO_SLOT, DraftNode, DraftTree, MedusaCandidates
from swarm.planner.generation.events import (
    SEQUENTIAL,
    Action,
    ChainReady,
    DiscardInFlight,
    DrafterDisabled,
    DraftsProposed,
    EmitTokens,
    Event,
    Finish,
    FinishReason,
    GenerationRequest,
    HopLost,
    RepairChain,
    RequestDrafts,
    SendStep,
    SpeculationPolicy,
    StepDone,
    StopRequested,
)

__all__ = [
    "Action",
    "ChainReady",
    "DiscardInFlight",
    "DrafterDisabled",
    "DraftsProposed",
    "EmitTokens",
    "Event",
    "Finish",
    "FinishReason",
    "GenerationPhase",
    "GenerationRequest",
    "GenerationState",
    "HopLost",
    "RepairChain",
    "RequestDrafts",
    "SendStep",
    "SpecDecodeStats",
    "SpeculationPolicy",
    "StepDone",
    "StopRequested",
]

MAX_WIDTH = 8  # guesses asked for after one node; less likely ones are never worth a row
MAX_DRAFT_REQUESTS = 12  # nodes of one thorough question, whose time grows with them
PAGE_SLACK = 32  # tokens of room that pages only partly filled may waste


class GenerationPhase(Enum):
    WAITING = "waiting for a chain"
    RUNNING = "running"
    DONE = "done"


@dataclass(slots=True)
class SpecDecodeStats:
    """What guessing has brought so far, in counts."""

    steps: int = 0  # sent to draw at least one token
    rows: int = 0  # tree nodes sent
    expected_accepted: float = 0.0  # hits that the drafter's odds promised for them
    accepted: int = 0  # tokens that had been sent as a guess before they were drawn
    rejected: int = 0  # tokens that had not
    discarded_steps: int = 0  # steps in flight that a miss made void


@dataclass(slots=True)
class _InFlightStep:
    step: SendStep
    nodes: tuple[DraftNode, ...]  # whose draws the result brings, in order


@dataclass(slots=True)
class GenerationState:
    """The state of one generation. `handle(event)` returns what to do next; a finished generation ignores events.

    `policy` may be set at any time and counts from the next step on.
    """

    request: GenerationRequest
    policy: SpeculationPolicy = SEQUENTIAL
    known: list[int] = field(init=False)  # prompt, then generated tokens
    phase: GenerationPhase = field(init=False, default=GenerationPhase.WAITING)
    epoch: int = field(init=False, default=0)
    stats: SpecDecodeStats = field(init=False, default_factory=SpecDecodeStats)
    _tree: DraftTree = field(init=False)  # below the last known token
    _sent_to: int = field(init=False, default=0)  # known tokens the chain has committed once it ran all steps sent
    _committed_to: int = field(init=False, default=0)  # ... and those that every hop has committed already
    _chunks: list[int] = field(init=False, default_factory=list)  # of the prefill or replay under way, next one last
    _accepted: list[int] = field(init=False, default_factory=list)  # slots of the known tokens from _settled_to on
    _commits_in_flight: int = field(init=False, default=0)  # how many of them steps under way name for committing
    _next_step: int = field(init=False, default=0)
    _in_flight: dict[int, _InFlightStep] = field(init=False, default_factory=dict)
    _drafts_requested: tuple[DraftNode, ...] = field(init=False, default=())  # whom the drafter is guessing about
    _draft_rounds: int = field(init=False, default=0)  # of drafting for the next step
    _model_calls: int = field(init=False, default=0)  # those of them that were thorough

    def __post_init__(self) -> None:
        self.known = list(self.request.prompt)
        self._tree = DraftTree(self.known[-1], len(self.known) - 1)

    @property
    def generated(self) -> tuple[int, ...]:
        return tuple(self.known[len(self.request.prompt) :])

    @property
    def max_tokens(self) -> int:
        """KV tokens a hop must be able to hold. The last token drawn is never sent back in."""
        return self._end + self.request.reserved_tree_slots

    @property
    def _end(self) -> int:
        """The position that no token will have."""
        return len(self.request.prompt) + self.request.max_new_tokens

    def handle(self, event: Event) -> list[Action]:
        """Raises ProtocolError when the tail answers a step with more or fewer tokens than it was to draw."""
        if self.phase is GenerationPhase.DONE:
            return []
        match event:
            case ChainReady():
                return self._on_chain_ready(event)
            case StepDone():
                return self._on_step_result(event)
            case DraftsProposed():
                return self._on_drafts_proposed(event)
            case DrafterDisabled():
                self.policy, self._drafts_requested = SEQUENTIAL, ()
                return self._advance() if self.phase is GenerationPhase.RUNNING else []
            case HopLost():
                return self._on_hop_lost(event)
            case StopRequested():
                self.phase = GenerationPhase.DONE
                return [Finish(event.reason)]

    # Chains ----------------------------------------------------------------------------------------------------------

    def _on_chain_ready(self, event: ChainReady) -> list[Action]:
        if self.phase is not GenerationPhase.WAITING:
            return []
        self.phase = GenerationPhase.RUNNING
        # The last known token must be sent even if held, for its row is what the next token is drawn from.
        self._sent_to = self._committed_to = min(event.cached_tokens, len(self.known) - 1)
        self._chunks = [chunk for chunk in reversed(event.chunks) if chunk > 0]
        return self._advance()

    def _on_hop_lost(self, event: HopLost) -> list[Action]:
        self.phase = GenerationPhase.WAITING  # or still: a repair has failed, and the next one is an epoch of its own
        self._invalidate_in_flight()
        self._accepted.clear()  # a replacement holds no slots: what lies beyond the settled tokens is sent again
        self._commits_in_flight = 0
        self._drafts_requested = ()  # nobody may have heard the question: it came after a step that could not be sent
        return [RepairChain(event.peer, event.reason, self._committed_to)]

    def _invalidate_in_flight(self) -> None:
        """Whatever is in flight belongs to the past."""
        self.epoch += 1
        self._in_flight.clear()
        self._tree.forget_slots()

    # Results ---------------------------------------------------------------------------------------------------------

    def _on_step_result(self, event: StepDone) -> list[Action]:
        sent = self._in_flight.get(event.step)
        if event.epoch != self.epoch or sent is None:
            return []  # late news from before a repair or a miss
        if len(event.tokens) != sent.step.samples:
            raise ProtocolError(f"the tail drew {len(event.tokens)} tokens where {sent.step.samples} were asked for")
        if max(event.tokens, default=0) >= self.request.vocab_size:
            raise ProtocolError(f"the tail drew token {max(event.tokens)}, and the model has {self.request.vocab_size}")
        del self._in_flight[event.step]
        del self._accepted[: len(sent.step.commit_slots)]
        self._commits_in_flight -= len(sent.step.commit_slots)
        self._committed_to = sent.step.committed_after
        self._draft_rounds = self._model_calls = 0
        for node, token in zip(sent.nodes, event.tokens, strict=True):
            node.sampled = token
        for node, hints in zip(sent.nodes, event.medusa_candidates, strict=False):
            if all(token < self.request.vocab_size for guesses in hints for token, _ in guesses):
                node.medusa_candidates = hints
        actions: list[Action] = []
        tokens, hints, reason, missed = self._accept_sampled()
        if tokens:
            self.known.extend(tokens)
            actions.append(EmitTokens(tokens, event.trace, hints))
        if reason is not None:
            self.phase = GenerationPhase.DONE
            return [*actions, Finish(reason)]
        if missed:
            actions += self._on_miss()
        return [*actions, *self._advance()]

    def _accept_sampled(self) -> tuple[tuple[int, ...], MedusaCandidates, FinishReason | None, bool]:
        """Walk the tree along what the tail drew. -> (new tokens, what the tail thinks comes after them, why it ends if
        it does, whether the last was a miss)

        The end-of-turn token itself is kept.
        """
        tokens: list[int] = []
        hints: MedusaCandidates = ()
        while (token := self._tree.root.sampled) is not None:
            tokens.append(token)
            hints = self._tree.root.medusa_candidates
            if token in self.request.eos_ids:
                return tuple(tokens), hints, FinishReason.EOS, False
            if len(self.known) + len(tokens) >= self._end:
                return tuple(tokens), hints, FinishReason.LENGTH, False
            slot = self._tree.advance(token)
            if slot == NO_SLOT:
                self.stats.rejected += 1
                return tuple(tokens), hints, None, True
            self.stats.accepted += 1
            self._accepted.append(slot)
        return tuple(tokens), hints, None, False

    def _on_miss(self) -> list[Action]:
        """The token drawn last was not on its way: it goes out alone, after what is accepted."""
        if not self._in_flight:
            return []
        self.stats.discarded_steps += len(self._in_flight)
        self._invalidate_in_flight()
        # Hops that dropped steps may lack commits that others have made. Named again from the last token that all of
        # them hold, each takes those it lacks (`messages.Step`).
        self._sent_to, self._commits_in_flight = self._committed_to, 0
        return [DiscardInFlight(self.epoch)]

    # Guessing --------------------------------------------------------------------------------------------------------

    def _on_drafts_proposed(self, event: DraftsProposed) -> list[Action]:
        asked, self._drafts_requested = self._drafts_requested, ()
        unsaid = (0.0,) * (len(asked) - len(event.unassigned_mass))
        for node, candidates, still_open in zip(
            asked, event.candidates, (*event.unassigned_mass, *unsaid), strict=False
        ):
            self._tree.add(node, candidates, still_open)
            for token in self.request.eos_ids & node.children.keys():
                self._tree.mark_terminal(node.children[token])
        return self._advance() if asked else []

    def _request_drafts(self, max_model_calls: int) -> list[Action]:
        """Ask for the guesses that the next step could carry; none if all are there.

        `thoughts`: of the questions so far, how many may have been thorough for there to be another.
        """
        policy = self.policy
        first = len(self.known) == len(self.request.prompt)  # nobody should wait for guesses before the first word
        if first or not self._free_tree_slots():
            return []
        if self._draft_rounds < policy.max_depth_per_step:
            sent_only = policy.max_depth_per_step == 1
            nodes = self._tree.to_expand(
                policy.max_tree_rows, policy.min_node_logprob, self._end - 1, sent_only=sent_only
            )
            if nodes:
                self._draft_rounds += 1
                return self._draft_request(nodes, use_model=policy.min_mass_blocking is None)
        return (
            self._request_model_drafts()
            if policy.min_mass_blocking is not None and self._model_calls < max_model_calls
            else []
        )

    def _request_model_drafts(self) -> list[Action]:
        """Ask what takes time to say, where that may place enough belief to be worth it."""
        policy = self.policy
        nodes = self._tree.most_uncertain(
            min(policy.max_tree_rows, MAX_DRAFT_REQUESTS), policy.min_node_prob, self._end - 1
        )
        belief = math.fsum(self._tree.path_prob(node) * node.unassigned_mass for node in nodes)
        if not nodes or belief < (policy.min_mass_idle if self._in_flight else policy.min_mass_blocking or 0.0):
            return []
        self._model_calls += 1
        return self._draft_request(nodes, use_model=True)

    def _draft_request(self, nodes: Sequence[DraftNode], *, use_model: bool) -> list[Action]:
        self._drafts_requested = tuple(nodes)
        paths = tuple(self._tree.path(node) for node in nodes)
        return [RequestDrafts(paths, min(self.policy.max_tree_rows, MAX_WIDTH), use_model)]

    def _free_tree_slots(self) -> int:
        """How many more tree nodes may be sent."""
        room = self.max_tokens - len(self.known) - PAGE_SLACK - self._tree.num_sent
        return max(0, min(self.policy.max_tree_rows, room))

    # Sending ---------------------------------------------------------------------------------------------------------

    def _advance(self) -> list[Action]:
        actions: list[Action] = []
        while not self._drafts_requested and (asked := self._next()):
            actions += asked
        return actions

    def _next(self) -> list[Action]:
        """The next step, or the question that must be answered before it; nothing while enough is in flight."""
        start = self._sent_to + len(self._accepted) - self._commits_in_flight
        line = self.known[start : start + (self._chunks[-1] if self._chunks else self.request.prefill_chunk)]
        if start + len(line) < len(self.known):  # a prompt or a replay: chunks follow each other
            return self._send(line, sample=False) if len(self._in_flight) < self.request.prefill_window else []
        if not line and (not self.policy.max_tree_rows or len(self._in_flight) >= self.policy.max_steps_in_flight):
            return []
        if line and len(self._in_flight) >= self.request.prefill_window:
            return []
        if self.policy.max_tree_rows and (question := self._request_drafts(self.policy.max_model_calls)):
            return question
        sent = self._send(line, sample=True)
        if sent or not self.policy.max_tree_rows:
            return sent
        return self._request_drafts(self.policy.max_depth_per_step)  # nothing is worth its way as yet

    def _send(self, line: Sequence[int], *, sample: bool) -> list[Action]:
        nodes: list[DraftNode] = []
        if sample:
            policy = self.policy
            reach = 0.0 if line else policy.min_path_prob
            nodes = self._tree.take_for_step(
                self._free_tree_slots(), policy.max_depth_per_step, policy.min_node_logprob, reach
            )
            if not line and not nodes:
                return []
            self._draft_rounds = self._model_calls = 0
            self.stats.steps += 1
            self.stats.rows += len(nodes)
            self.stats.expected_accepted += sum(
                math.exp(node.path_logprob - self._tree.root.path_logprob) for node in nodes
            )
        if line and self._chunks:
            self._chunks.pop()
        step = SendStep(
            self.epoch,
            self._next_step,
            self._sent_to,
            tuple(line),
            sample,
            commit_slots=tuple(self._accepted[self._commits_in_flight :]),
            rows=tuple(node.token for node in nodes),
            parents=self._tree.parent_slots(nodes),
            slots=tuple(node.slot for node in nodes),
        )
        self._next_step += 1
        self._sent_to, self._commits_in_flight = step.committed_after, len(self._accepted)
        drawing = (self._tree.root, *nodes) if line and sample else tuple(nodes)
        self._in_flight[step.step] = _InFlightStep(step, drawing)
        return [step]
