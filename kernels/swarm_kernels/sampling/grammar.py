"""Constrained decoding: which tokens may follow a path of tokens, by a JSON schema, a regex or a Lark grammar.

Owns the compiled grammars of one tokenizer and their bounds; llguidance parses, and computes the masks. The tail asks
for a mask for each row that it samples, the client's drafter for what the grammar forces. Does not know logits,
sessions or how a mask is applied.

A grammar is a stranger's text: the limits below bound what one may cost, and what goes beyond them is InvalidRequest.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from swarm.errors import InvalidRequest, UnsupportedRequest
from swarm.types import MAX_GRAMMAR_LENGTH, Grammar, GrammarKind
from swarm_kernels.tokenizer.tokenizer import ChatTokenizer

if TYPE_CHECKING:  # it is in the library's stub file alone
    from llguidance._lib import JsonCompileOptions

__all__ = ["ForcedRun", "GrammarCompiler", "GrammarState", "TokenMask"]

TokenMask = npt.NDArray[np.bool_]
"""`[vocab]`: whether each token is allowed."""

MAX_CACHED = 16  # compiled grammars; a tool's schema comes with every request of a conversation
MAX_CACHED_CHARACTERS = 1 << 17  # ... of all their sources: up to 80 bytes of memory each
MAX_MULTIPLE_OF = 10_000  # llguidance makes a state a remainder: 29 ms for 12,345, 15 s and 0.9 GB for 1,234,567
MAX_MASKS_S = 2.0  # for the rows of one step; a schema's take 64 times 0.1 ms, and other grammars wait meanwhile
JSON_FORM: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As `json.dumps` writes it, on one line. With free white space a small model may write blanks for ever."""

_NUMBER_FIELD = re.compile(r'"((?:[^"\\]|\\.){0,64})"\s*:\s*(-?[0-9][0-9.eE+-]{0,40})')


def _limits() -> LLParserLimits:
    """Tighter than llguidance's defaults: fuel is time (about 50 units a microsecond), states are memory (1-2 KB)."""
    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=10_000,  # of which ambiguous rules make one mask quadratic: 3 s with 25,000, 1 s with 10,000
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


class GrammarCompiler:
    """The grammars of one model. Thread-safe; calls that compile take milliseconds, bad ones up to about a second, and
    drop the GIL: call them in a thread.
    """

    def __init__(self, tokenizer: ChatTokenizer, vocab_size: int) -> None:
        """`vocab_size`: of the model, whose logits may be padded beyond the tokenizer's vocabulary."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._ll_tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def compile(self, grammar: Grammar) -> GrammarState:
        """A state of its own for one session. Raises InvalidRequest for a grammar that is malformed, contradicts itself
        or costs too much, UnsupportedRequest if the tokenizer cannot be used."""
        tokenizer = self.prepare()
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is not None:
                self._compiled.move_to_end(grammar)
        if matcher is None:
            matcher = LLMatcher(tokenizer, _source(grammar), log_level=0, limits=_limits())
            _raise_error(matcher)
            with self._lock:
                self._compiled[grammar] = matcher
                self._forget_old()
        return GrammarState(tokenizer, matcher.deep_copy(), self._vocab_size)

    def prepare(self) -> LLTokenizer:
        """Load what all grammars need, which takes a while and some 40 MB. Raises UnsupportedRequest."""
        with self._lock:
            if self._ll_tokenizer is None:
                self._ll_tokenizer = self._make_tokenizer()
            return self._ll_tokenizer

    def _forget_old(self) -> None:
        characters = sum(len(grammar.source) for grammar in self._compiled)
        while self._compiled and (len(self._compiled) > MAX_CACHED or characters > MAX_CACHED_CHARACTERS):
            characters -= len(self._compiled.popitem(last=False)[0].source)

    def _make_tokenizer(self) -> LLTokenizer:
        eos = [token for token in self._tokenizer.eos_token_ids if token < self._vocab_size]
        if not eos:
            raise UnsupportedRequest("a grammar needs an end-of-turn token, and this model has none")
        size = max(self._vocab_size, self._tokenizer.vocab_size)
        try:
            return LLTokenizer(self._tokenizer.to_json(), n_vocab=size, eos_token=eos)
        except ValueError as error:
            raise UnsupportedRequest(f"grammars cannot be used with this model's tokenizer: {error}") from None


class ForcedRun(NamedTuple):
    """The tokens of a text that must come next, as the tokenizer would write it.

    The first `settled` of them are so whatever follows, and masks allow nothing else. Later ones may merge with what
    follows: other spellings are allowed, and the model chooses.
    """

    tokens: tuple[int, ...]
    settled: int


class GrammarState:
    """A grammar in one session. Paths are the tokens of the answer, from its first one; the state moves to wherever it
    is asked about, and keeps what a path shares with the one before. For one thread at a time.

    A path that the grammar does not allow, or that goes on after the end of the turn, has no mask: None. Every method
    raises InvalidRequest when the grammar turns out to cost too much.
    """

    def __init__(self, tokenizer: LLTokenizer, matcher: LLMatcher, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(tokenizer.eos_tokens)
        self._path: list[int] = []  # what the matcher has consumed
        self._bits = allocate_token_bitmask(1, tokenizer.vocab_size)  # [1, words]

    def mask(self, path: Sequence[int]) -> TokenMask | None:
        """What may follow `path`."""
        return self.masks(path)[0]

    def masks(self, text: Sequence[int], paths: Sequence[Sequence[int]] = ((),)) -> list[TokenMask | None]:
        """What may follow `text` and then each of `paths`, as for the rows of a draft tree. In depth-first order, so
        that what two paths share is consumed once."""
        masks: list[TokenMask | None] = [None] * len(paths)
        deadline = time.monotonic() + MAX_MASKS_S
        for i in sorted(range(len(paths)), key=lambda i: tuple(paths[i])):
            if self._seek(text, paths[i]):
                masks[i] = self._mask()
            if time.monotonic() > deadline:
                raise InvalidRequest(f"the grammar takes more than {MAX_MASKS_S:g} s for one step; make it simpler")
        return masks

    def forced(self, text: Sequence[int], path: Sequence[int] = ()) -> ForcedRun:
        """What the grammar forces after `text` and `path`, as the tokenizer would write it."""
        if not self._seek(text, path):
            return ForcedRun((), 0)
        tokens = self._matcher.compute_ff_tokens()
        spelled = self._matcher.compute_ff_bytes()[len(self._tokenizer.decode_bytes(tokens)) :]
        _raise_error(self._matcher)
        return ForcedRun((*tokens, *self._tokenizer.tokenize_bytes(spelled)), len(tokens))

    def accepts(self, path: Sequence[int]) -> bool:
        """Whether the answer may end after `path`."""
        return self._seek(path, ()) and self._matcher.is_accepting()

    def permits(self, text: Sequence[int], tokens: Sequence[int]) -> bool:
        """Whether each of `tokens` is one that the mask after `text` and those before it allows; see `mask`."""
        if not self._eos_ids.isdisjoint(text):
            return True
        end = next((i for i, token in enumerate(tokens) if token in self._eos_ids), len(tokens))
        if not self._seek(text, tokens[:end]):
            return False
        return end == len(tokens) or bool(self._mask()[tokens[end]])

    def spelling(self, token: int) -> bytes:
        """The bytes that a token stands for."""
        return self._tokenizer.decode_bytes([token])

    def _seek(self, text: Sequence[int], path: Sequence[int]) -> bool:
        """Move to the end of `text` and `path`; False, at their longest valid part, if the grammar forbids them."""
        size = len(text)
        if self._path[:size] == list(text):
            keep = size + _common(self._path[size:], path)
        else:
            keep = _common(self._path, text)
        if keep < len(self._path):
            self._matcher.rollback(len(self._path) - keep)
            del self._path[keep:]
            _raise_error(self._matcher)
        rest = [*text[keep:], *path[max(0, keep - size) :]]
        if any(token in self._eos_ids or not 0 <= token < self._vocab_size for token in rest):
            return False
        consumed = self._matcher.try_consume_tokens(rest) if rest else 0
        self._path += rest[:consumed]
        _raise_error(self._matcher)
        return consumed == len(rest)

    def _mask(self) -> TokenMask:
        fill_next_token_bitmask(self._matcher, self._bits)
        _raise_error(self._matcher)
        allowed = np.unpackbits(self._bits.view(np.uint8)[0], count=self._vocab_size, bitorder="little")
        if not allowed.any():
            raise InvalidRequest("the grammar allows no further token here")
        return allowed.view(np.bool_)


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _source(grammar: Grammar) -> str:
    """As llguidance takes it. Raises InvalidRequest."""
    if not 0 < len(grammar.source) <= MAX_GRAMMAR_LENGTH:
        raise InvalidRequest(f"a grammar has 1 to {MAX_GRAMMAR_LENGTH} characters, not {len(grammar.source)}")
    _check_multiples(grammar)
    build: dict[GrammarKind, Callable[[str], str]] = {
        GrammarKind.JSON_SCHEMA: lambda text: LLMatcher.grammar_from_json_schema(text, overrides=JSON_FORM),
        GrammarKind.REGEX: LLMatcher.grammar_from_regex,
        GrammarKind.LARK: LLMatcher.grammar_from_lark,
    }
    try:
        return build[grammar.kind](grammar.source)
    except (ValueError, UnicodeEncodeError) as error:  # the latter: lone surrogates
        raise InvalidRequest(f"the grammar is malformed: {_first_line(str(error))}") from None


def _check_multiples(grammar: Grammar) -> None:
    """Refuse what none of llguidance's limits bounds: `multipleOf` with a large number, or several that multiply.

    In a Lark grammar as well, which may embed schemas. Powers of ten cost nothing.
    """
    if grammar.kind is GrammarKind.REGEX:
        return
    common = 1
    for name, number in _NUMBER_FIELD.findall(grammar.source):
        try:
            if json.loads(f'"{name}"', strict=False) != "multipleOf":
                continue
            digits = Decimal(number).normalize().as_tuple().digits
        except (ValueError, ArithmeticError):
            continue  # no JSON: llguidance will say so
        common = math.lcm(common, int("".join(map(str, digits))) or 1)
        if common > MAX_MULTIPLE_OF:
            raise InvalidRequest(f"multipleOf {number}: multiples beyond {MAX_MULTIPLE_OF} are not supported")


def _raise_error(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise InvalidRequest(f"the grammar cannot be used: {_first_line(matcher.get_error())}")


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0][:300]
