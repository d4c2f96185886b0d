"""An EAGLE-3 drafter at the client: found by its folder, mixed with n-grams, and left with one sentence."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_reference import random_tensors, save_release, save_speculators
from tiny_models import ModelTensors, tiny_model

from swarm.errors import DrafterFailed
from swarm.types import Taps
from swarm_client.speculation.drafter_factory import DrafterFactory
from swarm_client.speculation.drafters.mixture import MixtureDrafter
from swarm_client.speculation.drafters.tapped import MISSING_AFTER, TappedDrafter
from swarm_client.speculation.drafters.threaded import ThreadedDrafter
from swarm_kernels.draft.eagle import open_eagle
from swarm_kernels.runtime.taps import encode

TAPS = Taps((2, 4, 5), 96)


def source() -> Any:
    return ModelTensors(tiny_model("llama", num_hidden_layers=8))


def rows(first: int, last: int) -> dict[int, tuple[bytes, ...]]:
    made = torch.Generator().manual_seed(first)
    return {at: tuple(encode(torch.randn(1, 96, generator=made), 8) for _ in range(3)) for at in range(first, last)}


@pytest.mark.parametrize("save", [save_speculators, save_release])
async def test_a_folder_is_a_drafter_and_names_its_taps(save: Any, tmp_path: Path) -> None:
    factory = await DrafterFactory.load(str(save(tmp_path / "head", random_tensors())), source(), None)  # type: ignore[arg-type]
    drafter = factory.drafter()
    assert isinstance(drafter, ThreadedDrafter)
    assert drafter.drafter.taps == TAPS
    await drafter.reset(list(range(10)))
    assert (await drafter.propose_cached([()], 3)).unassigned_mass == [1.0]
    await drafter.extend([10, 11], (), rows(0, 11))
    ((*candidates,),) = await drafter.propose_many([()], 3)
    assert len(candidates) == 3
    assert await drafter.propose_cached([(), (50,)], 3) == ([candidates, []], [0.0, 1.0])
    drafter.close()


async def test_a_mixture_has_the_taps_of_its_member() -> None:
    assert DrafterFactory().drafter().drafter.taps is None


async def test_one_of_another_model_is_left_out_with_a_sentence(tmp_path: Path, caplog: Any) -> None:
    folder = save_speculators(tmp_path / "head", random_tensors(), target_hidden_size=64)
    factory = await DrafterFactory.load(str(folder), source(), None)  # type: ignore[arg-type]
    assert factory.drafter().drafter.taps is None
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("drafting with n-grams alone: the drafter in ")
    assert "\n" not in said


async def test_a_head_of_no_numbers_is_dropped(tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors["norm.weight"][0] = torch.inf
    drafter = ThreadedDrafter(TappedDrafter(open_eagle(save_speculators(tmp_path, tensors), source()), "broken"))
    await drafter.reset([1, 2, 3])
    await drafter.extend([4], (), rows(0, 3))
    with pytest.raises(DrafterFailed, match=r"'broken' raised DrafterFailed: the EAGLE-3 head gives .*going"):
        await drafter.propose_many([()], 2)


def test_that_nothing_comes_is_said_once(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    drafter = TappedDrafter(open_eagle(save_speculators(tmp_path, random_tensors()), source()), "head")
    mixture = MixtureDrafter([drafter])
    mixture.reset([1, 2, 3])
    for token in range(MISSING_AFTER + 10):
        mixture.extend([token])
        assert mixture.propose((), 4) == []
    assert len(caplog.records) == 1
    assert "no hidden states of layers 2, 4, 5 for head" in caplog.records[0].getMessage()
    mixture.reset([1, 2, 3])
    for at in range(2 * MISSING_AFTER):
        mixture.set_taps(rows(at + 2, at + 3))
        mixture.extend([at])
        assert mixture.propose((), 4)
    assert len(caplog.records) == 1
    mixture.close()
    with pytest.raises(DrafterFailed, match="closed"):
        drafter.propose((), 1)
