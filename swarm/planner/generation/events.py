"""Events and actions of a generation: the interface between `state_machine` and its driver.

Owns these types, the request and the speculation policy. Decides nothing.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.errors import ContextOverflow, InvalidRequest, UsageError
from swarm.messages import WireLogprobs
from swarm.planner.generation.draft_tree import MedusaCandidates
from swarm.types import TokenLogprobs


class FinishReason(enum.StrEnum):
    EOS = "eos"  # the model ended its turn
    LENGTH = "length"  # max_new_tokens, or the end of the model's context
    STOP = "stop"  # a stop string
    CANCELLED = "cancelled"


# Events -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChainReady:
    """Every hop has opened the session. `cached_tokens`: tokens whose keys and values all hops already have.

    `chunks`: prefill chunks for the known tokens after them (`pipeline.prefill_chunking`); beyond these,
    `GenerationRequest.prefill_chunk`.
    """

    cached_tokens: int = 0
    chunks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepDone:
    """The tail's result for one step: a token after the last causal row, if it samples, and one after each tree row.

    `tokens` is empty for a prefill chunk that does not sample. `active_sessions`: how many the busiest hop decodes for.
    `medusa_candidates`: for each of `tokens`, what the tail's Medusa heads propose after it; empty without heads.
    `logprobs`, `prompt_logprobs`: see `messages.StepResult`.
    """

    epoch: int
    step: int
    tokens: tuple[int, ...]
    trace: tuple[tuple[float, float], ...] = ()
    active_sessions: int = 1
    medusa_candidates: tuple[MedusaCandidates, ...] = ()
    logprobs: tuple[WireLogprobs, ...] = ()
    prompt_logprobs: tuple[WireLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftsProposed:
    """The reply to `RequestDrafts`: for each of its paths, (token, ln p) of the candidates, likeliest first.

    `unassigned_mass`: for each path, the probability that only a call of the draft model can assign; empty if none.
    """

    candidates: tuple[tuple[tuple[int, float], ...], ...]
    unassigned_mass: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class DrafterDisabled:
    """The drafter failed for good; the generation continues without one."""


@dataclass(frozen=True, slots=True)
class HopLost:
    """A hop crashed, failed the session, or timed out."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Cancelled by the user, or ended by a stop string."""

    reason: FinishReason


Event = ChainReady | StepDone | DraftsProposed | DrafterDisabled | HopLost | StopRequested

# Actions ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendStep:
    """Send a step (`messages.Step`): after the first `committed_before` tokens commit `commit_slots`, then `tokens`.

    `rows`, `parents`, `slots`: the tokens, parent slots and slots of tree nodes, `[n]` each. If `sample`, the tail
    samples after the last of `tokens`, or with `sample_all` after each of them, and after every node.
    """

    epoch: int
    step: int
    committed_before: int
    tokens: tuple[int, ...]
    sample: bool
    commit_slots: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    sample_all: bool = False

    @property
    def committed_after(self) -> int:
        """Tokens that a hop has committed after this step."""
        return self.committed_before + len(self.commit_slots) + len(self.tokens)

    @property
    def samples(self) -> int:
        """How many tokens the tail must sample."""
        return (len(self.rows) + bool(self.tokens)) if self.sample else 0


@dataclass(frozen=True, slots=True)
class RequestDrafts:
    """Request candidates after the known tokens and each of `paths`: at most `width` tokens for each.

    Without `use_model`: only what is available without a call of the draft model. The driver replies with
    `DraftsProposed` or `DrafterDisabled` before any other event.
    """

    paths: tuple[tuple[int, ...], ...]
    width: int
    use_model: bool = True


@dataclass(frozen=True, slots=True)
class DiscardInFlight:
    """Notify the hops, out of band, to drop steps before `epoch`: they extend a rejected draft token."""

    epoch: int


@dataclass(frozen=True, slots=True)
class EmitTokens:
    """Deliver new tokens. `trace`: (queue ms, compute ms) of each hop for the step that sampled them.

    `medusa_candidates`: what the tail's Medusa heads propose after them. `logprobs`: of each of `tokens`, if asked for.
    `samples`: which of the tokens sampled in its step each of them is; they were sampled in one step, the last that is
    done.
    """

    tokens: tuple[int, ...]
    trace: tuple[tuple[float, float], ...]
    medusa_candidates: MedusaCandidates = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    samples: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RepairChain:
    """Find a chain without `lost`, open the session on it, then report ChainReady.

    `committed`: tokens that have passed the whole chain: every surviving hop has at least their keys and values.
    """

    lost: str
    reason: str
    committed: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason


Action = SendStep | RequestDrafts | DiscardInFlight | EmitTokens | RepairChain | Finish

# Settings -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpeculationPolicy:
    """How much to speculate. One step in flight with many levels is tree verification (SpecInfer); one level a step
    with many steps in flight is PipeDec.
    """

    max_tree_rows: int = 0  # draft tokens a step; 0: plain decoding
    max_depth_per_step: int = 1  # levels of the tree a step
    max_steps_in_flight: int = 1  # unanswered steps while decoding
    min_node_prob: float = 0.0  # a node whose path is less likely is not worth its row
    min_path_prob: float = 0.0  # a step of drafts only is not worth sending if the text reaches it less likely
    min_mass_blocking: float | None = None  # unassigned mass that a draft-model call needs; None: always call it
    min_mass_idle: float = 0.0  # the same with steps in flight, when a call costs less
    max_model_calls: int = 1  # before one step; later drafts can go into the next one

    def __post_init__(self) -> None:
        if (
            self.max_tree_rows < 0
            or self.max_depth_per_step < 1
            or self.max_steps_in_flight < 1
            or not 0 <= self.min_node_prob <= 1
        ):
            raise UsageError(
                "a policy has rows >= 0, depth and steps in flight >= 1 and a node probability from 0 to 1"
            )
        if min(self.min_path_prob, self.min_mass_blocking or 0.0, self.min_mass_idle) < 0:
            raise UsageError("a policy's path probability and masses are not negative")

    @property
    def min_node_logprob(self) -> float:
        return math.log(self.min_node_prob) if self.min_node_prob > 0 else -math.inf


SEQUENTIAL = SpeculationPolicy()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What to generate. Lengths in tokens.

    `prefill_chunk`: the most rows in one step. `prefill_window`: the most unanswered prefill steps; more than one
    pipelines the chunks through the hops. `reserved_tree_slots`: room for tree nodes at the hops, beside the tokens.
    `vocab_size`: results with token ids beyond it are refused. `logprobs`, `prompt_logprobs`: see `types.Sampling`.
    `constrained`: a grammar forces parts of the text, so drafts that are nearly certain go as deep as there are rows.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    prefill_chunk: int = 256
    prefill_window: int = 16
    reserved_tree_slots: int = 0
    vocab_size: int = 1 << 31
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constrained: bool = False

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
        prefill_window: int = 16,
        reserved_tree_slots: int = 0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        constrained: bool = False,
    ) -> GenerationRequest:
        """A request that a swarm can serve. Raises InvalidRequest and ContextOverflow."""
        if not prompt:
            raise InvalidRequest("the prompt is empty; give at least one token of text")
        if prefill_window < 1:
            raise InvalidRequest(f"at most {prefill_window} steps at once would send nothing; allow at least 1")
        if max_new_tokens < 1:
            raise InvalidRequest(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
        bad = next((t for t in prompt if not 0 <= t < vocab_size), None)
        if bad is not None:
            raise InvalidRequest(f"token id {bad} is outside the model's vocabulary of {vocab_size}")
        if len(prompt) >= context_length:
            raise ContextOverflow(
                f"the prompt has {len(prompt)} tokens and the model's context holds {context_length}; shorten it"
            )
        tokens = min(max_new_tokens, context_length - len(prompt))
        room = min(reserved_tree_slots, context_length - len(prompt) - tokens)
        eos = frozenset(eos_ids)
        return cls(
            tuple(prompt),
            tokens,
            eos,
            prefill_chunk,
            prefill_window,
            room,
            vocab_size,
            logprobs,
            prompt_logprobs,
            constrained,
        )
