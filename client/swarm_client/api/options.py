"""The options of one generation, checked before anything is sent. Independent of the network."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from swarm.errors import InvalidRequest, UsageError
from swarm.old_names import current
from swarm.planner.speculation.forecast import Strategy
from swarm.types import MAX_GRAMMAR_LENGTH, MAX_LOGIT_BIAS, MAX_LOGPROBS, Grammar, GrammarKind, Sampling

ChatMessage = Mapping[str, Any]
"""`{"role": "system" | "user" | "assistant" | "tool", "content": text}`, as OpenAI's. An assistant's may have
`tool_calls` (then its content may be None) and `reasoning_content`; what the chat template knows of it is used.
"""

STRATEGIES = ("auto", *Strategy)  # of one generation
OUTLINE = "outline"  # of a conversation: several generations, the points of an answer
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_SEED = 1 << 63
MAX_FORKS = 128  # of one prompt
MAX_BIAS = 1e4  # of a logit


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
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    grammar: Grammar | None
    logprobs: int | None
    prompt_logprobs: int | None
    ignore_eos: bool
    skip_special_tokens: bool
    stop: str | Sequence[str]
    decoding: str
    point_decoding: str


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How to generate. Temperature 0 is greedy; a `seed` of None means a random one, which the result reports.

    `decoding`: one of STRATEGIES, or OUTLINE; a plain prompt (not a chat) is then continued as with `auto`.
    `point_decoding`: one of STRATEGIES, for the points of an outlined answer.

    `logprobs`, `prompt_logprobs`, the penalties and their order: see `types.Sampling`. `ignore_eos`: go on after an
    end-of-turn token. `skip_special_tokens`: leave control tokens out of the text.

    The constructor raises InvalidRequest for a value of the wrong type or out of range.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: Grammar | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stop: tuple[str, ...] = ()
    decoding: str = "auto"
    point_decoding: str = "auto"

    def __post_init__(self) -> None:
        self._check_types()
        self._check_ranges()

    def _check_types(self) -> None:
        for name in ("max_new_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if not (name in ("seed", "logprobs", "prompt_logprobs") and value is None):
                _require_type(name, value, int, "an integer")
        for name in ("temperature", "top_p", "repetition_penalty", "min_p", "frequency_penalty", "presence_penalty"):
            _require_type(name, getattr(self, name), (int, float), "a number")
        for name in ("ignore_eos", "skip_special_tokens"):
            _require(isinstance(getattr(self, name), bool), f"{name} is {getattr(self, name)!r}; it must be a bool")
        for name in ("decoding", "point_decoding"):
            _require_type(name, getattr(self, name), str, "a string")
        _require_type("stop", self.stop, tuple, "a string or several")
        for text in self.stop:
            _require_type("a stop string", text, str, "a string")
        _require_type("logit_bias", self.logit_bias, Mapping, "a mapping from token ids to numbers")
        for token, bias in self.logit_bias.items():
            _require_type("a token id of logit_bias", token, int, "an integer")
            _require_type(f"the logit_bias of token {token}", bias, (int, float), "a number")
        if self.grammar is not None:
            _require_type("grammar", self.grammar, Grammar, "a swarm.types.Grammar")
            _require_type("the grammar's kind", self.grammar.kind, GrammarKind, "a GrammarKind")
            _require_type("the grammar's source", self.grammar.source, str, "a string")

    def _check_ranges(self) -> None:
        _require(self.max_new_tokens >= 1, f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        _require(0.0 < self.top_p <= 1.0, f"top_p is {self.top_p}; it must be above 0 and at most 1")
        _require(0 <= self.top_k <= 1 << 20, f"top_k is {self.top_k}; it must be 0 (off) or a number of tokens")
        self._require_between("temperature", 0.0, 100.0, " (0 is greedy)")
        self._require_between("repetition_penalty", 0.01, 100.0, " (1 is off)")
        self._require_between("min_p", 0.0, 1.0, " (0 is off)")
        self._require_between("frequency_penalty", -100.0, 100.0, " (0 is off)")
        self._require_between("presence_penalty", -100.0, 100.0, " (0 is off)")
        self._require_between("logprobs", 0, MAX_LOGPROBS)
        self._require_between("prompt_logprobs", 0, MAX_LOGPROBS)
        _require(
            self.seed is None or 0 <= self.seed < MAX_SEED,
            f"seed is {self.seed}; it must be from 0 to 2**63 - 1",
        )
        _require(len(self.stop) <= MAX_STOP_STRINGS, f"{len(self.stop)} stop strings; at most {MAX_STOP_STRINGS}")
        _require(
            all(0 < len(s) <= MAX_STOP_LENGTH for s in self.stop),
            f"a stop string must have 1 to {MAX_STOP_LENGTH} characters",
        )
        _require(
            len(self.logit_bias) <= MAX_LOGIT_BIAS,
            f"logit_bias has {len(self.logit_bias)} tokens; at most {MAX_LOGIT_BIAS}",
        )
        for token, bias in self.logit_bias.items():
            _require(0 <= token < 1 << 31, f"logit_bias has token {token}, which is no token id")
            _require(abs(bias) <= MAX_BIAS, f"the logit_bias of token {token} is {bias}; at most {MAX_BIAS:.0f}")
        self._check_choices()

    def _check_choices(self) -> None:
        _require(
            self.decoding in (*STRATEGIES, OUTLINE),
            f"decoding is '{self.decoding}'; there are {', '.join((*STRATEGIES, OUTLINE))}",
        )
        _require(
            self.point_decoding in STRATEGIES,
            f"point_decoding is '{self.point_decoding}'; there are {', '.join(STRATEGIES)}",
        )
        if self.grammar is not None:
            _require(
                0 < len(self.grammar.source) <= MAX_GRAMMAR_LENGTH,
                f"a grammar must have 1 to {MAX_GRAMMAR_LENGTH} characters",
            )
            _require(not self.ignore_eos, "a grammar says where the answer ends; leave out ignore_eos")
        _require(
            self.decoding != OUTLINE or not self.excludes_outline,
            f"an outline is several generations, which cannot have {self.excludes_outline}; choose another decoding",
        )

    def _require_between(self, name: str, low: float, high: float, note: str = "") -> None:
        """NaN is not between any two numbers. None, where the type allows it, is off."""
        value = getattr(self, name)
        _require(value is None or low <= value <= high, f"{name} is {value}; it must be from {low} to {high}{note}")

    @property
    def excludes_outline(self) -> str:
        """The option of one generation that an outlined answer cannot have; "" if none is set."""
        given = {
            "a grammar": self.grammar is not None,
            "logprobs": self.logprobs is not None,
            "prompt_logprobs": self.prompt_logprobs is not None,
            "ignore_eos": self.ignore_eos,
        }
        return next((name for name, is_set in given.items() if is_set), "")

    @property
    def speculates(self) -> bool:
        """Whether decoding may be speculative."""
        return self.decoding != Strategy.SEQUENTIAL

    @property
    def fixed_strategy(self) -> Strategy | None:
        """The one strategy to use, None to choose."""
        return None if self.decoding in ("auto", OUTLINE) else Strategy(self.decoding)

    def sampling(self) -> Sampling:
        """As sent to the tail, with a fresh seed if none was given."""
        seed = self.seed if self.seed is not None else secrets.randbits(62)
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            repetition_penalty=self.repetition_penalty,
            seed=seed,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=tuple(sorted(self.logit_bias.items())),
            grammar=self.grammar,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


def generation_options(given: Mapping[str, Any], default_decoding: str) -> GenerationOptions:
    """From keywords, also by their old names. Raises UsageError, InvalidRequest."""
    merged: dict[str, Any] = {}
    for name, value in given.items():
        flag, merged_value = current(name.replace("_", "-"), value)
        merged[flag.replace("-", "_")] = merged_value
    stop = merged.get("stop", ())
    if isinstance(stop, Iterable):
        merged["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    decoding = merged.pop("decoding", None)
    try:
        checked = GenerationOptions(**merged)
        if decoding is None:
            decoding = "auto" if default_decoding == OUTLINE and checked.excludes_outline else default_decoding
        return replace(checked, decoding=decoding)
    except TypeError as error:
        raise UsageError(f"not an option of a generation: {error}") from None


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Raises InvalidRequest unless every message has a role, and a content or tool calls, and somebody said something.
    The chat template checks the rest.
    """
    for message in messages:
        _require(isinstance(message, Mapping), "a chat message must be an object with a role and a content")
        role, content = message.get("role"), message.get("content")
        text = isinstance(content, str) or (role == "assistant" and content is None and message.get("tool_calls"))
        _require(isinstance(role, str) and bool(text), "a chat message needs a role and a content")
    any_text = any(m["role"] == "tool" or (m["role"] == "user" and m["content"].strip()) for m in messages)
    _require(any_text, "the prompt is empty; say something")


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise InvalidRequest(sentence)


def _require_type(name: str, value: Any, kind: type | tuple[type, ...], wanted: str) -> None:
    """A bool is no number here: `max_new_tokens=True` is a mistake."""
    _require(isinstance(value, kind) and not isinstance(value, bool), f"{name} is {value!r}; it must be {wanted}")
