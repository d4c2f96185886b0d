"""Masks of grammars: the same by whatever way a state came to a path, on both kinds of tokenizers, within bounds."""

from __future__ import annotations

import json
import random
import re
import resource
import time
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from swarm.errors import InvalidRequest, UnsupportedRequest
from swarm.types import MAX_GRAMMAR_LENGTH, Grammar, GrammarKind
from swarm_kernels.models.source import ModelSource
from swarm_kernels.sampling.grammar import JSON_FORM, MAX_CACHED, GrammarCompiler, GrammarState
from swarm_kernels.tokenizer.parts import TokenizerParts, add_tokens
from swarm_kernels.tokenizer.tokenizer import ChatTokenizer, load_tokenizer

PADDING = 13  # rows of a model's head beyond its tokenizer
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "dark blue", "naïve"]}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"const": {"zip": 7}}]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON)),
    "regex": Grammar(GrammarKind.REGEX, r"(the |a )?(cat|catalogue|dog)( (sat|ran)){0,4}\."),
    "lark": Grammar(GrammarKind.LARK, 'start: "<call>" %json {"type": "object", "properties": {"x": {}}} "</call>"'),
}


def byte_level() -> ChatTokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [json.dumps(PERSON), '{"name": "Bob", "age": 12, "tags": ["red", "green"]}', "the cat sat. a dog ran"] * 4
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<eos>", "<eot>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(corpus, trainer)
    return ChatTokenizer(TokenizerParts(tokenizer, eos_token_ids=(0, 1)))


def sentencepiece() -> ChatTokenizer:
    """As `tokenizer.gguf` builds it for Llama 2's vocabulary: blanks as ▁, bytes for what has no token."""
    tokens = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    merged = ['{"', '":', "▁{", "na", "me", "name", "ca", "cat", "re", "▁c", "▁cat", '",', "do", "og", "dog"]
    vocab = {token: i for i, token in enumerate([*tokens, *merged])}
    merges = [(token[:-1], token[-1]) for token in merged if token[:-1] in vocab]
    bpe = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    add_tokens(tokenizer, ["<unk>", "</s>"], [])
    return ChatTokenizer(TokenizerParts(tokenizer, eos_token_ids=(1,)))


TOKENIZERS = {"byte-level": byte_level, "sentencepiece": sentencepiece}


@pytest.fixture(params=TOKENIZERS, scope="module")
def tokenizer(request: pytest.FixtureRequest) -> ChatTokenizer:
    return TOKENIZERS[request.param]()


def compiler_of(tokenizer: ChatTokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + PADDING)


def reference_mask(tokenizer: ChatTokenizer, grammar: Grammar, path: list[int]) -> np.ndarray | None:
    """llguidance's own, by a new matcher that reads the whole path."""
    size = tokenizer.vocab_size + PADDING
    ll = LLTokenizer(tokenizer.to_json(), n_vocab=size, eos_token=list(tokenizer.eos_token_ids))
    sources = {
        GrammarKind.JSON_SCHEMA: lambda text: LLMatcher.grammar_from_json_schema(text, overrides=JSON_FORM),
        GrammarKind.REGEX: LLMatcher.grammar_from_regex,
        GrammarKind.LARK: LLMatcher.grammar_from_lark,
    }
    matcher = LLMatcher(ll, sources[grammar.kind](grammar.source))
    if any(token in tokenizer.eos_token_ids for token in path) or (path and not matcher.consume_tokens(path)):
        return None
    bits = allocate_token_bitmask(1, size)
    fill_next_token_bitmask(matcher, bits)
    return np.unpackbits(bits.view(np.uint8)[0], bitorder="little")[:size].astype(bool)


def walk(state: GrammarState, rng: random.Random, eos: tuple[int, ...], most: int = 300) -> list[int]:
    """A random answer; the end-of-turn token whenever it is allowed, every third time."""
    path: list[int] = []
    while len(path) < most:
        mask = state.mask(path)
        assert mask is not None
        allowed = np.flatnonzero(mask).tolist()
        ends = [token for token in allowed if token in eos]
        if ends and (rng.random() < 0.3 or len(ends) == len(allowed)):
            break
        path.append(rng.choice([token for token in allowed if token not in eos]))
    return path


@pytest.mark.parametrize("name", GRAMMARS)
def test_masks_of_random_trees_are_those_of_new_matchers(tokenizer: ChatTokenizer, name: str) -> None:
    rng, grammar = random.Random(name), GRAMMARS[name]
    state = compiler_of(tokenizer).compile(grammar)
    for _ in range(4):  # the same state goes back and forth, as when drafts are rejected
        answer = walk(compiler_of(tokenizer).compile(grammar), rng, tokenizer.eos_token_ids, 40)
        cut = rng.randrange(len(answer) + 1)
        text, paths = answer[:cut], [answer[cut:end] for end in range(cut, len(answer) + 1, 3)]
        for _ in range(6):  # branches that leave the answer: allowed ones, random ones, ends of the turn
            path = [*rng.choice(paths), rng.randrange(tokenizer.vocab_size)]
            paths.append([*path, rng.choice([*tokenizer.eos_token_ids, rng.randrange(tokenizer.vocab_size)])])
        rng.shuffle(paths)
        masks = state.masks(text, paths)
        assert len(masks) == len(paths)
        for path, mask in zip(paths, masks, strict=True):
            expected = reference_mask(tokenizer, grammar, [*text, *path])
            assert (mask is None) == (expected is None)
            assert mask is None or (mask.dtype == np.bool_ and np.array_equal(mask, expected))


def test_random_answers_are_what_the_grammar_describes(tokenizer: ChatTokenizer) -> None:
    compiler, rng, eos = compiler_of(tokenizer), random.Random(5), tokenizer.eos_token_ids
    for _ in range(30):
        state = compiler.compile(GRAMMARS["schema"])
        path = walk(state, rng, eos)
        text = tokenizer.decode(path)
        jsonschema.validate(json.loads(text), PERSON)
        assert json.dumps(json.loads(text), ensure_ascii="\\u" in text) == text  # the one form of white space
        assert state.accepts(path)
        assert not state.accepts(path[:-1]) or not text.endswith("}")
        text = tokenizer.decode(walk(compiler.compile(GRAMMARS["regex"]), rng, eos))
        assert re.fullmatch(GRAMMARS["regex"].source, text)


def test_padding_and_control_tokens_are_never_allowed(tokenizer: ChatTokenizer) -> None:
    state = compiler_of(tokenizer).compile(Grammar(GrammarKind.REGEX, r"(?s:.*)"))
    mask = state.mask([])
    assert mask is not None
    assert len(mask) == tokenizer.vocab_size + PADDING
    assert not mask[tokenizer.vocab_size :].any()
    assert mask[list(tokenizer.eos_token_ids)].all()


def test_forced_tokens_are_the_canonical_ones(tokenizer: ChatTokenizer) -> None:
    state = compiler_of(tokenizer).compile(GRAMMARS["schema"])
    forced = state.forced([]).tokens
    assert tokenizer.decode(forced) == '{"name": "'
    assert len(forced) >= 2
    for count in range(len(forced)):
        mask = state.mask(forced[:count])
        assert mask is not None
        assert mask[forced[count]]
        assert state.forced([], forced[:count]).tokens[0] == forced[count]
    assert 0 < state.forced([]).settled <= len(forced)


def test_after_the_end_of_the_turn_nothing_is_constrained(tokenizer: ChatTokenizer) -> None:
    eos = tokenizer.eos_token_ids[0]
    state = compiler_of(tokenizer).compile(Grammar(GrammarKind.REGEX, "ab"))
    a, b = tokenizer.encode("a")[-1], tokenizer.encode("b")[-1]
    path = walk(state, random.Random(0), tokenizer.eos_token_ids)
    mask = state.mask(path)
    assert mask is not None
    assert np.flatnonzero(mask).tolist() == sorted(tokenizer.eos_token_ids)
    assert state.mask([*path, eos]) is None
    assert state.mask([b]) is None
    assert state.mask([1 << 40]) is None
    assert state.mask([-1]) is None
    assert not state.accepts([a])


def test_states_of_one_grammar_are_independent_and_the_cache_is_bounded(tokenizer: ChatTokenizer) -> None:
    compiler = compiler_of(tokenizer)
    one, other = compiler.compile(GRAMMARS["regex"]), compiler.compile(GRAMMARS["regex"])
    path = walk(one, random.Random(1), tokenizer.eos_token_ids)
    first = compiler.compile(GRAMMARS["regex"]).mask([])
    assert first is not None
    assert np.array_equal(other.mask([]), first)  # type: ignore[arg-type]
    assert one.accepts(path)
    for number in range(2 * MAX_CACHED):
        compiler.compile(Grammar(GrammarKind.REGEX, f"x{number}"))
    assert len(compiler._compiled) == MAX_CACHED


def test_a_model_without_an_end_of_turn_token_has_no_grammars() -> None:
    plain = ChatTokenizer(TokenizerParts(Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))))
    with pytest.raises(UnsupportedRequest, match="end-of-turn"):
        GrammarCompiler(plain, 2).compile(Grammar(GrammarKind.REGEX, "a"))


# What strangers send --------------------------------------------------------------------------------------------------


def nested(depth: int) -> str:
    return '{"type": "object", "properties": {"a": ' * depth + "{}" + "}}" * depth


def schema(**fields: Any) -> str:
    return json.dumps(fields)


HOSTILE = {
    "deep schema": (GrammarKind.JSON_SCHEMA, nested(1500)),
    "brackets": (GrammarKind.JSON_SCHEMA, "[" * 60_000),
    "no JSON": (GrammarKind.JSON_SCHEMA, "{"),
    "no object": (GrammarKind.JSON_SCHEMA, "false"),
    "contradiction": (GrammarKind.JSON_SCHEMA, schema(enum=[])),
    "recursion": (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}'),
    "remote schema": (GrammarKind.JSON_SCHEMA, '{"$ref": "http://127.0.0.1:1/x.json"}'),
    "file": (GrammarKind.JSON_SCHEMA, '{"$ref": "file:///etc/passwd"}'),
    "multiples": (GrammarKind.JSON_SCHEMA, schema(type="integer", multipleOf=1234567)),
    "escaped multiples": (GrammarKind.JSON_SCHEMA, r'{"type": "integer", "multiple\u004ff": 1234567}'),
    "coprime multiples": (GrammarKind.JSON_SCHEMA, schema(allOf=[{"multipleOf": 9973}, {"multipleOf": 9967}])),
    "multiples in lark": (GrammarKind.LARK, 'start: %json {"type": "integer", "multipleOf": 1234567.5}'),
    "many choices": (
        GrammarKind.JSON_SCHEMA,
        schema(allOf=[{"oneOf": [{"properties": {f"p{9 * i + k}": {}}} for k in range(9)]} for i in range(30)]),
    ),
    "unclosed regex": (GrammarKind.REGEX, "(["),
    "deep regex": (GrammarKind.REGEX, "(" * 30_000 + "a" + ")" * 30_000),
    "look-ahead": (GrammarKind.REGEX, "(?=a)b"),
    "surrogates": (GrammarKind.REGEX, "\ud800"),
    "broken lark": (GrammarKind.LARK, "start: foo bar ((("),
    "deep lark": (GrammarKind.LARK, "start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "too long": (GrammarKind.REGEX, "a" * (MAX_GRAMMAR_LENGTH + 1)),
}
COSTLY = {
    "minItems": (GrammarKind.JSON_SCHEMA, schema(type="array", items={"type": "integer"}, minItems=10**9)),
    "maxLength": (GrammarKind.JSON_SCHEMA, schema(type="string", maxLength=10**9)),
    "large enum": (GrammarKind.JSON_SCHEMA, schema(enum=[f"x{i}" for i in range(5000)])),
    "many fields": (GrammarKind.JSON_SCHEMA, schema(type="object", properties={f"p{i}": {} for i in range(2000)})),
    "many patterns": (
        GrammarKind.JSON_SCHEMA,
        schema(type="object", properties={f"p{i}": {"type": "string", "pattern": f"(.*{i}){{3}}"} for i in range(300)}),
    ),
    "exponential regex": (GrammarKind.REGEX, "(a|b)*a" + "(a|b)" * 25),
    "repetitions": (GrammarKind.REGEX, "((a{1,1000}){1,1000}){1,1000}"),
    "unicode": (GrammarKind.REGEX, r"[\p{L}\p{N}]{1,5000}"),
    "left recursion": (GrammarKind.LARK, 'start: start start start | "a" |'),
    "ambiguous lark": (
        GrammarKind.LARK,
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)) + '\nr60: "a"',
    ),
    "long text": (GrammarKind.JSON_SCHEMA, json.dumps({"const": "é" * 60_000}, ensure_ascii=False)),
    "multiples of cents": (GrammarKind.JSON_SCHEMA, schema(type="number", multipleOf=0.01)),
}


def begin(compiler: GrammarCompiler, grammar: Grammar) -> None:
    """Some grammars turn out to be impossible or too costly only when they are used."""
    state = compiler.compile(grammar)
    state.mask([])
    state.forced([])


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_grammars_are_invalid_requests(tokenizer: ChatTokenizer, case: str) -> None:
    kind, source = HOSTILE[case]
    started = time.monotonic()
    with pytest.raises(InvalidRequest) as refused:
        begin(compiler_of(tokenizer), Grammar(kind, source))
    assert len(str(refused.value)) < 500
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("case", COSTLY)
def test_costly_grammars_take_bounded_time_and_memory(case: str) -> None:
    tokenizer = byte_level()
    kind, source = COSTLY[case]
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    try:
        state = compiler_of(tokenizer).compile(Grammar(kind, source))
        walk(state, random.Random(0), tokenizer.eos_token_ids, 50)
    except InvalidRequest:
        pass  # that is an answer too
    assert time.monotonic() - started < 8
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10 < 200  # MB


@pytest.mark.real_model
def test_the_built_in_tokenizer_spells_json(real_model: ModelSource) -> None:
    tokenizer = load_tokenizer(real_model)
    compiler = GrammarCompiler(tokenizer, real_model.config.vocab_size)
    for value in ({"name": "Bob", "age": 7, "tags": []}, {"name": "Zoë", "age": 120, "tags": ["naïve", "dark blue"]}):
        path = tokenizer.encode(json.dumps(value, ensure_ascii=False), add_special_tokens=False)
        state = compiler.compile(GRAMMARS["schema"])
        for count, token in enumerate(path):
            mask = state.mask(path[:count])
            assert mask is not None
            assert mask[token]
        assert state.accepts(path)
