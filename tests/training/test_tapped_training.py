"""Training a draft that reads hidden states: its twin with gradients, what it starts from, and its file."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from chat_cases import VOCAB, chat_of, counting
from tiny_models import ModelTensors, tiny_model

from swarm.errors import CorruptModel, DrafterFailed, UsageError
from swarm.types import LayerSpan
from swarm_kernels.draft.eagle_session import EagleSession
from swarm_kernels.draft.file import DraftWeights, read_card
from swarm_kernels.draft.models import TrainedDraft
from swarm_kernels.draft.tapped_draft import FUSE, TAP_SCALE, TappedTrainedDraft
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.runtime.load import load_span
from swarm_training.distill.corpus import Corpus, RecordedChat
from swarm_training.distill.features import TrainingExample
from swarm_training.distill.policy import OptimizerPolicy
from swarm_training.distill.recipes import TappedRecipe
from swarm_training.distill.run import TrainingPlan
from swarm_training.distill.tap_rows import tapped_examples, tapped_forward
from swarm_training.distill.tapped_student import TappedStudent
from swarm_training.distill.training import SoftCrossEntropy, Trainer
from swarm_training.distill.validation import measure

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
LAYERS = 6
TAPS = (2, 4, LAYERS)
EXACT = replace(OptimizerPolicy(), mixed_precision=False)


def target() -> ModelTensors:
    return ModelTensors(tiny_model("llama", tie_word_embeddings=True, num_hidden_layers=LAYERS))


def tapped(source: ModelTensors, tokens: list[int]) -> RecordedChat:
    """A chat with its states, in one run of the model."""
    span = load_span(source, LayerSpan(0, LAYERS), torch.float32)
    cache = span.new_cache(len(tokens) + 16)
    cache.open(b"x", len(tokens))
    plan = cache.schedule([StepRequest(b"x", 0, len(tokens))])
    rows = tapped_forward(span, span.embed(tokens), plan, cache, TAPS)[1]
    return replace(chat_of(tokens), taps=rows)


def student_of(source: ModelTensors, levels: int = 3) -> TappedStudent:
    """With weights that all matter."""
    student = TappedStudent(source, TAPS, (1, LAYERS - 1), levels)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in (student.fuse, student.projection):
            weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5)
        student.tap_scale.copy_(torch.rand(student.tap_scale.shape, generator=generator) + 0.5)
    return student


def draft_of(source: ModelTensors, student: TappedStudent, texts: torch.Tensor | None = None) -> DraftWeights:
    card = student.metadata("tiny", source.weight_hash)
    none = torch.empty(0, dtype=torch.int32)
    return DraftWeights(card, student.weights(), torch.arange(VOCAB), none if texts is None else texts)


def test_each_level_of_the_student_is_what_the_kernels_draft_that_deep() -> None:
    """The training-time test, against a session that caches keys and values and computes a tree."""
    source = target()
    rng = random.Random(3)
    text = [rng.randrange(VOCAB) for _ in range(20)]
    chat, student = tapped(source, text), student_of(source)
    with torch.no_grad():
        levels = student(*student.inputs([TrainingExample(chat, torch.empty(0))], CPU))[:, 0]
    logits = levels @ source.tensor("model.embed_tokens.weight").float().T
    size = chat.taps.shape[1] // len(TAPS)
    rows = {
        at: tuple(bytes(row[i * size : (i + 1) * size].tolist()) for i in range(len(TAPS)))
        for at, row in enumerate(chat.taps)
    }
    session = EagleSession(TappedTrainedDraft(draft_of(source, student), source, torch.float32))
    for known in (4, 11):  # tokens of the text; the row of the last but one is the last that has come
        session.reset(text[:known])
        session.add({at: rows[at] for at in range(known - 1)})
        for level in range(3):
            path = tuple(text[known : known + level])
            expected = logits[level, known - 2].log_softmax(-1)
            (found,) = session.propose([path], 8)
            assert found[0][0] == int(expected.argmax())
            for token, logprob in found:  # the head has 8 bits
                assert logprob == pytest.approx(float(expected[token]), abs=0.05)


def test_the_fused_loss_and_its_gradient_are_those_of_autograd() -> None:
    torch.manual_seed(2)
    states, head = torch.randn(7, 12, requires_grad=True), torch.randn(40, 12)
    columns, probs = torch.randint(0, 40, (7, 5)), torch.rand(7, 5)
    loss = SoftCrossEntropy.apply(states, head, columns, probs)
    (gradient,) = torch.autograd.grad(3 * loss, states)
    plain = -(probs * (states @ head.T).log_softmax(-1).gather(1, columns)).sum()
    (expected,) = torch.autograd.grad(3 * plain, states)
    assert torch.allclose(loss, plain, rtol=1e-5)
    assert torch.allclose(gradient, expected, atol=1e-5)


def test_it_starts_better_than_chance_and_learns(tmp_path: Path) -> None:
    source = target()
    chats = [tapped(source, counting(start, step).tokens.tolist()) for start in range(0, 100, 5) for step in (1, 2)]
    examples = [TrainingExample(chat, torch.empty(0)) for chat in chats]
    student, vocabulary = TappedStudent(source, TAPS, (LAYERS - 1,), 2), torch.arange(VOCAB)
    student.initialize(examples)
    policy = replace(EXACT, peak_learning_rate=3e-3)
    trainer = Trainer(source, student, vocabulary, CPU, policy)
    trainer.add(examples)
    trainer.init_logit_scale()
    losses = [trainer.learn(1.0) for _ in range(120)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    trainer.save(tmp_path / "c")
    other = Trainer(source, TappedStudent(source, TAPS, (LAYERS - 1,), 2), vocabulary, CPU, policy)
    other.resume(tmp_path / "c")
    for a, b in zip(trainer.averaged().parameters(), other.averaged().parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(other.student.weights()[TAP_SCALE], student.weights()[TAP_SCALE])
    assert len(measure(trainer.averaged(), source, vocabulary, examples[:4]).hits) == 2
    texts = trainer.answers(60)
    assert texts[-1] == -1
    assert 60 <= len(texts) < 60 + 24


def test_chats_without_states_are_read_once_more(tmp_path: Path) -> None:
    source = target()
    chat = tapped(source, counting(4, 1).tokens.tolist())
    corpus = Corpus(tmp_path, source.weight_hash)
    corpus.append([replace(chat, taps=torch.zeros(len(chat), 0, dtype=torch.uint8))])  # by a run of another kind
    corpus.append([chat], TAPS)
    for wanted in (TAPS, TAPS[1:]):
        made = tapped_examples(source, corpus, wanted, CPU, lambda _: None)
        size = chat.taps.shape[1] // len(TAPS)
        expected = chat.taps[:, (len(TAPS) - len(wanted)) * size :]
        assert torch.equal(made[1].chat.taps, expected)
        assert made[0].chat.taps.shape == expected.shape
    assert len(list(tmp_path.glob("taps-*"))) == 2, "kept for the next run"
    (next(tmp_path.glob("taps-2-4-*"))).write_bytes(b"nonsense")
    with pytest.raises(CorruptModel, match="remove it"):
        tapped_examples(source, corpus, TAPS, CPU, lambda _: None)


def test_the_file_keeps_taps_and_texts(tmp_path: Path) -> None:
    source = target()
    texts = torch.tensor([5, 9, 130, 5, -1, 7, 7, -1], dtype=torch.int32)
    weights = draft_of(source, student_of(source), texts)
    weights.save(tmp_path / "d.draft")
    assert read_card(tmp_path / "d.draft").taps == TAPS
    again = DraftWeights.load(tmp_path / "d.draft")
    assert torch.equal(again.texts, texts)
    assert again.tensors.keys() == weights.tensors.keys()
    drafter = TappedTrainedDraft(again, source)
    assert drafter.store is not None
    assert drafter.store.lookup([9, 130], 4).probs[0][0] == 5
    with pytest.raises(DrafterFailed, match="reads hidden states"):
        TrainedDraft(again, source)


def test_what_does_not_fit_is_refused_in_one_sentence(tmp_path: Path) -> None:
    source = target()
    weights = draft_of(source, student_of(source))
    card = weights.card
    for wrong in ((4, 2, LAYERS), (2, LAYERS + 1), (2, 2)):
        with pytest.raises(DrafterFailed, match="hidden states at"):
            TappedTrainedDraft(replace(weights, card=replace(card, taps=wrong)), source)
    with pytest.raises(DrafterFailed, match="train one for it"):
        TappedTrainedDraft(replace(weights, card=replace(card, weight_hash="f" * 32)), source)
    with pytest.raises(CorruptModel, match=r"fuse has shape .*; train it again"):
        TappedTrainedDraft(replace(weights, card=replace(card, taps=TAPS[1:])), source)
    for name in weights.tensors:
        lacking = {other: tensor for other, tensor in weights.tensors.items() if other != name}
        with pytest.raises(CorruptModel):
            TappedTrainedDraft(replace(weights, tensors=lacking), source)
    with pytest.raises(CorruptModel, match="vocabulary"):
        TappedTrainedDraft(replace(weights, vocabulary=torch.tensor([VOCAB + 5])), source)
    broken = {**weights.tensors, FUSE: weights.tensors[FUSE] * float("nan")}
    replace(weights, tensors=broken).save(tmp_path / "nan.draft", quantize=False)
    with pytest.raises(CorruptModel, match="not finite; train it again"):
        DraftWeights.load(tmp_path / "nan.draft")


@pytest.mark.parametrize("wrong", [{"layers": (2, 4)}, {"layers": (4, 2, 6)}, {"copied": (9,)}, {"levels": 0}])
def test_a_wrong_recipe_is_rejected(wrong: dict, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        TrainingPlan(1.0, tmp_path / "d", tmp_path, TappedRecipe(**wrong)).checked(6)


def test_default_taps_end_with_the_output() -> None:
    assert TappedRecipe().taps(30) == (9, 16, 23, 30)
    assert TappedRecipe().taps(1) == (0, 1)
