"""What happens to a generation, and what it wants done about it: the words between `plan.session` and its driver.

Owns these shapes and the plan of one generation. Decides nothing.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.errors import ContextOverflow, InvalidRequest, UsageError
from swarm.planner.generation.draft_tree import MedusaCandidates


class FinishReason(enum.StrEnum):
    EOS = "eos"  # the model ended its turn
    LENGTH = "length"  # max_new_tokens, or the end of the model's context
    STOP = "stop"  # a stop string
    CANCELLED = "cancelled"


# Events -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChainReady:
    """Every hop has opened the session. `held`: tokens whose keys and values the whole chain already holds.

    `chunks`: how to cut the known tokens after them (`plan.prefill`); `GenerationRequest.prefill_chunk` beyond that.
    """

    cached_tokens: int = 0
    chunks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepDone:
    """The tail's result for one step: a token after the line's last row if it was sampled, one after each tree row.

    `tokens` is empty for a prefill chunk that was not to be sampled. `sessions`: how many the busiest hop decodes for.
    `hints`: for each of `tokens`, what the tail's own heads think comes after it; empty if it has none.
    """

    epoch: int
    step: int
    tokens: tuple[int, ...]
    trace: tuple[tuple[float, float], ...] = ()
    active_sessions: int = 1
    medusa_candidates: tuple[MedusaCandidates, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftsProposed:
    """The answer to `Draft`: for each of its paths, (token, ln p) of what may follow, likeliest first.

    `open`: for each, the part of belief that only a thorough question can place; empty if there is none.
    """

    candidates: tuple[tuple[tuple[int, float], ...], ...]
    unassigned_mass: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class DrafterDisabled:
    """The drafter failed for good; the generation goes on without one."""


@dataclass(frozen=True, slots=True)
class HopLost:
    """A hop died, refused to go on, or fell silent past its deadline."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The user, or the reader of the text, wants no more."""

    reason: FinishReason


Event = ChainReady | StepDone | DraftsProposed | DrafterDisabled | HopLost | StopRequested

# Actions ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendStep:
    """Send a step (`messages.Step`): after the first `base` tokens the slots `commit` are committed, then `tokens`.

    `rows`, `parents`, `slots`: the tokens, parent slots and slots of tree nodes, `[n]` each. The tail draws after the
    last of `tokens` and after every node if `sample`.
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

    @property
    def after(self) -> int:
        """Tokens a hop has committed once it ran this step."""
        return self.committed_before + len(self.commit_slots) + len(self.tokens)

    @property
    def samples(self) -> int:
        """How many tokens the tail must answer with."""
        return (len(self.rows) + bool(self.tokens)) if self.sample else 0


@dataclass(frozen=True, slots=True)
class RequestDrafts:
    """Ask the drafter what follows the known tokens and then each of `paths`: at most `width` tokens for each.

    Not `thorough`: only what can be said in no time. Answered with `DraftsProposed`, or `DrafterDisabled`, before any other event.
    """

    paths: tuple[tuple[int, ...], ...]
    width: int
    use_model: bool = True


@dataclass(frozen=True, slots=True)
class DiscardInFlight:
    """Tell the hops, out of band, that steps before `epoch` are void: a guess they stand on was wrong."""

    epoch: int


@dataclass(frozen=True, slots=True)
class EmitTokens:
    """Hand new tokens to the user. `trace`: (queue ms, compute ms) of each hop for the step that made them.

    `hints`: what the tail thinks comes after them.
    """

    tokens: tuple[int, ...]
    trace: tuple[tuple[float, float], ...]
    medusa_candidates: MedusaCandidates = ()


@dataclass(frozen=True, slots=True)
class RepairChain:
    """Find a chain without `lost`, open the session on it, then report ChainReady.

    `settled`: tokens that have passed the whole chain, so every hop that lives on holds at least their keys and values.
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
    """How far to guess ahead (design section 8). `rows`: tree nodes a step may bring, 0 for plain decoding.

    `levels`: how many of them may hang on each other in one step. `max_steps_in_flight`: unanswered steps while decoding.
    `floor`: a node whose path is less likely than this is not worth its row. One step in flight with many levels is
    tree verification, one level a step with many in flight is PipeDec.

    `reach`: a step that brings guesses alone is not worth its way if the text comes to them less likely than this.
    `ask`, `muse`: how much belief must be open for a thorough question while the chain waits for the answer, and while
    it is busy anyway; None puts every question thoroughly at once. `thoughts`: thorough questions to one step, as what
    they bring later may go in the next one.
    """

    max_tree_rows: int = 0
    max_depth_per_step: int = 1
    max_steps_in_flight: int = 1
    min_node_prob: float = 0.0
    min_path_prob: float = 0.0
    min_mass_blocking: float | None = None
    min_mass_idle: float = 0.0
    max_model_calls: int = 1

    def __post_init__(self) -> None:
        if (
            self.max_tree_rows < 0
            or self.max_depth_per_step < 1
            or self.max_steps_in_flight < 1
            or not 0 <= self.min_node_prob <= 1
        ):
            raise UsageError("a policy has rows >= 0, levels and steps in flight >= 1 and a floor from 0 to 1")
        if min(self.min_path_prob, self.min_mass_blocking or 0.0, self.min_mass_idle) < 0:
            raise UsageError("what a step must reach and a question must bring is not negative")

    @property
    def min_node_logprob(self) -> float:
        return math.log(self.min_node_prob) if self.min_node_prob > 0 else -math.inf


SEQUENTIAL = SpeculationPolicy()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What to generate. Lengths in tokens.

    `prefill_chunk`: the most rows in one step. `window`: the most unanswered prefill steps; more than one lets chunks
    follow each other through the hops. `reserved_tree_slots`: tree nodes the hops must have room for beside the tokens.
    `vocab_size`: token ids lie below it, whatever a tail says.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    eos_ids: frozenset[int] = frozenset()
    prefill_chunk: int = 256
    prefill_window: int = 16
    reserved_tree_slots: int = 0
    vocab_size: int = 1 << 31

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
        window: int = 16,
        tree_room: int = 0,
    ) -> GenerationRequest:
        """A plan that a swarm can serve. Raises InvalidRequest and ContextOverflow."""
        if not prompt:
            raise InvalidRequest("the prompt is empty; give at least one token of text")
        if window < 1:
            raise InvalidRequest(f"at most {window} steps at once would send nothing; allow at least 1")
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
        room = min(tree_room, context_length - len(prompt) - tokens)
        return cls(tuple(prompt), tokens, frozenset(eos_ids), prefill_chunk, window, room, vocab_size)
