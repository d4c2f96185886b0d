"""Self-distillation on a tiny model: the training twin of a layer, the corpus, a whole run, and the file it makes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from chat_cases import VOCAB, chat_of, counting
from safetensors.torch import save_file
from tiny_models import ModelTensors, tiny_model

from swarm.errors import CorruptModel, DrafterFailed, ModelNotFound, UsageError
from swarm_kernels.draft.card import DraftMetadata, read_card
from swarm_kernels.draft.file import DraftWeights
from swarm_kernels.draft.models import TrainedDraft
from swarm_kernels.draft.session import DraftSession
from swarm_training.distill.corpus import Corpus
from swarm_training.distill.features import Features, TrainingExample
from swarm_training.distill.recipes import HeadsRecipe, LayersRecipe
from swarm_training.distill.run import TrainingPlan
from swarm_training.distill.student import LayersStudent
from swarm_training.distill.training import Trainer, frequent_tokens
from swarm_training.distill.validation import measure

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
KINDS = ["llama", "qwen2", "qwen3"]


def weights_of(source: ModelTensors, base: int, copied: tuple[int, ...], quantized: bool, path: Path) -> DraftWeights:
    student = LayersStudent.of_target(source, base, copied)
    card = DraftMetadata("tiny", source.weight_hash, base, len(copied))
    DraftWeights(card, student.weights(), torch.arange(0, VOCAB, 2)).save(path, quantize=quantized)
    return DraftWeights.load(path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", [0, 2])
def test_the_trained_layers_match_the_kernels(kind: str, base: int, tmp_path: Path) -> None:
    """The student's logits, and the candidates of the same weights on the kernels, agree."""
    source = ModelTensors(tiny_model(kind, tie_word_embeddings=True))
    weights = weights_of(source, base, (1, 4), False, tmp_path / "d.safetensors")
    student = LayersStudent.of_target(source, base, (1, 4))
    text = [7, 3, 99, 42, 130, 8, 8, 15]
    states = Features(source, base, CPU).of([chat_of(text)])[0].float()
    with torch.no_grad():
        hidden = student(states[None])[0, 0, -1]
    logits = source.tensor("model.embed_tokens.weight").float() @ hidden
    session = DraftSession(TrainedDraft(weights, source))
    session.reset(text)
    candidates = dict(session.propose([()], 16)[0])
    in_vocabulary = sorted({*range(0, VOCAB, 2), *text})
    expected = logits[in_vocabulary].log_softmax(-1)
    for token, logprob in candidates.items():
        assert logprob == pytest.approx(float(expected[in_vocabulary.index(token)]), abs=0.08)  # bf16 weights
    assert set(candidates) <= set(in_vocabulary)


def test_rare_tokens_of_the_text_can_be_proposed(tmp_path: Path) -> None:
    source = ModelTensors(tiny_model("llama", tie_word_embeddings=True))
    model = TrainedDraft(weights_of(source, 0, (0,), True, tmp_path / "d.safetensors"), source)
    session = DraftSession(model)
    session.reset([2, 4])
    assert 77 not in dict(session.propose([()], VOCAB)[0])
    session.extend([77])
    assert 77 in dict(session.propose([()], VOCAB)[0])


def test_eight_bits_lose_little(tmp_path: Path) -> None:
    source = ModelTensors(tiny_model("llama", tie_word_embeddings=True))
    exact = LayersStudent.of_target(source, 0, (0,)).weights()
    stored = weights_of(source, 0, (0,), True, tmp_path / "d.safetensors").tensors
    assert stored.keys() == exact.keys()
    for name, tensor in exact.items():
        assert (stored[name] - tensor).norm() <= 0.01 * tensor.norm()


def test_training_and_resuming_from_a_checkpoint(tmp_path: Path) -> None:
    source = ModelTensors(tiny_model("llama", tie_word_embeddings=True))
    chats = [counting(start, step) for start in range(0, 100, 5) for step in (1, 2)]
    examples = [TrainingExample(*pair) for pair in zip(chats, Features(source, 0, CPU).of(chats), strict=True)]
    vocabulary = frequent_tokens(chats, 110, VOCAB)
    assert vocabulary.tolist() == sorted(set(vocabulary.tolist()))

    def trainer() -> Trainer:
        made = Trainer(source, LayersStudent.of_target(source, 0, (0,)), vocabulary, CPU)
        made.add(examples)
        return made

    first = trainer()
    first.init_logit_scale()
    before = measure(first.averaged(), source, vocabulary, examples[:8])
    losses = [first.learn(1.0) for _ in range(150)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    after = measure(first.averaged(), source, vocabulary, examples[:8])
    assert after.hits[0][-1] > before.hits[0][-1] + 0.1
    first.save(tmp_path / "c.safetensors")
    second = trainer()
    second.resume(tmp_path / "c.safetensors")
    assert (second.steps, second.seen) == (first.steps, first.seen)
    assert torch.equal(Trainer.vocabulary_of(tmp_path / "c.safetensors"), vocabulary)
    for a, b in zip(first.averaged().parameters(), second.averaged().parameters(), strict=True):
        assert torch.equal(a, b)
    assert second.learn(1.0) < losses[0]


def test_a_foreign_checkpoint_is_rejected(tmp_path: Path) -> None:
    source = ModelTensors(tiny_model("llama", tie_word_embeddings=True))
    trainer = Trainer(source, LayersStudent.of_target(source, 0, (0,)), torch.arange(64), CPU)
    (tmp_path / "c").write_bytes(b"nonsense")
    with pytest.raises(CorruptModel):
        trainer.resume(tmp_path / "c")
    save_file({"weight.0": torch.zeros(1)}, tmp_path / "d", {"state": "{}"})
    with pytest.raises(CorruptModel):
        trainer.resume(tmp_path / "d")


# --- the corpus and the file ------------------------------------------------------------------------------------


def test_a_corpus_is_read_as_it_was_written(tmp_path: Path) -> None:
    corpus = Corpus(tmp_path, "a" * 32)
    chats = [counting(start, 1) for start in range(5)]
    corpus.append(chats[:3])
    corpus.append(chats[3:])
    again = Corpus(tmp_path, "a" * 32)
    assert (again.chats, again.tokens, len(again)) == (5, 120, 2)
    for found, expected in zip(again.read(), chats, strict=True):
        assert torch.equal(found.tokens, expected.tokens)
        assert torch.equal(found.top_logprobs, expected.top_logprobs)
    assert len(list(again.read(1))) == 2


def test_another_models_chats_and_damaged_shards_are_rejected(tmp_path: Path) -> None:
    Corpus(tmp_path, "a" * 32).append([counting(0, 1)])
    with pytest.raises(CorruptModel, match="another model"):
        Corpus(tmp_path, "b" * 32)
    (tmp_path / "chats-00001.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(CorruptModel, match="not a shard"):
        Corpus(tmp_path, "a" * 32)


def test_a_draft_of_another_model_is_rejected(tmp_path: Path) -> None:
    source = ModelTensors(tiny_model("llama", tie_word_embeddings=True))
    weights = weights_of(source, 0, (0,), True, tmp_path / "d.safetensors")
    foreign = replace(weights, card=replace(weights.card, weight_hash="f" * 32))
    with pytest.raises(DrafterFailed, match="was trained for tiny, not for tiny; train one for it"):
        TrainedDraft(foreign, source)
    lacking = {name: tensor for name, tensor in weights.tensors.items() if "mlp.up_proj" not in name}
    with pytest.raises(CorruptModel, match=r"no tensor 'model\.layers\.0\.mlp\.up_proj\.weight'"):
        TrainedDraft(replace(weights, tensors=lacking), source)
    small = {name: tensor[..., :-1] for name, tensor in weights.tensors.items()}
    with pytest.raises(CorruptModel):
        TrainedDraft(replace(weights, tensors=small), source)
    with pytest.raises(CorruptModel, match="vocabulary"):
        TrainedDraft(replace(weights, vocabulary=torch.tensor([VOCAB + 5])), source)


def test_a_file_that_is_no_draft(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        read_card(tmp_path / "none")
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"\x10\0\0\0\0\0\0\0nonsense")
    with pytest.raises(CorruptModel):
        DraftWeights.load(path)
    save_file({"x": torch.zeros(1)}, path, {"format": "other"})
    with pytest.raises(CorruptModel, match="no draft of this version"):
        DraftWeights.load(path)
    save_file({"x": torch.zeros(1)}, path, {"format": "swarm-draft-1", "card": json.dumps({"nonsense": 1})})
    with pytest.raises(CorruptModel):
        DraftWeights.load(path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"minutes": 0.0},
        {"tokens": 5},
        {"writing": 1.5},
        {"recipe": LayersRecipe(copied=())},
        {"recipe": LayersRecipe(copied=(9,))},
        {"recipe": LayersRecipe(base=6)},
        {"recipe": HeadsRecipe(0)},
        {"recipe": HeadsRecipe(17)},
        {"vocabulary": 1},
    ],
)
def test_a_wrong_plan_is_rejected(wrong: dict, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        replace(TrainingPlan(1.0, tmp_path / "d", tmp_path), **wrong).checked(6)
