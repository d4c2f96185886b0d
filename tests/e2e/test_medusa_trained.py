"""Heads that were trained here, from the trainer to the client: they are served, evaluated, and change no text."""

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
class Overfitted:
    """Heads overfitted to one answer of their model."""

    source: ModelTensors
    answer: list[int]
    heads: Path


@pytest.fixture(scope="module")
def overfitted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Overfitted]:
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
    yield Overfitted(source, answer, path)
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("borders", [(), (2, 4)], ids=["one hop", "three"])
def test_they_give_several_tokens_per_step_and_the_same_text(borders: tuple[int, ...], overfitted: Overfitted) -> None:
    async def scenario() -> None:
        async with (
            memory_swarm(
                overfitted.source, cut(LAYERS, *borders), LinkModel(delay_s=0.02), heads=overfitted.heads
            ) as swarm,
            swarm.client(drafter="medusa") as client,
        ):
            answer = await client.generate(PROMPT, max_new_tokens=TOKENS, decoding="tree")
            assert list(answer.token_ids) == overfitted.answer
            assert answer.speculation is not None
            assert answer.speculation["tokens_per_step"] > 1.5
            other_prompt = [
                await client.generate(PROMPT[:9], max_new_tokens=TOKENS, decoding=s) for s in ("tree", "sequential")
            ]
            assert other_prompt[0].token_ids == other_prompt[1].token_ids

    run(scenario())


def test_they_are_evaluated_on_what_a_client_receives(overfitted: Overfitted) -> None:
    """Candidates received with a token are for the positions after it; none come with the prompt."""
    recorded = run_heads(overfitted.source, overfitted.heads, [(PROMPT, overfitted.answer)], 8)
    assert len(recorded[tuple(PROMPT)]) == TOKENS
    drafter = RecordedMedusa(recorded)
    hits = hits_by_depth(drafter, [Recorded(PROMPT, overfitted.answer)], HEADS + 1)
    assert all(row[2] > 0.8 for row in hits[:HEADS])
    assert hits[HEADS] == [0.0] * 3
    drafter.reset(PROMPT)
    assert drafter.propose((), 4) == []
    drafter.extend(overfitted.answer[:5])
    assert [token for token, _ in drafter.propose((), 4)] == [token for token, _ in recorded[tuple(PROMPT)][4][0][:4]]
    drafter.reset([1, 2, 3])
    drafter.extend([4])
    assert drafter.propose((), 4) == []
