"""Heads that were trained here, from the trainer to the client: they are served, judged, and change no text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from chat_cases import chat_of
from memory_swarm import cut, memory_swarm
from tiny_models import ModelTensors, hf_greedy, tiny_model
from virtual_clock import run

from swarm.testing.memory_network import LinkModel
from swarm_kernels.draft.file import DraftWeights
from swarm_training.distill.corpus import ANSWER, GIVEN
from swarm_training.distill.features import Features, TrainingExample
from swarm_training.distill.student import HeadsStudent
from swarm_training.distill.training import Trainer
from swarm_training.evaluation.evaluate import Recorded, hits_by_depth
from swarm_training.evaluation.recorded_medusa import RecordedMedusa, run_heads

LAYERS, HEADS, TOKENS = 6, 3, 24
PROMPT = [3 + 7 * i % 120 for i in range(17)]


@dataclass(frozen=True, slots=True)
class ByHeart:
    """Heads that have learnt one answer of their model."""

    source: ModelTensors
    answer: list[int]
    heads: Path


@pytest.fixture(scope="module")
def by_heart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ByHeart]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several only wait for each other in sums as small as these
    made = tiny_model("llama")
    source, answer = ModelTensors(made), hf_greedy(made, PROMPT, TOKENS)
    chat = chat_of([*PROMPT, *answer])
    chat.origin[:] = torch.tensor([GIVEN] * len(PROMPT) + [ANSWER] * TOKENS)
    (states,) = Features(source, LAYERS, torch.device("cpu")).of([chat])
    student = HeadsStudent(source.config, HEADS)
    trainer = Trainer(source, student, torch.arange(1, 131), torch.device("cpu"))
    trainer.add([TrainingExample(chat, states)] * 2)
    for _ in range(120):
        trainer.learn(1.0)
    path = tmp_path_factory.mktemp("heads") / "tiny.heads"
    card = student.metadata(source.name, source.weight_hash)
    DraftWeights(card, trainer.averaged().weights(), trainer.vocabulary).save(path)
    yield ByHeart(source, answer, path)
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("borders", [(), (2, 4)], ids=["one hop", "three"])
def test_they_bring_several_tokens_a_step_and_the_same_text(borders: tuple[int, ...], by_heart: ByHeart) -> None:
    async def scenario() -> None:
        async with (
            memory_swarm(
                by_heart.source, cut(LAYERS, *borders), LinkModel(delay_s=0.02), heads=by_heart.heads
            ) as swarm,
            swarm.client(drafter="medusa") as client,
        ):
            answer = await client.generate(PROMPT, max_new_tokens=TOKENS, decoding="tree")
            assert list(answer.token_ids) == by_heart.answer
            assert answer.speculation is not None
            assert answer.speculation["tokens_per_step"] > 1.5
            strange = [
                await client.generate(PROMPT[:9], max_new_tokens=TOKENS, decoding=s) for s in ("tree", "sequential")
            ]
            assert strange[0].token_ids == strange[1].token_ids

    run(scenario())


def test_they_are_judged_as_a_client_hears_them(by_heart: ByHeart) -> None:
    """What came with a token is for the places after it; with the prompt comes nothing."""
    told = run_heads(by_heart.source, by_heart.heads, [(PROMPT, by_heart.answer)], 8)
    assert len(told[tuple(PROMPT)]) == TOKENS
    drafter = RecordedMedusa(told)
    hits = hits_by_depth(drafter, [Recorded(PROMPT, by_heart.answer)], HEADS + 1)
    assert all(row[2] > 0.8 for row in hits[:HEADS])
    assert hits[HEADS] == [0.0] * 3
    drafter.reset(PROMPT)
    assert drafter.propose((), 4) == []
    drafter.extend(by_heart.answer[:5])
    assert [token for token, _ in drafter.propose((), 4)] == [token for token, _ in told[tuple(PROMPT)][4][0][:4]]
    drafter.reset([1, 2, 3])
    drafter.extend([4])
    assert drafter.propose((), 4) == []
