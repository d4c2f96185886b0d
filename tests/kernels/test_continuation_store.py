"""What a model has written before, looked up: against a count of every context, and texts that are none."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from swarm.errors import CorruptModel
from swarm_kernels.draft.continuation_store import END, LONGEST, SHORTEST, ContinuationStore
from swarm_kernels.draft.file import DraftMetadata, DraftWeights
from swarm_kernels.models.safetensors import read_metadata
from swarm_kernels.models.source import ModelFile


def counted(text: list[int], context: list[int]) -> tuple[int, int, dict[int, float]]:
    """The plain way: every place, one after the other."""
    probs: dict[int, float] = {}
    matched, places, left = 0, 0, 1.0
    for length in range(min(LONGEST, len(context)), SHORTEST - 1, -1):
        end = context[-length:]
        if END in end:
            continue
        found = Counter(
            (text[at + length] if at + length < len(text) else END)
            for at in range(len(text) - length + 1)
            if text[at : at + length] == end
        )
        if not found:
            continue
        total = sum(found.values())
        matched, places = matched or length, places or total
        share = left / (total + 0.5 * len(found) + 0.5)
        for token, count in found.items():
            if token != END:
                probs[token] = probs.get(token, 0.0) + share * count
        left *= 1 - total / (total + 0.5 * len(found) + 0.5)
    return matched, places, probs


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.sampled_from([2, 5, 60]), st.integers(0, 9))
def test_it_counts_what_followed(seed: int, tokens: int, context: int) -> None:
    rng = random.Random(seed)
    text = [END if rng.random() < 0.05 else 70_000 + rng.randrange(tokens) for _ in range(200)] + [END]
    store = ContinuationStore(torch.tensor(text, dtype=torch.int32))
    at = rng.randrange(len(text) - context)
    for asked in (text[at : at + context], [*text[at : at + context], 3]):
        found = store.lookup([token for token in asked if token != END], 100)
        matched, places, probs = counted(text, [token for token in asked if token != END])
        assert (found.matched, found.places) == (matched, places)
        assert dict(found.probs) == pytest.approx(probs)
        assert sum(p for _, p in found.probs) <= 1.0
        assert [p for _, p in found.probs] == sorted((p for _, p in found.probs), reverse=True)


def test_width_bounds_what_is_said_and_nothing_is_said_of_nothing() -> None:
    store = ContinuationStore(torch.tensor([1, 2, 3, END, 1, 2, 4, END, 1, 2, 5, END], dtype=torch.int32))
    assert len(store.lookup([1, 2], 2).probs) == 2
    assert store.lookup([], 4).probs == []
    assert store.lookup([2], 4).probs == []
    assert store.lookup([-5, 1 << 40], 4).probs == []


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("draft.texts", torch.tensor([0, 7], dtype=torch.int16)),
        ("draft.texts", torch.tensor([-1, 0], dtype=torch.int16)),
        ("draft.texts", torch.zeros(2, 2, dtype=torch.int16)),
        ("draft.texts", torch.zeros(3)),
        ("draft.texts", torch.zeros(0, dtype=torch.int16)),
        ("draft.text_ids", torch.tensor([-9, 3], dtype=torch.int32)),
        ("draft.text_ids", torch.zeros(0, dtype=torch.int32)),
        ("draft.text_ids", torch.zeros(2)),
    ],
)
def test_texts_of_no_tokens_are_refused(name: str, tensor: torch.Tensor, tmp_path: Path) -> None:
    path = tmp_path / "d.draft"
    DraftWeights(DraftMetadata("m", "h", 0, 1), {}, torch.arange(3), torch.tensor([2, END])).save(path)
    with closing(ModelFile(path)) as file:
        stored, metadata = load_file(path), read_metadata(file)
    save_file({**stored, name: tensor}, path, metadata)
    with pytest.raises(CorruptModel, match="train it again"):
        DraftWeights.load(path)
