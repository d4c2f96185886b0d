"""Drafts within a grammar: what it forces comes first and alone, and nothing that it forbids is proposed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from swarm.errors import InvalidRequest
from swarm.types import Grammar
from swarm_client.api.grammars import json_object_grammar, json_schema_grammar, regex_grammar
from swarm_client.speculation.drafters.base import Candidate, Drafter, TokenPath
from swarm_client.speculation.drafters.grammar import GrammarDrafter
from swarm_client.speculation.drafters.ngram import NgramDrafter
from swarm_kernels.sampling.grammar import GrammarCompiler
from swarm_kernels.tokenizer.parts import TokenizerParts
from swarm_kernels.tokenizer.tokenizer import ChatTokenizer

PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "alive": {"type": "boolean"}}}
ANSWER = '{"name": "Bob", "alive": true}'


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=["<eos>"], initial_alphabet=alphabet)
    made.train_from_iterator([ANSWER, "true", "false", "the cat"] * 4, trainer)
    return ChatTokenizer(TokenizerParts(made, eos_token_ids=(0,)))


def drafter(tokenizer: ChatTokenizer, grammar: Grammar, inner: Drafter | None = None) -> GrammarDrafter:
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    made = GrammarDrafter(inner or NgramDrafter(), lambda: compiler.compile(grammar))
    made.reset(tokenizer.encode("the cat"))
    return made


class Fixed(Drafter):
    """Proposes the same candidates everywhere."""

    is_synchronous = True

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        super().__init__("fixed")
        self.candidates, self.asked = list(candidates), 0

    def _begin(self, prompt_ids: Sequence[int]) -> None: ...

    def _advance(self, tokens: Sequence[int]) -> None: ...

    def _draft(self, paths: Sequence[TokenPath], width: int) -> list[list[Candidate]]:
        self.asked += len(paths)
        return [self.candidates[:width] for _ in paths]


def test_a_forced_text_is_drafted_token_by_token_and_asks_no_other_drafter(tokenizer: ChatTokenizer) -> None:
    text = "the cat sat on the mat"
    inner = Fixed([])
    made = drafter(tokenizer, regex_grammar(text), inner)
    path: tuple[int, ...] = ()
    while tokenizer.decode(path) != text:
        candidates = made.propose(path, 4)
        assert len(candidates) == 1
        assert candidates[0].logprob > math.log(0.75)
        path += (candidates[0].token,)
    assert made.propose(path, 4) == [Candidate(0, 0.0)], "only the end of the turn is left"
    assert inner.asked == 0
    made.extend(path)
    assert made.propose((), 4) == [Candidate(0, 0.0)]
    assert made.acceptance.hit_rate(0) > 0


def test_forbidden_candidates_go_and_the_others_share_their_probability(tokenizer: ChatTokenizer) -> None:
    token = {letter: tokenizer.encode(letter)[0] for letter in "xyz"}
    inner = Fixed([Candidate(token["x"], math.log(0.5)), Candidate(token["y"], math.log(0.2))])
    made = drafter(tokenizer, regex_grammar(r"[^x]{3,9}"), inner)
    assert made.propose((), 4) == [Candidate(token["y"], pytest.approx(math.log(0.4)))]
    assert made.propose_cached([()], 4).unassigned_mass == [0.0]
    assert made.propose((token["x"],), 4) == [], "a path that the grammar forbids"


def test_few_choices_are_all_proposed(tokenizer: ChatTokenizer) -> None:
    made = drafter(tokenizer, json_schema_grammar({"type": "boolean"}))
    proposed = {tokenizer.decode([candidate.token]) for candidate in made.propose((), 8)}
    assert {"true", "false"} <= {text for text in ("true", "false") if any(text.startswith(p) for p in proposed)}
    assert math.fsum(math.exp(candidate.logprob) for candidate in made.propose((), 8)) <= 1 + 1e-9


def test_a_bad_grammar_is_known_when_the_drafter_begins(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(InvalidRequest):
        drafter(tokenizer, regex_grammar("(["))


def test_constructors_refuse_what_is_no_grammar() -> None:
    assert json.loads(json_object_grammar().source) == {"type": "object"}
    assert json.loads(json_schema_grammar(PERSON).source) == PERSON
    for bad in ({"a": object()}, {"a": "x" * 70_000}):
        with pytest.raises(InvalidRequest):
            json_schema_grammar(bad)
    with pytest.raises(InvalidRequest):
        regex_grammar("")
