"""The outline of a result: why it was used or not, its points and their times. Owns its JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swarm.planner.generation.state_machine import FinishReason


@dataclass(frozen=True, slots=True)
class PointReport:
    """One point of an answer. Times in seconds after the request.

    `shared_prefix_tokens`: of its prompt, shared with an earlier prompt of this answer, so that prefix caches can save
    their prefill; `cached_tokens`: how many were in the prefix caches of all hops.
    `attempts`: 1 unless it was retried. `error`: why it is incomplete, "" if it is complete.
    """

    title: str
    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    began_s: float
    first_token_s: float | None
    ended_s: float
    shared_prefix_tokens: int
    cached_tokens: int
    strategy: str
    attempts: int
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "tokens": len(self.token_ids),
            "finish_reason": None if self.finish_reason is None else str(self.finish_reason),
            "began_s": round(self.began_s, 4),
            "first_token_s": None if self.first_token_s is None else round(self.first_token_s, 4),
            "ended_s": round(self.ended_s, 4),
            "prompt_tokens": len(self.prompt_token_ids),
            "begins_alike": self.shared_prefix_tokens,
            "held": self.cached_tokens,
            "strategy": self.strategy,
            "attempts": self.attempts,
            "error": self.error,
        }


@dataclass(frozen=True, slots=True)
class OutlineReport:
    """`used`: whether the answer has points; if not it is an ordinary one. `reason`: why, without a full stop.

    `text`: the outline as generated, also when it was not used; `ended_s`: when it was complete.
    """

    used: bool
    reason: str
    template: str = ""
    text: str = ""
    tokens: int = 0
    ended_s: float = 0.0
    points: tuple[PointReport, ...] = ()

    def __str__(self) -> str:
        """For people, in one line."""
        if not self.used:
            return f"no outline: {self.reason}"
        side = max(point.ended_s for point in self.points) - min(point.began_s for point in self.points)
        one_by_one = sum(point.ended_s - point.began_s for point in self.points)
        return (
            f"{len(self.points)} points after an outline of {self.tokens} tokens and {self.ended_s:.1f} s, written in "
            f"{side:.1f} s side by side; their own times add up to {one_by_one:.1f} s"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "used": self.used,
            "reason": self.reason,
            "template": self.template,
            "text": self.text,
            "tokens": self.tokens,
            "ended_s": round(self.ended_s, 4),
            "points": [point.to_json() for point in self.points],
        }
