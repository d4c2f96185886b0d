"""Whether the drafts of the tail bring more than they take.

Owns the count of both for one generation: a result waits for its draft, and where tokens come at some rate, what takes
t ms must bring rate * t tokens (see `marginal_policy`). A draft has brought what the next result accepted of it, also
where another drafter had said the same: so drafts end only where they do not pay even with all of the credit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from swarm.ewma import Ewma
from swarm.planner.speculation.policy import TAIL_VALUE, TailValuePolicy
from swarm.tap_messages import DraftedChildren


@dataclass(slots=True)
class TailDraftValue:
    """`came` with the tokens of every result, then `received` with the draft that came with it, if any."""

    policy: TailValuePolicy = TAIL_VALUE
    drafts: int = 0
    tokens: int = 0  # that drafts have brought
    _judged: int = 0
    _children: DraftedChildren | None = None
    _brought: Ewma = field(init=False)
    _took_ms: Ewma = field(init=False)

    def __post_init__(self) -> None:
        self._brought = Ewma(self.policy.decay, bias_correction=True)
        self._took_ms = Ewma(self.policy.decay, bias_correction=True)

    @property
    def took_ms(self) -> float:
        """Of a draft, lately."""
        return self._took_ms.value

    @property
    def brought(self) -> float:
        """Tokens, of a draft."""
        return self._brought.value

    def came(self, tokens: Sequence[int], *, used: bool = True) -> None:
        """What a result added to the text: its last token would have come without any draft. `used`: whether drafts are
        sent along now; while they are not, nothing is learned of them."""
        children, self._children = self._children, None
        if children is None or not tokens or not used:
            return
        self._judged += 1
        right = 0
        while right < len(tokens) - 1:
            path = tuple(tokens[:right])
            if all(token != tokens[right] for token, _ in children.get(path, ())):
                break
            right += 1
        self.tokens += right
        self._brought.update(right)

    def received(self, children: DraftedChildren, took_ms: float) -> None:
        self.drafts += 1
        self._took_ms.update(took_ms)
        self._children = children

    def pays(self, tokens_per_ms: float) -> bool:
        """At the rate at which tokens come now."""
        if self._judged < self.policy.trial_drafts:
            return self.drafts <= self.policy.max_unused_drafts
        return self.brought >= tokens_per_ms * self.took_ms

    def explain(self, tokens_per_ms: float) -> str:
        """One clause, for people."""
        return (
            f"a draft of the tail brings {self.brought:.2f} tokens and takes {self.took_ms:.1f} ms, in which "
            f"{tokens_per_ms * self.took_ms:.2f} come anyway"
        )
