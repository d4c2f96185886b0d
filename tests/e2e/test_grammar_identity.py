"""With a grammar every strategy gives the tokens of a plain loop on one machine: transformers' logits, llguidance's own
mask from a new matcher, one token at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from memory_swarm import cut, memory_swarm
from scripted_drafters import Noise
from tiny_models import ModelTensors, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM
from virtual_clock import virtual_time

from swarm.errors import InvalidRequest, RemoteError
from swarm.testing.memory_network import LinkModel
from swarm.types import Grammar, GrammarKind, Sampling
from swarm_client import SwarmClient
from swarm_client.api.grammars import json_schema_grammar, regex_grammar
from swarm_client.speculation.drafters.inline import InlineDrafter
from swarm_kernels.models.source import ModelSource
from swarm_kernels.sampling.grammar import JSON_FORM, GrammarState
from swarm_kernels.sampling.sampler import sample
from swarm_kernels.tokenizer.parts import TokenizerParts, add_tokens
from swarm_kernels.tokenizer.tokenizer import ChatTokenizer, load_tokenizer

MOST = 60  # tokens of an answer
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
        "alive": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "alive"],
    "additionalProperties": False,
}
GRAMMARS = {"schema": json_schema_grammar(SCHEMA), "regex": regex_grammar(r"(cat|catalog|dog)( (sat|ran)){2,4}\.")}


def ascii_tokenizer() -> ChatTokenizer:
    """Of the tiny models' size: letters, and a few merges as byte-level BPE has them."""
    words = ['{"', '":', 'Ġ"', "na", "me", "name", "ca", "cat", "re", "red", "Ġs", "tr", "true", '",', "ue", "Ġ1"]
    tokens = ["<eos>", "<bos>", *map(chr, range(33, 127)), "Ġ", *words]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [("{", '"'), ('"', ":"), ("Ġ", '"'), ("n", "a"), ("m", "e"), ("na", "me"), ("c", "a"), ("ca", "t")]
    merges += [("r", "e"), ("re", "d"), ("Ġ", "s"), ("t", "r"), ("u", "e"), ("tr", "ue"), ('"', ","), ("Ġ", "1")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    add_tokens(tokenizer, ["<eos>", "<bos>"], [])
    return ChatTokenizer(TokenizerParts(tokenizer, eos_token_ids=(0,)))


def plain_loop(
    model: Any, tokenizer: ChatTokenizer, prompt: Sequence[int], sampling: Sampling, most: int = MOST
) -> list[int]:
    assert sampling.grammar is not None
    vocab, eos = model.config.vocab_size, tokenizer.eos_token_ids
    ll = LLTokenizer(tokenizer.to_json(), n_vocab=vocab, eos_token=list(eos))
    by_schema = sampling.grammar.kind is GrammarKind.JSON_SCHEMA
    source = sampling.grammar.source
    matcher = LLMatcher(
        ll,
        LLMatcher.grammar_from_json_schema(source, overrides=JSON_FORM)
        if by_schema
        else LLMatcher.grammar_from_regex(source),
    )
    answer: list[int] = []
    cache, read = None, list(prompt)
    while len(answer) < most and not (answer and answer[-1] in eos):
        bits = allocate_token_bitmask(1, vocab)
        fill_next_token_bitmask(matcher, bits)
        allowed = np.unpackbits(bits.view(np.uint8)[0], bitorder="little")[:vocab].astype(bool)
        with torch.inference_mode():
            out = model(torch.tensor([read]), past_key_values=cache, use_cache=True)
        cache, known = out.past_key_values, [*prompt, *answer]
        token = sample(out.logits[0, -1], sampling, len(known), known, len(prompt), allowed)
        assert matcher.consume_token(token)
        answer.append(token)
        read = [token]
    return answer


KEYWORDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.2, "top_p": 0.95, "seed": 11},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
}


@pytest.mark.parametrize("options", KEYWORDS)
@pytest.mark.parametrize("name", GRAMMARS)
@virtual_time
async def test_every_strategy_gives_the_tokens_of_a_plain_loop(name: str, options: str) -> None:
    tokenizer, made = ascii_tokenizer(), tiny_model("llama", seed=3)
    prompt_ids, keywords = list(range(5, 25)), KEYWORDS[options]
    sampling = replace(Sampling(grammar=GRAMMARS[name]), **keywords)
    truth = plain_loop(made, tokenizer, prompt_ids, sampling)
    if name == "schema" and truth[-1] in tokenizer.eos_token_ids:
        jsonschema.validate(json.loads(tokenizer.decode(truth)), SCHEMA)
    async with memory_swarm(ModelTensors(made), cut(6, 1, 4), LinkModel(delay_s=0.02), tokenizer=tokenizer) as swarm:
        async with swarm.client(prefill_chunk=8, tokenizer=tokenizer) as client:
            answers = await asyncio.gather(
                *(
                    client.generate(prompt_ids, max_new_tokens=MOST, decoding=s, grammar=GRAMMARS[name], **keywords)
                    for s in ("sequential", "tree", "pipedec", "pipelined-tree", "auto")
                )
            )
        await asyncio.sleep(1)
        assert [node.leaks() for node in swarm.nodes.values()] == [""] * len(swarm.nodes)
    assert [list(answer.token_ids) for answer in answers] == [truth] * 5
    for answer in answers[1:]:
        assert answer.speculation is not None
        assert answer.speculation["hits"] > 0


@virtual_time
async def test_drafts_that_break_the_grammar_change_nothing() -> None:
    tokenizer, made = ascii_tokenizer(), tiny_model("llama", seed=4)
    prompt_ids = list(range(40, 60))
    truth = plain_loop(made, tokenizer, prompt_ids, Sampling(grammar=GRAMMARS["schema"]))
    async with (
        memory_swarm(ModelTensors(made), cut(6, 3), LinkModel(delay_s=0.01), tokenizer=tokenizer) as swarm,
        swarm.client(tokenizer=tokenizer, make_drafter=lambda: InlineDrafter(Noise(truth))) as client,
    ):
        answer = await client.generate(prompt_ids, max_new_tokens=MOST, decoding="tree", grammar=GRAMMARS["schema"])
    assert list(answer.token_ids) == truth
    assert answer.speculation is not None
    assert answer.speculation["rows"] > 20


@virtual_time
async def test_a_tail_that_dies_costs_no_token() -> None:
    tokenizer, made = ascii_tokenizer(), tiny_model("llama", seed=5)
    prompt_ids = list(range(30, 50))
    truth = plain_loop(made, tokenizer, prompt_ids, Sampling(grammar=GRAMMARS["schema"]))
    async with (
        memory_swarm(ModelTensors(made), cut(6, 3) * 2, LinkModel(delay_s=0.01), tokenizer=tokenizer) as swarm,
        swarm.client(tokenizer=tokenizer) as client,
    ):
        stream = client.stream(prompt_ids, max_new_tokens=MOST, grammar=GRAMMARS["schema"], decoding="tree")
        tokens: list[int] = []
        killed = False
        async for piece in stream:
            tokens += piece.token_ids
            if len(tokens) > 4 and not killed:
                killed = True
                assert stream.chain is not None
                swarm.kill(stream.chain.peers[-1])
    assert killed
    assert tokens == truth


@pytest.mark.parametrize("strategy", ["sequential", "tree"])
@virtual_time
async def test_a_tail_that_ignores_the_grammar_is_found_out(strategy: str) -> None:
    tokenizer, made = ascii_tokenizer(), tiny_model("llama", seed=5)
    prompt_ids = list(range(30, 50))
    truth = plain_loop(made, tokenizer, prompt_ids, Sampling(grammar=GRAMMARS["schema"]))

    async def no_masks(*_: object) -> tuple[()]:
        return ()

    async with (
        memory_swarm(ModelTensors(made), cut(6, 3) * 2, LinkModel(delay_s=0.01), tokenizer=tokenizer) as swarm,
        swarm.client(tokenizer=tokenizer) as client,
    ):
        stream = client.stream(prompt_ids, max_new_tokens=MOST, grammar=GRAMMARS["schema"], decoding=strategy)
        tokens: list[int] = []
        async for piece in stream:
            tokens += piece.token_ids
            if len(tokens) == len(piece.token_ids) > 0:  # the first
                assert stream.chain is not None
                swarm.engines[stream.chain.peers[-1]].grammar_masks = no_masks  # type: ignore[method-assign, assignment]
    assert tokens == truth
    assert ["forbids" in repair for repair in stream.result.repairs] == [True]


@virtual_time
async def test_a_grammar_that_costs_too_much_later_is_nobody_elses_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tail fails the session; were it blamed, others would find no node for its layers."""
    tokenizer, made = ascii_tokenizer(), tiny_model("llama", seed=5)
    real = GrammarState.masks

    def masks(self: GrammarState, text: Sequence[int], paths: Sequence[Sequence[int]] = ((),)) -> list[Any]:
        if len(text) > 4:
            raise InvalidRequest("the grammar cannot be used: too many items")
        return real(self, text, paths)

    monkeypatch.setattr(GrammarState, "masks", masks)
    prompt_ids = list(range(30, 50))
    async with (
        memory_swarm(ModelTensors(made), cut(6, 3), LinkModel(delay_s=0.01), tokenizer=tokenizer) as swarm,
        swarm.client(tokenizer=tokenizer) as client,
    ):
        with pytest.raises(InvalidRequest, match="too many items"):
            await client.generate(prompt_ids, max_new_tokens=MOST, grammar=GRAMMARS["schema"], decoding="sequential")
        assert len((await client.generate(prompt_ids, max_new_tokens=5, ignore_eos=True)).token_ids) == 5


BAD = [
    Grammar(GrammarKind.JSON_SCHEMA, "{"),
    Grammar(GrammarKind.REGEX, "(["),
    Grammar(GrammarKind.LARK, "start: ((("),
    json_schema_grammar({"type": "integer", "multipleOf": 1234567}),
]


@pytest.mark.parametrize("grammar", BAD)
@virtual_time
async def test_a_bad_grammar_is_refused_and_others_go_on(grammar: Grammar) -> None:
    tokenizer, made = ascii_tokenizer(), tiny_model("llama")
    prompt_ids = list(range(5, 15))
    async with memory_swarm(ModelTensors(made), cut(6, 3), tokenizer=tokenizer) as swarm:
        async with swarm.client(tokenizer=tokenizer) as client:
            good = asyncio.create_task(client.generate(prompt_ids, max_new_tokens=20))
            with pytest.raises(InvalidRequest):
                await client.generate(prompt_ids, max_new_tokens=20, grammar=grammar)
            assert len((await good).token_ids) > 0
        await asyncio.sleep(1)
        assert [node.leaks() for node in swarm.nodes.values()] == [""] * len(swarm.nodes)


@virtual_time
async def test_a_tail_refuses_a_bad_grammar_by_itself_and_serves_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwarmClient, "_answer_grammar", lambda self, grammar: None)  # a client that checks nothing
    tokenizer, made = ascii_tokenizer(), tiny_model("llama")
    prompt_ids = list(range(5, 15))
    async with memory_swarm(ModelTensors(made), cut(6, 3), LinkModel(delay_s=0.01), tokenizer=tokenizer) as swarm:
        async with swarm.client(tokenizer=tokenizer) as good_client:
            good = asyncio.create_task(good_client.generate(prompt_ids, max_new_tokens=40, ignore_eos=True))
            for number, grammar in enumerate(BAD, 1):  # a client avoids a node that has refused it
                async with swarm.client(number, tokenizer=tokenizer) as client:
                    with pytest.raises(RemoteError) as refused:
                        await client.generate(prompt_ids, max_new_tokens=20, grammar=grammar, decoding="sequential")
                assert refused.value.remote_code == "invalid_request"
            answer = await good
        assert len(answer.token_ids) == 40
        assert answer.repairs == ()
        await asyncio.sleep(1)
        assert [node.leaks() for node in swarm.nodes.values()] == [""] * len(swarm.nodes)


@pytest.mark.real_model
@pytest.mark.parametrize("options", ["greedy", "seeded"])
def test_smollm2_within_a_schema_gives_the_tokens_of_a_plain_loop(real_model: ModelSource, options: str) -> None:
    tokenizer = load_tokenizer(real_model)
    prompt_ids = tokenizer.apply_chat_template([{"role": "user", "content": "Invent a person. Answer in JSON."}])
    model, keywords = transformers_model(real_model), KEYWORDS[options]
    truth = plain_loop(model, tokenizer, prompt_ids, replace(Sampling(grammar=GRAMMARS["schema"]), **keywords))
    jsonschema.validate(json.loads(tokenizer.decode(truth)), SCHEMA)

    @virtual_time
    async def check() -> None:
        async with (
            memory_swarm(real_model, cut(30, 7, 22), LinkModel(delay_s=0.02), tokenizer=tokenizer) as swarm,
            swarm.client(tokenizer=tokenizer, drafter="ngram") as client,
        ):
            for strategy in ("tree", "auto"):
                answer = await client.generate(
                    prompt_ids, max_new_tokens=MOST, decoding=strategy, grammar=GRAMMARS["schema"], **keywords
                )
                assert list(answer.token_ids) == truth

    check()


def transformers_model(source: ModelSource) -> Any:
    hf = dict(source.config.hf)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(hf.pop("model_type"), **hf), dtype=torch.float32)
    state = {name: source.tensor(name).float() for name in model.state_dict() if source.has(name)}
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model.eval()
