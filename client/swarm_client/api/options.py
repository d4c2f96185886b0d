"""The options of one generation, checked before anything is sent. Independent of the network."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from swarm.errors import InvalidRequest
from swarm.planner.speculation.forecast import Strategy
from swarm.types import Sampling

ChatMessage = Mapping[str, str]
"""`{"role": "system" | "user" | "assistant", "content": text}`."""

STRATEGIES = ("auto", *Strategy)  # of one generation
OUTLINE = "outline"  # of a conversation: several generations, the points of an answer
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256


class GenerationKeywords(TypedDict, total=False):
    """The keyword arguments of `stream`, `generate` and `chat`: the fields of GenerationOptions, where `stop` may also
    be one string or a list. Absent: the default of GenerationOptions; of `decoding`, the config's.
    """

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    seed: int | None
    stop: str | Sequence[str]
    decoding: str
    point_decoding: str


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How to generate. Temperature 0 is greedy; a `seed` of None means a random one, which the result reports.

    `decoding`: one of STRATEGIES, or OUTLINE; a plain prompt (not a chat) is then continued as with `auto`.
    `point_decoding`: one of STRATEGIES, for the points of an outlined answer.

    The constructor raises InvalidRequest for a value of the wrong type or out of range.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    decoding: str = "auto"
    point_decoding: str = "auto"

    def __post_init__(self) -> None:
        self._check_types()
        self._check_ranges()

    def _check_types(self) -> None:
        for name in ("max_new_tokens", "top_k", "seed"):
            value = getattr(self, name)
            if not (name == "seed" and value is None):
                _require_type(name, value, int, "an integer")
        for name in ("temperature", "top_p", "repetition_penalty"):
            _require_type(name, getattr(self, name), (int, float), "a number")
        for name in ("decoding", "point_decoding"):
            _require_type(name, getattr(self, name), str, "a string")
        _require_type("stop", self.stop, tuple, "a string or several")
        for text in self.stop:
            _require_type("a stop string", text, str, "a string")

    def _check_ranges(self) -> None:
        _require(self.max_new_tokens >= 1, f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        _require(
            math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0,
            f"temperature is {self.temperature}; it must be from 0 (greedy) to 100",
        )
        _require(
            math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0,
            f"top_p is {self.top_p}; it must be above 0 and at most 1",
        )
        _require(0 <= self.top_k <= 1 << 20, f"top_k is {self.top_k}; it must be 0 (off) or a number of tokens")
        _require(
            math.isfinite(self.repetition_penalty) and 0.01 <= self.repetition_penalty <= 100.0,
            f"repetition_penalty is {self.repetition_penalty}; it must be from 0.01 to 100 (1 is off)",
        )
        _require(
            self.seed is None or 0 <= self.seed < 1 << 63,
            f"seed is {self.seed}; it must be from 0 to 2**63 - 1",
        )
        _require(len(self.stop) <= MAX_STOP_STRINGS, f"{len(self.stop)} stop strings; at most {MAX_STOP_STRINGS}")
        _require(
            all(0 < len(s) <= MAX_STOP_LENGTH for s in self.stop),
            f"a stop string must have 1 to {MAX_STOP_LENGTH} characters",
        )
        _require(
            self.decoding in (*STRATEGIES, OUTLINE),
            f"decoding is '{self.decoding}'; there are {', '.join((*STRATEGIES, OUTLINE))}",
        )
        _require(
            self.point_decoding in STRATEGIES,
            f"point_decoding is '{self.point_decoding}'; there are {', '.join(STRATEGIES)}",
        )

    @property
    def speculates(self) -> bool:
        """Whether decoding may be speculative. A repetition penalty needs every token before the next is sampled."""
        return self.decoding != Strategy.SEQUENTIAL and self.repetition_penalty == 1.0

    @property
    def fixed_strategy(self) -> Strategy | None:
        """The one strategy to use, None to choose."""
        return None if self.decoding in ("auto", OUTLINE) else Strategy(self.decoding)

    def sampling(self) -> Sampling:
        """As sent to the tail, with a fresh seed if none was given."""
        seed = self.seed if self.seed is not None else secrets.randbits(62)
        return Sampling(self.temperature, self.top_p, self.top_k, self.repetition_penalty, seed)


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Raises InvalidRequest unless every message has a role and a content, and a user's is not empty."""
    for message in messages:
        role, content = message.get("role"), message.get("content")
        _require(isinstance(role, str) and isinstance(content, str), "a chat message needs a role and a content")
    any_text = any(m["role"] == "user" and m["content"].strip() for m in messages)
    _require(any_text, "the prompt is empty; say something")


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise InvalidRequest(sentence)


def _require_type(name: str, value: Any, kind: type | tuple[type, ...], wanted: str) -> None:
    """A bool is no number here: `max_new_tokens=True` is a mistake."""
    _require(isinstance(value, kind) and not isinstance(value, bool), f"{name} is {value!r}; it must be {wanted}")
