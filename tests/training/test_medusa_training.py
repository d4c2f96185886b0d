"""Training Medusa heads on a tiny model: what is trained is what a tail runs, and errors are one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chat_cases import VOCAB, chat_of, counting
from tiny_models import ModelTensors, tiny_model

from swarm.errors import CorruptModel, DrafterFailed, Infeasible, ModelNotFound, UnsupportedModel
from swarm.types import LayerSpan
from swarm_kernels.draft.card import read_card
from swarm_kernels.draft.file import DraftWeights
from swarm_kernels.draft.medusa import MedusaHeads
from swarm_kernels.draft.models import TrainedDraft
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.runtime.load import load_span
from swarm_training.distill import features
from swarm_training.distill.corpus import ANSWER, GIVEN, Corpus
from swarm_training.distill.features import Features, TeacherTopK, TrainingExample
from swarm_training.distill.recipes import HeadsRecipe, LayersRecipe
from swarm_training.distill.run import TrainingPlan, train
from swarm_training.distill.student import HeadsStudent, LayersStudent
from swarm_training.distill.training import Trainer, frequent_tokens
from swarm_training.distill.validation import measure

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
LAYERS, HEADS = 6, 3
CHATS = [counting(start, step) for start in range(0, 100, 5) for step in (1, 2)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Several only wait for each other in sums as small as these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def source() -> ModelTensors:
    return ModelTensors(tiny_model("llama", tie_word_embeddings=True))


@pytest.fixture(scope="module")
def examples(source: ModelTensors) -> list[TrainingExample]:
    return [TrainingExample(*pair) for pair in zip(CHATS, Features(source, LAYERS, CPU).of(CHATS), strict=True)]


def saved(student: HeadsStudent | LayersStudent, source: ModelTensors, path: Path, **changes: Any) -> Path:
    card = replace(student.metadata(source.name, source.weight_hash), **changes)
    DraftWeights(card, student.weights(), torch.arange(0, VOCAB, 2)).save(path)
    return path


def test_trained_heads_match_the_tail(source: ModelTensors, tmp_path: Path) -> None:
    """The student on the states it is shown, and the file beside the head of the last layers, agree."""
    torch.manual_seed(0)
    student = HeadsStudent(source.config, HEADS)
    for weight in student.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    text = [7, 3, 99, 42, 130, 8, 8, 15]
    (states,) = Features(source, LAYERS, CPU).of([chat_of(text)])
    with torch.no_grad():
        hidden = student(states.float()[None])[:, 0]  # [heads, n, hidden]
    expected = F.linear(hidden, source.tensor("model.embed_tokens.weight").float()[::2]).log_softmax(-1)
    span: Any = load_span(source, LayerSpan(2, LAYERS), torch.float32)
    first: Any = load_span(source, LayerSpan(0, 2), torch.float32)
    rows = [StepRequest(b"a", 0, len(text))]
    found = first.embed(text)
    for part in (first, span):
        cache = part.new_cache(64)
        cache.open(b"a", 64)
        found = part.forward(found, cache.schedule(rows), cache)
    heads = MedusaHeads.of(saved(student, source, tmp_path / "h"), span, source)
    ids, logprobs = heads.propose(span.final_hidden(found), 4)
    assert (len(heads), tuple(ids.shape)) == (HEADS, (HEADS, len(text), 4))
    assert not (ids % 2).any()
    torch.testing.assert_close(logprobs, expected.gather(2, ids // 2), atol=0.1, rtol=0.05)  # both in 8 bits


def test_heads_train_and_resume_from_a_checkpoint(
    source: ModelTensors, examples: list[TrainingExample], tmp_path: Path
) -> None:
    vocabulary = frequent_tokens(CHATS, 110, VOCAB)

    def trainer(heads: int = HEADS) -> Trainer:
        made = Trainer(source, HeadsStudent(source.config, heads), vocabulary, CPU)
        made.add(examples)
        return made

    first = trainer()
    first.init_logit_scale()
    before = measure(first.averaged(), source, vocabulary, examples[:8])
    losses = [first.learn(1.0) for _ in range(100)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    after = measure(first.averaged(), source, vocabulary, examples[:8])
    assert len(after.hits) == HEADS
    assert all(late[-1] > early[-1] + 0.1 for late, early in zip(after.hits, before.hits, strict=True))
    first.save(tmp_path / "c")
    second = trainer()
    second.resume(tmp_path / "c")
    assert (second.steps, second.seen) == (first.steps, first.seen)
    for a, b in zip(first.averaged().parameters(), second.averaged().parameters(), strict=True):
        assert torch.equal(a, b)
    assert second.learn(1.0) < losses[0]
    for other in (HEADS - 1, HEADS + 1):
        with pytest.raises(CorruptModel, match="give another --work"):
            trainer(other).resume(tmp_path / "c")


def test_targets_are_within_one_answer() -> None:
    """Position i predicts the token `ahead` positions on, and all from the next one on must be of one answer."""
    chat = chat_of(list(range(9)))
    chat.origin[:] = torch.tensor([GIVEN, GIVEN, ANSWER, ANSWER, ANSWER, GIVEN, GIVEN, ANSWER, ANSWER])
    examples = [TrainingExample(chat, torch.zeros(9, 4)), TrainingExample(chat_of([1, 2]), torch.zeros(2, 4))]
    for ahead, positions in ((1, [1, 2, 3, 6, 7]), (2, [1, 2, 6]), (3, [1]), (4, []), (12, [])):
        targets = TeacherTopK.of(examples, ahead, CPU)
        assert targets.mask.nonzero().tolist() == [[0, position] for position in positions]
        assert targets.ids[:, 0].tolist() == [position + ahead for position in positions]


def test_states_are_cached_and_damaged_ones_recomputed(
    source: ModelTensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = Corpus(tmp_path, source.weight_hash)
    corpus.append(CHATS[:3])
    corpus.append(CHATS[3:5])
    made = Features(source, LAYERS, CPU).examples(corpus)
    for example, states in zip(made, Features(source, LAYERS, CPU).of(CHATS[:5]), strict=True):
        assert torch.equal(example.states, states)
    damaged = tmp_path / "states-06-00001.safetensors"
    damaged.unlink()  # `made` still reads what was there
    damaged.write_bytes(b"\0" * 20)
    again = Features(source, LAYERS, CPU).examples(corpus)
    monkeypatch.delattr(features, "load_teacher")  # nothing is left to be run
    for examples in (again, Features(source, LAYERS, CPU).examples(corpus)):
        assert all(torch.equal(a.states, b.states) for a, b in zip(made, examples, strict=True))


class Clock:
    """A second passes each time it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_drafts_and_heads_learn_from_the_same_chats(source: ModelTensors, tmp_path: Path) -> None:
    Corpus(tmp_path / "work", source.weight_hash).append(CHATS + CHATS)
    plan = TrainingPlan(
        0.7, tmp_path / "h", tmp_path / "work", HeadsRecipe(2), tokens=1000, vocabulary=100, save_every_s=10.0
    )
    with pytest.raises(Infeasible, match="goes on where it stopped"):
        train(source, replace(plan, minutes=0.01), lambda *_: None, Clock())
    assert not plan.out.exists()
    assert (tmp_path / "work" / "states-06-00000.safetensors").is_file()
    card = train(source, plan, lambda *_: None, Clock())
    assert (card.base, card.layers, card.heads) == (LAYERS, 0, 2)
    assert len(card.evaluation["top_1_4_8_by_level"]) == 2
    assert read_card(plan.out) == card
    draft = train(source, replace(plan, out=tmp_path / "d", recipe=LayersRecipe()), lambda *_: None, Clock())
    assert (draft.base, draft.layers, draft.heads) == (0, 1, 0)
    later = train(source, plan, lambda *_: None, Clock())
    assert later.seen_tokens > card.seen_tokens
    with pytest.raises(CorruptModel, match="give another --work"):
        train(source, replace(plan, recipe=HeadsRecipe(3)), lambda *_: None, Clock())


def test_heads_that_cannot_be_used_are_one_sentence(source: ModelTensors, tmp_path: Path) -> None:
    span = load_span(source, LayerSpan(4, LAYERS), torch.float32)

    def refused(error: type[Exception], path: Path) -> str:
        with pytest.raises(error) as caught:
            MedusaHeads.of(path, span, source)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    heads, layers = HeadsStudent(source.config, 2), LayersStudent.of_target(source, 0, (0,))
    foreign = saved(heads, source, tmp_path / "foreign", weight_hash="f" * 32, model="other")
    assert "were trained for other, not for tiny; train some for it" in refused(UnsupportedModel, foreign)
    draft = saved(layers, source, tmp_path / "tiny.draft")
    assert "is a draft and holds no heads" in refused(UnsupportedModel, draft)
    wide = HeadsStudent(replace(source.config, hidden_size=source.config.hidden_size + 1), 2)
    assert "these heads are for another model" in refused(CorruptModel, saved(wide, source, tmp_path / "wide"))
    card = heads.metadata(source.name, source.weight_hash)
    DraftWeights(card, heads.weights(), torch.tensor([3, VOCAB])).save(tmp_path / "rich")
    assert "predicts tokens that the model does not have" in refused(CorruptModel, tmp_path / "rich")
    assert "swarm-draft train --kind heads" in refused(ModelNotFound, tmp_path / "none")
    with pytest.raises(DrafterFailed, match="which a node runs"):
        TrainedDraft(DraftWeights.load(saved(heads, source, tmp_path / "h")), source)
    first = load_span(source, LayerSpan(0, 2), torch.float32)
    with pytest.raises(UnsupportedModel, match="last layers"):
        MedusaHeads.of(tmp_path / "h", first, source)
