"""`--drafter auto`: what is found beside a model and within it, what is taken of that, and what is said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dflash_reference
import eagle_reference
import pytest
import torch
from mtp_reference import Checkpoint
from safetensors.torch import save_file
from tiny_models import ModelTensors, tiny_model

from swarm.planner.speculation.drafter_place import TailOffer
from swarm.types import Hop, OfferedDrafter
from swarm_client.speculation.drafter_factory import DrafterFactory
from swarm_client.speculation.drafter_offers import find_offers
from swarm_client.speculation.drafters.medusa import NUM_CANDIDATES
from swarm_kernels.models.open import open_model
from swarm_kernels.models.source import ModelSource

_OPENED: list[ModelSource] = []


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    while _OPENED:
        _OPENED.pop().close()


def save_model(folder: Path, source: ModelTensors) -> ModelSource:
    """A checkpoint on disk, closed after the test."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(source.config.hf), default=str))
    save_file({name: source.tensor(name).contiguous() for name in source.names()}, folder / "model.safetensors")
    _OPENED.append(open_model(str(folder)))
    return _OPENED[-1]


def llama(folder: Path) -> ModelSource:
    return save_model(folder, ModelTensors(tiny_model("llama", num_hidden_layers=8)))


def with_mtp(folder: Path) -> ModelSource:
    return save_model(folder, Checkpoint("mimo").source)


async def chosen(target: ModelSource) -> DrafterFactory:
    return await DrafterFactory.load("auto", target, None)  # type: ignore[arg-type]  # only models have tokenizers


def drafted_by(factory: DrafterFactory) -> str:
    drafter: Any = factory.drafter()
    try:
        return str(drafter.drafter.members[1].name)
    finally:
        drafter.close()


async def test_with_nothing_at_hand_the_last_node_is_asked_for_heads(tmp_path: Path) -> None:
    factory = await chosen(llama(tmp_path / "model"))
    assert drafted_by(factory) == "heads"
    assert factory.num_medusa_candidates == NUM_CANDIDATES
    assert factory.choice.startswith("drafting with n-grams and the last node's Medusa heads, because nothing else")


async def test_folders_beside_and_within_the_model_are_found_and_a_block_drafter_comes_first(tmp_path: Path) -> None:
    target = llama(tmp_path / "Tiny-3.5")
    eagle_reference.save_speculators(tmp_path / "tiny-3.5-eagle3", eagle_reference.random_tensors())
    eagle_reference.save_speculators(tmp_path / "other-eagle3", eagle_reference.random_tensors())
    assert drafted_by(await chosen(target)) == "tiny-3.5-eagle3"
    dflash_reference.save_release(tmp_path / "Tiny-3.5" / "drafter", dflash_reference.random_tensors())
    factory = await chosen(target)
    assert drafted_by(factory) == "drafter"
    assert factory.num_medusa_candidates == 0
    assert factory.choice == (
        "drafting with n-grams and the DFlash drafter drafter, because it drafts a block in one pass from the model's "
        "own states"
    )


async def test_one_that_does_not_open_is_named_and_the_next_is_taken(tmp_path: Path) -> None:
    target = llama(tmp_path / "tiny")
    dflash_reference.save_release(tmp_path / "tiny-dflash", dflash_reference.random_tensors(), num_target_layers=36)
    eagle_reference.save_speculators(tmp_path / "tiny-eagle3", eagle_reference.random_tensors())
    factory = await chosen(target)
    assert drafted_by(factory) == "tiny-eagle3"
    assert "; without the DFlash drafter tiny-dflash: " in factory.choice
    assert "36 layers, not of 8" in factory.choice
    assert "\n" not in factory.choice


async def test_a_layer_within_the_checkpoint_is_taken(tmp_path: Path) -> None:
    factory = await chosen(with_mtp(tmp_path / "mimo"))
    assert drafted_by(factory) == "mtp"
    assert "the MTP layer of mimo, because the model was trained with it" in factory.choice


async def test_a_damaged_one_is_named(tmp_path: Path) -> None:
    source = Checkpoint("mimo").source
    source.replace("model.mtp_layers.0.input_proj.weight", torch.zeros(3, 3))
    factory = await chosen(save_model(tmp_path / "mimo", source))
    assert drafted_by(factory) == "heads"
    assert "; without its MTP layer: mimo: model.mtp_layers.0.input_proj.weight has shape (3, 3)" in factory.choice


@pytest.mark.parametrize("word", ["mtp", "auto"])
async def test_the_word_for_the_layer(word: str, tmp_path: Path) -> None:
    factory = await DrafterFactory.load(word, with_mtp(tmp_path / "mimo"), None)  # type: ignore[arg-type]
    assert drafted_by(factory) == "mtp"


async def test_a_model_without_that_layer_drafts_with_n_grams(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    factory = await DrafterFactory.load("mtp", llama(tmp_path / "model"), None)  # type: ignore[arg-type]
    assert factory.drafter().drafter.name == "ngram"
    assert "model has no MTP layers; choose another drafter" in caplog.text


def test_a_layer_that_lies_on_a_hub_says_what_it_would_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = with_mtp(tmp_path / "mimo")
    monkeypatch.setattr(target, "missing_bytes", lambda names: len(list(names)) << 30)
    (offer,) = [offer for offer in find_offers(target).open if offer.kind == "mtp"]
    assert offer.fetch_bytes >= 10 << 30
    assert 0 < offer.memory_bytes < 1 << 20


def offered(tree_ms: float = 1.0, tails: int = 1, of: int = 1) -> TailOffer:
    eagle = OfferedDrafter("eagle", "theirs", bytes(16), (5, 6, 7), tree_ms)
    return TailOffer(eagle, tails, of, (Hop("a", 0, 4), Hop("b", 4, 8)))


@pytest.mark.parametrize("word", ["tail", "auto"])
async def test_what_the_tail_offers_is_taken_by_a_client_that_has_nothing(word: str, tmp_path: Path) -> None:
    target = llama(tmp_path / "model")
    factory = await DrafterFactory.load(word, target, None, offered())  # type: ignore[arg-type]
    assert drafted_by(factory) == "tail"
    assert (factory.tail_drafts, factory.num_medusa_candidates) == (True, 0)
    assert factory.choice.startswith("drafting with n-grams and the EAGLE-3 drafter theirs at the tail, because ")


@pytest.mark.parametrize("tree_ms", [0.0, 1e6])
async def test_of_two_of_one_kind_the_cheaper_place_is_taken(tree_ms: float, tmp_path: Path) -> None:
    target = llama(tmp_path / "tiny")
    eagle_reference.save_speculators(tmp_path / "tiny-eagle3", eagle_reference.random_tensors())
    factory = await DrafterFactory.load("auto", target, None, offered(tree_ms))  # type: ignore[arg-type]
    assert factory.tail_drafts == (not tree_ms)
    assert drafted_by(factory) == ("tiny-eagle3" if tree_ms else "tail")
    assert "ms at the tail (a tree " in factory.choice
    assert "ms here (a tree " in factory.choice


async def test_a_rare_or_lesser_drafter_of_the_tail_is_left_out_with_a_clause(tmp_path: Path) -> None:
    target = llama(tmp_path / "tiny")
    dflash_reference.save_release(tmp_path / "tiny-dflash", dflash_reference.random_tensors())
    for offer in (offered(), offered(tails=1, of=3)):
        factory = await DrafterFactory.load("auto", target, None, offer)  # type: ignore[arg-type]
        assert drafted_by(factory) == "tiny-dflash"
        assert not factory.tail_drafts
        assert "; without the EAGLE-3 drafter theirs at the tail" in factory.choice
