"""The built-in model, fp32: five chat prompts, 64 tokens each, against transformers with the same tensors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from memory_swarm import cut, memory_swarm
from tiny_models import transformers_model
from virtual_clock import virtual_time

from swarm_kernels.models.open import ModelSource
from swarm_kernels.tokenizer.tokenizer import ChatTokenizer, load_tokenizer

PROMPTS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain in two sentences why the sky is blue.",
    "List five fruits, one a line.",
    "def fibonacci(n):\n    # continue this function\n",
)
TOKENS = 64


def transformers_greedy(source: ModelSource, prompts: list[list[int]], eos: int) -> list[list[int]]:
    model, answers = transformers_model(source), []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, pad_token_id=eos
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


@dataclass(frozen=True)
class Expected:
    tokenizer: ChatTokenizer
    prompts: list[list[int]]
    answers: list[list[int]]


@pytest.fixture(scope="module")
def expected(real_model: ModelSource) -> Iterator[Expected]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # idle threads of torch would only be in the way of the kernels' own
    tokenizer = load_tokenizer(real_model)
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in PROMPTS]
    yield Expected(tokenizer, prompts, transformers_greedy(real_model, prompts, tokenizer.eos_token_ids[0]))
    torch.set_num_threads(before)


@pytest.mark.real_model
@pytest.mark.parametrize("borders", [(7, 22), (3, 4, 15, 28)], ids=["three uneven hops", "five"])
def test_greedy_tokens_of_a_swarm_are_those_of_transformers(
    real_model: ModelSource, expected: Expected, borders: tuple[int, ...]
) -> None:
    @virtual_time
    async def check() -> None:
        async with (
            memory_swarm(real_model, cut(30, *borders)) as swarm,
            swarm.client(eos=expected.tokenizer.eos_token_ids) as client,
        ):
            answers = await asyncio.gather(*(client.generate(p, max_new_tokens=TOKENS) for p in expected.prompts))
        assert [list(a.token_ids) for a in answers] == expected.answers

    check()
