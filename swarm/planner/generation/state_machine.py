"""One generation as a state machine: events in, actions out (dask's `WorkerState.handle_stimulus`).

Owns a session's tokens: the prompt, the generated tokens, how many of them the chain has, and the draft tokens in
flight. A driver performs the actions and reports events; sockets, clocks, tokenizers and drafters are elsewhere, so
every interleaving can be tested by calling `handle`.

Two rules make it small. Rows are taken from the one list of known tokens: a prompt is known from the start, a generated
token when the tail reports it, and after a repair the cursor moves back to what the new chain has, so prefill, decoding
and replay are one loop. And the tail samples after every row regardless of the drafts: drafts are only matched with the
samples, so they change when a token comes and never which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from swarm.planner.generation.draft_tree import NO_SLOT, DraftNode, DraftTree
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
from swarm.planner.generation.step_results import PromptLogprobs, check_result
from swarm.types import TokenLogprobs

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


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Bounds on draft requests and tree slots."""

    candidates_per_node: int = 8  # less likely ones are never worth a row
    nodes_per_model_call: int = 12  # the draft model's time grows with them
    slot_slack: int = 32  # tree slots left free, as partly filled KV blocks use room too
    run_rows: int = 32  # of a step, where a grammar forces the text: they carry no risk, whatever the policy allows


LIMITS = DraftLimits()


class GenerationPhase(Enum):
    WAITING = "waiting for a chain"
    RUNNING = "running"
    DONE = "done"


@dataclass(slots=True)
class SpecDecodeStats:
    """Counts of speculative decoding so far."""

    steps: int = 0  # sent that sample
    rows: int = 0  # tree nodes sent
    expected_accepted: float = 0.0  # accepted tokens that the drafter's probabilities predict for them
    accepted: int = 0  # sampled tokens that had been sent as a draft before
    rejected: int = 0  # sampled tokens that had not
    discarded_steps: int = 0  # steps in flight that a rejection invalidated


@dataclass(slots=True)
class _InFlightStep:
    step: SendStep
    nodes: tuple[DraftNode, ...]  # those that the result has samples for, in order


@dataclass(slots=True)
class GenerationState:
    """The state of one generation. `handle(event)` returns the next actions; a finished generation ignores events.

    `policy` may be set at any time and applies from the next step on. `resumed`: how the answer begins, if known.
    """

    request: GenerationRequest
    policy: SpeculationPolicy = SEQUENTIAL
    resumed: Sequence[int] = ()
    known: list[int] = field(init=False)  # prompt, then generated tokens
    phase: GenerationPhase = field(init=False, default=GenerationPhase.WAITING)
    epoch: int = field(init=False, default=0)
    stats: SpecDecodeStats = field(init=False, default_factory=SpecDecodeStats)
    _tree: DraftTree = field(init=False)  # below the last known token
    _sent_to: int = field(init=False, default=0)  # known tokens committed once all steps sent have run
    _committed_to: int = field(init=False, default=0)  # known tokens committed by every hop already
    _chunks: list[int] = field(init=False, default_factory=list)  # of the current prefill or replay, next one last
    _accepted: list[int] = field(init=False, default_factory=list)  # slots of the known tokens from _committed_to on
    _commits_in_flight: int = field(init=False, default=0)  # how many of them are in steps in flight
    _next_step: int = field(init=False, default=0)
    _in_flight: dict[int, _InFlightStep] = field(init=False, default_factory=dict)
    _drafts_requested: tuple[DraftNode, ...] = field(init=False, default=())  # nodes with a request in flight
    _draft_rounds: int = field(init=False, default=0)  # draft requests for the next step
    _model_calls: int = field(init=False, default=0)  # those of them that use the draft model
    _prompt_logprobs: PromptLogprobs = field(init=False, default_factory=PromptLogprobs)

    def __post_init__(self) -> None:
        self.known = [*self.request.prompt, *self.resumed]
        self._tree = DraftTree(self.known[-1], len(self.known) - 1)

    @property
    def committed_to(self) -> int:
        return self._committed_to

    @property
    def generated(self) -> tuple[int, ...]:
        return tuple(self.known[len(self.request.prompt) :])

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Of each token of the prompt after the first, if asked for; () before all of them are there."""
        return self._prompt_logprobs.of(self.request)

    @property
    def max_tokens(self) -> int:
        """KV tokens that a hop must reserve. The last token sampled is never sent back."""
        return self._end + self.request.reserved_tree_slots

    @property
    def _end(self) -> int:
        """The first position beyond the text."""
        return len(self.request.prompt) + self.request.max_new_tokens

    def handle(self, event: Event) -> list[Action]:
        """Raises ProtocolError if a result is not what its step asked for, see `step_results`."""
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
        # The last known token must be sent even if cached: the next token is sampled from its row.
        self._sent_to = self._committed_to = min(event.cached_tokens, len(self.known) - 1)
        self._chunks = [chunk for chunk in reversed(event.chunks) if chunk > 0]
        return self._advance()

    def _on_hop_lost(self, event: HopLost) -> list[Action]:
        self.phase = GenerationPhase.WAITING  # or still: a failed repair's successor has an epoch of its own
        self._invalidate_in_flight()
        self._accepted.clear()  # a replacement has no tree slots: tokens beyond the committed ones are sent again
        self._commits_in_flight = 0
        self._drafts_requested = ()  # the request may be lost: it came after a step that could not be sent
        return [RepairChain(event.peer, event.reason, self._committed_to)]

    def _invalidate_in_flight(self) -> None:
        """Results of steps in flight, and their tree slots, are void from here on."""
        self.epoch += 1
        self._in_flight.clear()
        self._tree.forget_slots()

    # Results ---------------------------------------------------------------------------------------------------------

    def preview(self, result: StepDone) -> tuple[int, ...]:
        """The tokens that `result` adds to the text, without adding them; () for a late or malformed one."""
        sent = self._in_flight.get(result.step)
        if result.epoch != self.epoch or sent is None or len(result.tokens) != len(sent.nodes):
            return ()
        return self._tree.follow(dict(zip(sent.nodes, result.tokens, strict=True)), self.request.eos_ids)

    def _on_step_result(self, event: StepDone) -> list[Action]:
        sent = self._in_flight.get(event.step)
        if event.epoch != self.epoch or sent is None:
            return []  # late, from before a repair or a rejection
        check_result(event, sent.step, self.request)
        del self._in_flight[event.step]
        del self._accepted[: len(sent.step.commit_slots)]
        self._commits_in_flight -= len(sent.step.commit_slots)
        self._committed_to = sent.step.committed_after
        self._draft_rounds = self._model_calls = 0
        for node, token in zip(sent.nodes, event.tokens, strict=True):
            node.sampled = token
        for node, token, wire in zip(sent.nodes, event.tokens, event.logprobs, strict=False):
            node.logprobs = wire.to_logprobs(token)
        self._prompt_logprobs.add(event, sent.step, self.request)
        for node, proposed in zip(sent.nodes, event.medusa_candidates, strict=False):
            if all(token < self.request.vocab_size for candidates in proposed for token, _ in candidates):
                node.medusa_candidates = proposed
        actions: list[Action] = []
        accepted, reason, missed = self._accept_sampled()
        if accepted:
            tokens = tuple(node.sampled for node in accepted if node.sampled is not None)
            logprobs = tuple(node.logprobs for node in accepted if node.logprobs is not None)
            samples = tuple(map(sent.nodes.index, accepted))
            self.known.extend(tokens)
            actions.append(EmitTokens(tokens, event.trace, accepted[-1].medusa_candidates, logprobs, samples))
        if reason is not None:
            self.phase = GenerationPhase.DONE
            return [*actions, Finish(reason)]
        if missed:
            actions += self._on_miss()
        return [*actions, *self._advance()]

    def _accept_sampled(self) -> tuple[list[DraftNode], FinishReason | None, bool]:
        """Follow the sampled tokens down the tree. -> (the nodes that they were sampled after, the finish reason if it
        ends, whether the last token was not drafted)

        The end-of-turn token itself is kept.
        """
        accepted: list[DraftNode] = []
        while (token := self._tree.root.sampled) is not None:
            accepted.append(self._tree.root)
            if token in self.request.eos_ids:
                return accepted, FinishReason.EOS, False
            if len(self.known) + len(accepted) >= self._end:
                return accepted, FinishReason.LENGTH, False
            slot = self._tree.advance(token)
            if slot == NO_SLOT:
                self.stats.rejected += 1
                return accepted, None, True
            self.stats.accepted += 1
            self._accepted.append(slot)
        return accepted, None, False

    def _on_miss(self) -> list[Action]:
        """The token sampled last was not in flight as a draft: send it, after the accepted ones, in a new epoch."""
        if not self._in_flight:
            return []
        self.stats.discarded_steps += len(self._in_flight)
        self._invalidate_in_flight()
        # Hops that dropped steps may lack commits that others have made: all of these are sent again (`messages.Step`).
        self._sent_to, self._commits_in_flight = self._committed_to, 0
        return [DiscardInFlight(self.epoch)]

    # Drafting --------------------------------------------------------------------------------------------------------

    def _on_drafts_proposed(self, event: DraftsProposed) -> list[Action]:
        requested, self._drafts_requested = self._drafts_requested, ()
        masses = (*event.unassigned_mass, *(0.0,) * (len(requested) - len(event.unassigned_mass)))
        for node, candidates, mass in zip(requested, event.candidates, masses, strict=False):
            self._tree.add(node, candidates, mass)
            for token in self.request.eos_ids & node.children.keys():
                self._tree.mark_terminal(node.children[token])
        return self._advance() if requested else []

    def _request_drafts(self, max_model_calls: int) -> list[Action]:
        """Request drafts for the next step; empty if there are enough.

        `max_model_calls`: no more draft-model calls than this before the step.
        """
        policy = self.policy
        first = len(self.known) == len(self.request.prompt)  # drafting would delay the first token
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
        if self.request.constrained:
            ends = self._tree.ends_of_runs(self._run_rows(), self._end - 1)
            if ends:
                return self._draft_request(ends, use_model=policy.min_mass_blocking is None)
        return (
            self._request_model_drafts()
            if policy.min_mass_blocking is not None and self._model_calls < max_model_calls
            else []
        )

    def _request_model_drafts(self) -> list[Action]:
        """Call the draft model, if it could assign enough probability mass to be worth its time."""
        policy = self.policy
        nodes = self._tree.most_uncertain(
            min(policy.max_tree_rows, LIMITS.nodes_per_model_call), policy.min_node_prob, self._end - 1
        )
        mass = math.fsum(self._tree.path_prob(node) * node.unassigned_mass for node in nodes)
        if not nodes or mass < (policy.min_mass_idle if self._in_flight else policy.min_mass_blocking or 0.0):
            return []
        self._model_calls += 1
        return self._draft_request(nodes, use_model=True)

    def _draft_request(self, nodes: Sequence[DraftNode], *, use_model: bool) -> list[Action]:
        self._drafts_requested = tuple(nodes)
        paths = tuple(self._tree.path(node) for node in nodes)
        return [RequestDrafts(paths, min(self.policy.max_tree_rows, LIMITS.candidates_per_node), use_model)]

    def _free_tree_slots(self, most: int | None = None) -> int:
        """How many more tree nodes may be sent; `most`: in place of the policy's rows a step."""
        free = self.max_tokens - len(self.known) - LIMITS.slot_slack - self._tree.num_sent
        return max(0, min(self.policy.max_tree_rows if most is None else most, free))

    def _run_rows(self) -> int:
        """How many nodes of a text that a grammar forces may be sent."""
        return self._free_tree_slots(LIMITS.run_rows) if self.request.constrained and self.policy.max_tree_rows else 0

    # Sending ---------------------------------------------------------------------------------------------------------

    def _advance(self) -> list[Action]:
        actions: list[Action] = []
        while not self._drafts_requested and (following := self._next()):
            actions += following
        return actions

    def _next(self) -> list[Action]:
        """The next step, or the draft request before it; empty while enough steps are in flight."""
        start = self._sent_to + len(self._accepted) - self._commits_in_flight
        causal = self.known[start : start + (self._chunks[-1] if self._chunks else self.request.prefill_chunk)]
        if start + len(causal) < len(self.known):  # chunked prefill, or a replay
            return self._send(causal, sample=False) if len(self._in_flight) < self.request.prefill_window else []
        if not causal and (not self.policy.max_tree_rows or len(self._in_flight) >= self.policy.max_steps_in_flight):
            return []
        if causal and len(self._in_flight) >= self.request.prefill_window:
            return []
        if self.policy.max_tree_rows and (requests := self._request_drafts(self.policy.max_model_calls)):
            return requests
        sent = self._send(causal, sample=True)
        if sent or not self.policy.max_tree_rows:
            return sent
        return self._request_drafts(self.policy.max_depth_per_step)  # no draft is worth sending yet

    def _send(self, causal: Sequence[int], *, sample: bool) -> list[Action]:
        nodes: list[DraftNode] = []
        if sample:
            policy = self.policy
            nodes = self._tree.take_for_step(
                self._free_tree_slots(),
                policy.max_depth_per_step,
                policy.min_node_logprob,
                0.0 if causal else policy.min_path_prob,
                self._run_rows(),
            )
            if not causal and not nodes:
                return []
            self._draft_rounds = self._model_calls = 0
            self.stats.steps += 1
            self.stats.rows += len(nodes)
            self.stats.expected_accepted += sum(self._tree.path_prob(node) for node in nodes)
        if causal and self._chunks:
            self._chunks.pop()
        step = SendStep(
            self.epoch,
            self._next_step,
            self._sent_to,
            tuple(causal),
            sample,
            commit_slots=tuple(self._accepted[self._commits_in_flight :]),
            rows=tuple(node.token for node in nodes),
            parents=self._tree.parent_slots(nodes),
            slots=tuple(node.slot for node in nodes),
        )
        self._next_step += 1
        self._sent_to, self._commits_in_flight = step.committed_after, len(self._accepted)
        sampling = (self._tree.root, *nodes) if causal and sample else tuple(nodes)
        self._in_flight[step.step] = _InFlightStep(step, sampling)
        return [step]
