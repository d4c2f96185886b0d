"""Through the gateway, with every strategy: tokens, texts and log-probabilities of transformers on one machine (fp32),
whatever grammar, penalties, bias, filters, stop strings and choices are asked for, and whichever hop dies."""

from __future__ import annotations

import json
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx
import pytest
from gateway_swarm import CHAT_TEMPLATE, SPECIAL
from identity_reference import SCHEMA, Answer, Case, Reference, assert_same, joined_stream, random_case
from memory_swarm import MemorySwarm, cut, memory_swarm
from tiny_models import ModelTensors, tiny_model, transformers_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from virtual_clock import run, virtual_time

from swarm.testing.memory_network import LinkModel
from swarm.types import Chain
from swarm_client.api.options import STRATEGIES
from swarm_client.speculation.drafters.acceptance import AcceptanceRates
from swarm_client.speculation.drafters.base import Candidate, Drafter, TokenPath
from swarm_client.speculation.drafters.inline import InlineDrafter
from swarm_gateway.server.app import create_app
from swarm_gateway.serving.gateway import Gateway
from swarm_gateway.serving.served_model import ServedModel
from swarm_kernels.models.open import ModelSource
from swarm_kernels.tokenizer.parts import TokenizerParts
from swarm_kernels.tokenizer.tokenizer import ChatTokenizer, load_tokenizer

BORDERS: tuple[tuple[int, ...], ...] = ((), (4,), (2, 3))
KINDS = ("llama", "qwen3", "qwen2")
SPECULATIVE = tuple(strategy for strategy in STRATEGIES if strategy not in ("auto", "sequential"))
LINK = LinkModel(delay_s=0.01)


@cache
def tokenizer() -> ChatTokenizer:
    """Bytes, and some merges as byte-level BPE has them, so that a text has several spellings."""
    merges = [("{", '"'), ('"', ":"), ("Ġ", '"'), ("n", "a"), ("m", "e"), ("na", "me"), ("c", "a"), ("ca", "t")]
    merges += [("r", "e"), ("re", "d"), ("Ġ", "s"), ("t", "r"), ("u", "e"), ("tr", "ue"), ('"', ","), ("Ġ", "1")]
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return ChatTokenizer(TokenizerParts(made, CHAT_TEMPLATE, {"eos_token": SPECIAL[0]}, (0,)), (0,))


@cache
def reference(kind: str = "llama", seed: int = 0) -> Reference:
    """Of a random model, whose vocabulary is padded beyond the tokenizer's."""
    size = tokenizer().vocab_size + 3
    return Reference(tiny_model(kind, seed, vocab_size=size, max_position_embeddings=512), tokenizer())


class Foreknown(Drafter):
    """Drafts what continues one of `texts`, with a wrong token now and then; of the text so far it makes one up."""

    def __init__(self, texts: list[list[int]], rate: float = 0.8) -> None:
        super().__init__("foreknown", AcceptanceRates((rate * 0.8, rate * 0.2)))
        self.texts, self.rate, self.known = texts, rate, list[int]()

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        self.known = list(prompt_ids)

    def _advance(self, tokens: Sequence[int]) -> None:
        self.known += tokens

    def _draft(self, paths: Sequence[TokenPath], width: int) -> list[list[Candidate]]:
        return [self._candidates([*self.known, *path], width) for path in paths]

    def _candidates(self, text: list[int], width: int) -> list[Candidate]:
        size, rng = len(text), random.Random(str(text))
        right = {t[size]: None for t in self.texts if len(t) > size and t[:size] == text and rng.random() < self.rate}
        tokens = [*right, *(token for token in rng.sample(range(6, 200), width) if token not in right)]
        return [Candidate(token, math.log(0.8 * 0.2**rank)) for rank, token in enumerate(tokens[:width])]


class Killer:
    """Watches the answers, and kills the hop `victim` of the first one that has 8 tokens."""

    def __init__(self, swarm: MemorySwarm, victim: int) -> None:
        self.swarm, self.victim, self.tokens, self.killed = swarm, victim, 0, False

    def started(self, answer_id: str, model: str) -> None: ...

    def progressed(self, answer_id: str, *, chain: Chain | None, tokens: int, waiting: str) -> None:
        self.tokens += tokens
        if self.tokens >= 8 and chain is not None and not self.killed:
            self.killed = True
            self.swarm.kill(chain.peers[self.victim])

    def ended(self, answer_id: str) -> None: ...


@dataclass
class Strategies:
    """A gateway with one model for each strategy, all of one swarm. `texts`: what its drafters know."""

    swarm: MemorySwarm
    http: httpx.AsyncClient
    models: dict[str, ServedModel]
    texts: list[list[int]] = field(default_factory=list)
    turns: random.Random = field(default_factory=lambda: random.Random(0))

    async def ask(self, case: Case, strategy: str) -> dict[str, Any]:
        answer = await self.http.post(case.path, json={**case.body, "model": strategy})
        assert answer.status_code == 200, answer.text
        made: dict[str, Any] = answer.json()
        return made

    async def ask_streaming(self, case: Case, strategy: str) -> dict[str, Any]:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        answer = await self.http.post(case.path, json={**case.body, "model": strategy, **options})
        assert answer.status_code == 200, answer.text
        return joined_stream(case, answer.text)

    def expect(self, reference: Reference, case: Case) -> list[Answer]:
        """The reference's answers, which the drafters know from now on."""
        expected = reference.answers(case)
        self.texts += [[*reference.prompt_ids(case), *answer.tokens] for answer in expected]
        return expected

    def accepted(self, strategy: str) -> float:
        """Draft tokens so far."""
        return float(self.models[strategy].metrics.accepted_tokens.labels(strategy)._value.get())

    async def check(self, reference: Reference, case: Case, strategies: Sequence[str] = STRATEGIES) -> None:
        """Whole answers, and two of the strategies' streams."""
        expected = self.expect(reference, case)
        streamed = [strategy for strategy in strategies if self.turns.randrange(len(strategies)) < 2]
        for strategy in strategies:
            where = f"{strategy}: {json.dumps(case.body)}"
            assert_same(case, await self.ask(case, strategy), expected, where)
            if strategy in streamed:
                assert_same(case, await self.ask_streaming(case, strategy), expected, f"stream, {where}")


@asynccontextmanager
async def strategies(
    source: Any, chat_tokenizer: ChatTokenizer, spans: Sequence[Any], drafter: str = "", victim: int | None = None
) -> AsyncIterator[Strategies]:
    """`drafter`: as of a client's config; "": what the reference has answered. `victim`: the hop that dies."""
    async with (
        memory_swarm(source, list(spans) * (1 if victim is None else 2), LINK, tokenizer=chat_tokenizer) as swarm,
        AsyncExitStack() as stack,
    ):
        texts: list[list[int]] = []
        served = {}
        for number, strategy in enumerate(STRATEGIES):
            make: Callable[[], InlineDrafter] | None = None if drafter else lambda: InlineDrafter(Foreknown(texts))
            client = await stack.enter_async_context(
                swarm.client(number, (), make, chat_tokenizer, decoding=strategy, drafter=drafter or "ngram")
            )
            served[strategy] = ServedModel(strategy, client)
        transport = httpx.ASGITransport(create_app(Gateway(list(served.values()))))
        if victim is not None:
            for model in served.values():
                model.observer = Killer(swarm, victim)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:11435", timeout=600) as http:
            yield Strategies(swarm, http, served, texts)


def check_random(seed: int, cases: int, tokens: int) -> None:
    """A random model, cut in one to three; every strategy answers the same random requests."""

    async def check() -> None:
        rng = random.Random(seed)
        made, drafter = reference(KINDS[seed % len(KINDS)], seed), rng.choice(["", "ngram"])
        spans = cut(6, *BORDERS[seed % len(BORDERS)])
        async with strategies(ModelTensors(made.model), tokenizer(), spans, drafter) as gateway:
            for _ in range(cases):
                await gateway.check(made, random_case(rng, made, tokens))

    run(check())


@pytest.mark.parametrize("seed", range(3))
def test_random_requests(seed: int) -> None:
    check_random(seed, cases=2, tokens=12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 12))
def test_more_random_requests(seed: int) -> None:
    check_random(seed, cases=4, tokens=24)


PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.9,
    "presence_penalty": 0.5,
    "logit_bias": {"70": 3.0, "77": -100, "90": 1.5},
}
SEEDED: dict[str, Any] = {"temperature": 0.9, "min_p": 0.02, "top_k": 60, "top_p": 0.98, "seed": 23}
USER = [{"role": "user", "content": "Who are you?"}]


@pytest.mark.parametrize("choice", [{"temperature": 0}, SEEDED], ids=["greedy", "seeded"])
@virtual_time
async def test_penalties_and_grammars_do_not_stop_speculation(choice: dict[str, Any]) -> None:
    made = reference()
    logprobs = {"logprobs": True, "top_logprobs": 2}
    free = Case(USER, {"max_tokens": 30, **PENALTIES, **choice, **logprobs})
    schema = Case(USER, {"max_tokens": 60, **PENALTIES, **choice, **logprobs}, SCHEMA)
    for case, drafter in ((free, ""), (schema, "ngram")):
        async with strategies(ModelTensors(made.model), tokenizer(), cut(6, 2, 4), drafter) as gateway:
            expected = gateway.expect(made, case)
            for strategy in SPECULATIVE:
                assert_same(case, await gateway.ask(case, strategy), expected, strategy)
                assert gateway.accepted(strategy) >= 8, strategy
            if case.schema is not None and expected[0].finish_reason == "stop":
                assert set(json.loads(expected[0].text)) == set(SCHEMA["required"])


@virtual_time
async def test_an_answer_ends_with_the_token_that_completes_a_stop_string() -> None:
    """However many tokens a step has brought."""
    made = reference()
    fields = {"max_tokens": 24, **SEEDED, "logprobs": 0, "ignore_eos": True, "n": 3, "echo": True}
    prompt = [40, 99, 7, 12, 200, 31]
    text = made.answers(Case(prompt, {**fields, "n": 1, "echo": False}))[0].text
    place = next(i for i in range(8, len(text)) if text[i].isascii() and text[i] not in text[:i])
    case = Case(prompt, {**fields, "stop": [text[place]]})
    async with strategies(ModelTensors(made.model), tokenizer(), cut(6, 3)) as gateway:
        gateway.expect(made, Case(prompt, fields))  # drafters go on beyond the stop
        expected = made.answers(case)
        assert expected[0].finish_reason == "stop"
        for strategy in STRATEGIES:
            assert_same(case, await gateway.ask(case, strategy), expected, strategy)


@pytest.mark.parametrize("number", range(len(STRATEGIES)))
@virtual_time
async def test_a_hop_that_dies_in_the_middle_changes_nothing(number: int) -> None:
    await check_death(STRATEGIES[number], victim=number % 3)


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("strategy", STRATEGIES)
@virtual_time
async def test_any_hop_may_die_with_any_strategy(strategy: str, victim: int) -> None:
    await check_death(strategy, victim)


async def check_death(strategy: str, victim: int) -> None:
    made = reference("llama", victim)
    fields = {"max_tokens": 24, **PENALTIES, **SEEDED, "n": 2, "echo": True, "logprobs": 1, "ignore_eos": True}
    cases = [Case([40, 99, 7, 12, 200, 31], fields)]
    cases.append(
        Case(USER, {"max_tokens": 40, "temperature": 0, **PENALTIES, "logprobs": True, "top_logprobs": 1}, SCHEMA)
    )
    for case in cases:
        async with strategies(ModelTensors(made.model), tokenizer(), cut(6, 2, 4), victim=victim) as gateway:
            expected = gateway.expect(made, case)
            assert_same(case, await gateway.ask_streaming(case, strategy), expected, strategy)
            assert gateway.models[strategy].metrics.repairs.labels(strategy)._value.get() > 0


@pytest.mark.real_model
@pytest.mark.parametrize("seed", range(2))
def test_random_models_with_a_real_vocabulary(real_model: ModelSource, seed: int) -> None:
    chat_tokenizer = load_tokenizer(real_model)
    size = real_model.config.vocab_size
    made = Reference(tiny_model("llama", seed, vocab_size=size, max_position_embeddings=512), chat_tokenizer)

    async def check() -> None:
        rng = random.Random(seed)
        async with strategies(ModelTensors(made.model), chat_tokenizer, cut(6, *BORDERS[seed + 1])) as gateway:
            for _ in range(2):
                await gateway.check(made, random_case(rng, made))
            await gateway.check(made, Case(USER, {"max_tokens": 40, **SEEDED, **PENALTIES, "n": 2}, SCHEMA))

    run(check())


def real_cases(chat_tokenizer: ChatTokenizer) -> list[Case]:
    """Answers that repeat the prompt, so that the n-gram drafter is often right."""
    poem = [{"role": "user", "content": "Repeat after me: one two three four five six seven eight nine ten."}]
    mild: dict[str, Any] = {"repetition_penalty": 1.02, "frequency_penalty": 0.1, "logit_bias": {"28": 1.5, "198": -3}}
    logprobs = {"logprobs": True, "top_logprobs": 3}
    person = [{"role": "user", "content": "Describe Anna, who is 31 and likes red, as JSON."}]
    text = chat_tokenizer.encode("The capital of France is Paris. The capital of Italy is Rome. The capital of")
    return [
        Case(poem, {"max_tokens": 40, "temperature": 0, **mild, **logprobs}),
        Case(person, {"max_tokens": 60, "temperature": 0.8, "seed": 5, "min_p": 0.05, **mild, **logprobs}, SCHEMA),
        Case(text, {"max_tokens": 16, **SEEDED, **mild, "n": 2, "logprobs": 2, "echo": True, "stop": ["Spain"]}),
    ]


@pytest.mark.real_model
@pytest.mark.parametrize("number", range(3))
def test_smollm2(real_model: ModelSource, number: int) -> None:
    chat_tokenizer = load_tokenizer(real_model)
    made = Reference(transformers_model(real_model), chat_tokenizer)
    case = real_cases(chat_tokenizer)[number]

    async def check() -> None:
        async with strategies(real_model, chat_tokenizer, cut(30, 13), "ngram") as gateway:
            await gateway.check(made, case)
            for strategy in SPECULATIVE:
                assert gateway.accepted(strategy) > 0 or "n" in case.fields, strategy

    run(check())
