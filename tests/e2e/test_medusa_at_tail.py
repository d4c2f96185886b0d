"""Medusa heads on the tail: their candidates arrive with the tokens, at the right positions, and change no text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from memory_swarm import cut, memory_swarm
from safetensors.torch import save_file
from tiny_models import ModelTensors, hf_greedy, tiny_model
from virtual_clock import run

from swarm.messages import StepResult
from swarm.planner.generation.state_machine import (
    ChainReady,
    EmitTokens,
    GenerationRequest,
    GenerationState,
    SendStep,
    StepDone,
)
from swarm.testing.memory_network import LinkModel
from swarm.types import LayerSpan
from swarm_client.speculation.drafters.medusa import MedusaDrafter, medusa_candidates
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.runtime.load import load_span

TOKENS, HEADS = 24, 3
PROMPT = [3 + 7 * i % 120 for i in range(17)]


def states(source: Any, tokens: Sequence[int]) -> torch.Tensor:
    """`[n, hidden]`, as the target's head sees them."""
    span: Any = load_span(source, LayerSpan(0, 6), torch.float32)
    cache = span.new_cache(64)
    cache.open(b"a", 64)
    metadata = cache.schedule([StepRequest(b"a", 0, len(tokens))])
    return span.final_hidden(span.forward(span.embed(tokens), metadata, cache))


def heads_for(answer: Sequence[int], source: Any, folder: Path) -> Path:
    """Heads overfitted to this one answer: linear maps from its states to the tokens 2, 3, 4 positions after."""
    text = [*PROMPT, *answer]
    rows = states(source, text)
    tensors = {}
    for head in range(HEADS):
        first, last = len(PROMPT) - 1, len(text) - 2 - head
        wanted = F.one_hot(torch.tensor(text[first + 2 + head :]), 131).float()
        tensors[f"{head}.0.weight"] = (40 * torch.linalg.pinv(rows[first:last]) @ wanted).T.contiguous()
    save_file(tensors, folder / "heads.safetensors")
    return folder / "heads.safetensors"


def test_auto_asks_for_heads_where_nothing_else_is_at_hand_and_says_so(tmp_path: Path) -> None:
    made = tiny_model("llama")
    source, truth = ModelTensors(made), hf_greedy(made, PROMPT, TOKENS)

    async def scenario() -> None:
        heads = heads_for(truth, source, tmp_path)
        async with (
            memory_swarm(source, cut(6, 3), LinkModel(delay_s=0.02), heads=heads) as swarm,
            swarm.client(drafter="auto") as client,
        ):
            answer = await client.generate(PROMPT, max_new_tokens=TOKENS, decoding="tree")
        assert list(answer.token_ids) == truth
        assert answer.speculation is not None
        assert answer.speculation["hits"] > TOKENS // 3
        choice = "drafting with n-grams and the last node's Medusa heads, because nothing else is at hand"
        assert answer.speculation["choice"].startswith(choice)
        assert answer.explanation.endswith("; " + answer.speculation["choice"])

    run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["tree", "pipedec", "pipelined-tree", "auto", "sequential"])
@pytest.mark.parametrize("borders", [(), (2, 4)], ids=["one hop", "three"])
def test_accurate_heads_give_several_tokens_per_round_trip(
    strategy: str, borders: tuple[int, ...], tmp_path: Path
) -> None:
    made = tiny_model("llama")
    source, truth = ModelTensors(made), hf_greedy(made, PROMPT, TOKENS)

    async def scenario() -> None:
        heads = heads_for(truth, source, tmp_path)
        async with (
            memory_swarm(source, cut(6, *borders), LinkModel(delay_s=0.02), heads=heads) as swarm,
            swarm.client(drafter="medusa") as client,
        ):
            answer = await client.generate(PROMPT, max_new_tokens=TOKENS, decoding=strategy)
            assert list(answer.token_ids) == truth
            assert "drafting with" not in answer.explanation  # that was the user's choice
            if strategy in ("tree", "pipelined-tree", "auto"):
                plain = 1 / (0.02 * (len(borders) + 2))  # tokens/s, by the links alone
                assert answer.tokens_per_second > 2.0 * plain
            if strategy == "tree":  # the pipelined tree has several steps per round trip
                assert answer.speculation is not None
                assert answer.speculation["tokens_per_step"] > 2.0
            other = await client.generate(PROMPT[:9], max_new_tokens=TOKENS, decoding=strategy)
            assert list(other.token_ids) == hf_greedy(made, PROMPT[:9], TOKENS)

    run(scenario())


def test_a_tail_without_heads_sends_no_candidates() -> None:
    made = tiny_model("llama")
    source, truth = ModelTensors(made), hf_greedy(made, PROMPT, TOKENS)

    async def scenario() -> None:
        async with (
            memory_swarm(source, cut(6, 3), LinkModel(delay_s=0.02)) as swarm,
            swarm.client(drafter="medusa") as client,
        ):
            answer = await client.generate(PROMPT, max_new_tokens=TOKENS, decoding="tree")
            assert list(answer.token_ids) == truth

    run(scenario())


def test_inconsistent_medusa_candidates_are_ignored() -> None:
    good = StepResult(
        bytes(16),
        0,
        0,
        [5, 6],
        num_medusa_heads=2,
        medusa_ids=[1, 2, 3, 4, 5, 6, 7, 8],
        medusa_neg_logprob_centinats=[0, 50] * 4,
    )
    assert medusa_candidates(good) == (
        (((1, -0.0), (2, -0.5)), ((3, -0.0), (4, -0.5))),
        (((5, -0.0), (6, -0.5)), ((7, -0.0), (8, -0.5))),
    )
    for wrong in (
        StepResult(
            bytes(16), 0, 0, [5, 6], num_medusa_heads=3, medusa_ids=[1, 2, 3, 4], medusa_neg_logprob_centinats=[0] * 4
        ),
        StepResult(bytes(16), 0, 0, [5, 6], num_medusa_heads=1, medusa_ids=[1, 2], medusa_neg_logprob_centinats=[0]),
        StepResult(bytes(16), 0, 0, [], num_medusa_heads=1, medusa_ids=[1, 2], medusa_neg_logprob_centinats=[0, 0]),
        StepResult(bytes(16), 0, 0, [5, 6], num_medusa_heads=0, medusa_ids=[1, 2], medusa_neg_logprob_centinats=[0, 0]),
    ):
        assert medusa_candidates(wrong) == ()


def test_a_head_predicts_a_position_whatever_was_sampled_before() -> None:
    drafter = MedusaDrafter()
    drafter.reset([1, 2])
    drafter.extend([3])
    drafter.set_medusa_candidates((((10, -0.1), (11, -2.0)), ((20, -0.2),)))
    assert [[token for token, _ in found] for found in drafter.propose_many([(), (10,), (99,), (10, 20)], 2)] == [
        [10, 11],
        [20],
        [20],
        [],
    ]
    drafter.extend([10])
    assert [token for token, _ in drafter.propose((), 4)] == [20]
    drafter.extend([20, 30])
    assert drafter.propose((), 4) == []


def test_tokens_outside_the_vocabulary_are_rejected() -> None:
    plan = GenerationRequest((1, 2), 8, vocab_size=50)
    generation = GenerationState(plan)
    (step,) = generation.handle(ChainReady())
    assert isinstance(step, SendStep)
    candidates = ((((7, -0.1), (50, -0.2)),),)
    actions = generation.handle(StepDone(0, step.step, (4,), medusa_candidates=candidates))
    assert isinstance(actions[0], EmitTokens)
    assert actions[0].medusa_candidates == ()
    assert isinstance(actions[1], SendStep)
    with pytest.raises(Exception, match="the tail sampled token 50"):
        generation.handle(StepDone(0, actions[1].step, (50,)))
