"""Log-probabilities through a whole swarm against transformers': of the answer by every strategy, of the prompt, and
across a crash. Also the options that only the client acts on: `ignore_eos`, `stop`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from memory_swarm import cut, memory_swarm
from scripted_drafters import Oracle
from tiny_models import ModelTensors, hf_greedy, hf_logits, tiny_model
from virtual_clock import virtual_time

from swarm.block_hash import HASH_BLOCK_TOKENS
from swarm.errors import InvalidRequest
from swarm.planner.generation.state_machine import FinishReason
from swarm.testing.memory_network import LinkModel
from swarm.types import TokenLogprobs
from swarm_client.speculation.drafters.inline import InlineDrafter

TOKENS = 14
MADE = tiny_model("llama")
PROMPT = [random.Random(11).randrange(2, 131) for _ in range(2 * HASH_BLOCK_TOKENS + 9)]
LINK = LinkModel(delay_s=0.01)
SAMPLED: dict[str, Any] = {
    "temperature": 0.8,
    "seed": 4,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "logit_bias": {7: 4.0, 9: -5.0},
}


@pytest.fixture(scope="module")
def source() -> ModelTensors:
    return ModelTensors(MADE)


def assert_logprobs(logprobs: Sequence[TokenLogprobs], text: Sequence[int], start: int, top: int) -> None:
    """Those of the tokens of `text` from position `start` on."""
    reference = torch.log_softmax(hf_logits(MADE, text).double(), -1)[start - 1 : len(text) - 1]
    assert [entry.token for entry in logprobs] == list(text[start:])
    for entry, row in zip(logprobs, reference, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token].item(), abs=1e-4)
        values, ids = row.topk(top)
        assert [token for token, _ in entry.top] == ids.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("strategy", ["sequential", "tree", "pipedec", "pipelined-tree", "auto"])
@virtual_time
async def test_every_token_has_the_model_s_own(source: ModelTensors, strategy: str, options: dict[str, Any]) -> None:
    chunks, top = [], 3
    async with memory_swarm(source, cut(6, 1, 4), LINK) as swarm:
        async with swarm.client() as plain:
            truth = await plain.generate(PROMPT, max_new_tokens=TOKENS, decoding="sequential", **options)
        assert (truth.logprobs, truth.prompt_logprobs) == ((), ())
        drafted = list(truth.token_ids)
        async with swarm.client(1, make_drafter=lambda: InlineDrafter(Oracle(drafted, 0.8))) as client:
            stream = client.stream(PROMPT, max_new_tokens=TOKENS, decoding=strategy, logprobs=top, **options)
            async for chunk in stream:
                chunks.append(chunk)
    answer = stream.result
    assert answer.token_ids == truth.token_ids
    assert_logprobs(answer.logprobs, [*PROMPT, *answer.token_ids], len(PROMPT), top)
    for chunk in chunks:
        assert tuple(entry.token for entry in chunk.logprobs) == chunk.token_ids
    assert answer.to_json()["logprobs"][2]["token"] == answer.token_ids[2]
    assert len(answer.to_json()["logprobs"][2]["top"]) == top
    assert "prompt_logprobs" not in answer.to_json()


@pytest.mark.parametrize("chunk", [1, 7, None])
@virtual_time
async def test_the_prompt_s_are_whole_whatever_is_cached(source: ModelTensors, chunk: int | None) -> None:
    async with memory_swarm(source, cut(6, 3), LINK) as swarm, swarm.client(prefill_chunk=chunk) as client:
        for cached in (0, 2 * HASH_BLOCK_TOKENS):
            plain = await client.generate(PROMPT, max_new_tokens=2)
            assert plain.cached_prompt_tokens == cached  # and yet the next one has all log-probabilities
            answer = await client.generate(PROMPT, max_new_tokens=2, prompt_logprobs=2)
            assert answer.cached_prompt_tokens == 0
            assert answer.token_ids == plain.token_ids
            assert_logprobs(answer.prompt_logprobs, PROMPT, 1, 2)
            assert answer.logprobs == ()
        assert len(answer.to_json()["prompt_logprobs"]) == len(PROMPT) - 1
        one = await client.generate(PROMPT[:1], max_new_tokens=1, prompt_logprobs=0, logprobs=0)
        assert (one.prompt_logprobs, len(one.logprobs), one.logprobs[0].top) == ((), 1, ())


@pytest.mark.parametrize("lost", [0, 1], ids=["first", "tail"])
@pytest.mark.parametrize("after_s", [0.1, 0.16, 0.3], ids=["opening", "prefill", "decoding"])
@virtual_time
async def test_a_crash_costs_none(source: ModelTensors, lost: int, after_s: float) -> None:
    truth = hf_greedy(MADE, PROMPT, 40)
    options: dict[str, Any] = {"max_new_tokens": 40, "logprobs": 1, "prompt_logprobs": 1, "decoding": "sequential"}
    async with (
        memory_swarm(source, [*cut(6, 3), *cut(6, 3)], LINK) as swarm,
        swarm.client(prefill_chunk=4) as client,
    ):
        stream = client.stream(PROMPT, **options)
        reading = asyncio.create_task(stream.read())
        await asyncio.sleep(after_s)
        peers = stream.chain.peers if stream.chain is not None else tuple(swarm.peers)
        swarm.kill(peers[lost])
        answer = await reading
    assert answer.repairs or after_s < 0.15
    assert list(answer.token_ids) == truth
    assert_logprobs(answer.prompt_logprobs, PROMPT, 1, 1)
    assert_logprobs(answer.logprobs, [*PROMPT, *truth], len(PROMPT), 1)


@pytest.mark.parametrize("decoding", ["sequential", "auto"])
@virtual_time
async def test_ignore_eos_goes_on_to_the_end(source: ModelTensors, decoding: str) -> None:
    truth = hf_greedy(MADE, PROMPT, TOKENS)
    eos = truth[4]
    async with memory_swarm(source, cut(6, 3)) as swarm, swarm.client(eos=[eos]) as client:
        short = await client.generate(PROMPT, max_new_tokens=TOKENS, decoding=decoding)
        assert (list(short.token_ids), short.finish_reason) == (truth[: truth.index(eos) + 1], FinishReason.EOS)
        long = await client.generate(PROMPT, max_new_tokens=TOKENS, decoding=decoding, ignore_eos=True)
        assert (list(long.token_ids), long.finish_reason) == (truth, FinishReason.LENGTH)
        assert long.text.split() == [str(token) for token in truth if token != eos]
        shown = await client.generate(
            PROMPT, max_new_tokens=TOKENS, decoding=decoding, ignore_eos=True, skip_special_tokens=False
        )
        assert shown.text.split() == [str(token) for token in truth]


@virtual_time
async def test_the_stop_string_that_ended_it(source: ModelTensors) -> None:
    truth = hf_greedy(MADE, PROMPT, TOKENS)
    async with memory_swarm(source, cut(6, 3)) as swarm, swarm.client() as client:
        stop = f"{truth[5]} "
        answer = await client.generate(PROMPT, max_new_tokens=TOKENS, stop=["no such text", stop])
        assert (answer.finish_reason, answer.stop_string) == (FinishReason.STOP, stop)
        assert answer.to_json()["stop_string"] == stop
        free = await client.generate(PROMPT, max_new_tokens=3, stop="no such text")
        assert free.stop_string is None
        assert "stop_string" not in free.to_json()


@virtual_time
async def test_a_bias_beyond_the_vocabulary_is_refused_and_a_bias_works(source: ModelTensors) -> None:
    async with memory_swarm(source, cut(6, 3)) as swarm, swarm.client() as client:
        with pytest.raises(InvalidRequest, match="logit_bias has token 131; the model's vocabulary has 131"):
            client.stream(PROMPT, logit_bias={130: 1.0, 131: 1.0})
        answer = await client.generate(PROMPT, max_new_tokens=3, logit_bias={130: 1e4})
        assert answer.token_ids == (130, 130, 130)


@virtual_time
async def test_an_outline_chosen_by_config_gives_way(source: ModelTensors) -> None:
    chat = [{"role": "user", "content": "5 6 7"}]
    async with memory_swarm(source, cut(6, 3)) as swarm, swarm.client(decoding="outline") as client:
        answer = await client.chat(chat, max_new_tokens=2, logprobs=0)
        assert (len(answer.logprobs), answer.outline) == (2, None)
        assert (await client.chat(chat, max_new_tokens=2)).outline is not None
        with pytest.raises(InvalidRequest, match="choose another decoding"):
            client.chat_stream(chat, logprobs=0, decoding="outline")
