"""The fingerprint of a model: the same wherever it lies, bounded however large it is, and what it tells apart."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
from model_files import tiny_model

from swarm_kernels.models.hf_config import model_config
from swarm_kernels.models.layers import layer_of
from swarm_kernels.models.source import HASHED_BYTES, HASHED_TENSORS, fingerprint, fingerprint_sample

CONFIG = model_config(tiny_model().config.to_dict())
KINDS = ["self_attn.q_proj", "self_attn.k_proj", "mlp.gate", *(f"mlp.experts.{i}.up_proj" for i in range(64))]
NAMES = [f"model.layers.{layer}.{kind}.weight" for layer in range(60) for kind in KINDS]
NAMES += ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]


def hash_of(names: list[str], changed: frozenset[str] = frozenset(), read: list[tuple[str, int]] | None = None) -> str:
    def start(name: str, length: int) -> npt.NDArray[np.uint8]:
        if read is not None:
            read.append((name, length))
        return np.full(length, name in changed, dtype=np.uint8)

    return fingerprint(CONFIG, [(name, (64, 64), "BF16", 8192) for name in names], start)


def test_the_sample_is_bounded_and_covers_all_kinds_and_layers() -> None:
    sample = fingerprint_sample(NAMES)
    assert len(sample) == len(set(sample)) == HASHED_TENSORS
    kinds = Counter("experts" if "experts" in name else name.split(".")[-2] for name in sample)
    assert set(kinds) == {"q_proj", "k_proj", "gate", "experts", "embed_tokens", "norm", "lm_head"}
    layers = Counter(layer_of(name, 60) for name in sample)
    assert len(layers) > 50
    assert fingerprint_sample(["a", "b"]) == ["a", "b"]
    assert fingerprint_sample([]) == []
    assert len(fingerprint_sample([chr(0x4E00 + i) for i in range(5000)])) == HASHED_TENSORS


def test_the_order_of_a_table_does_not_matter() -> None:
    shuffled = random.Random(1).sample(NAMES, len(NAMES))
    assert fingerprint_sample(NAMES) == fingerprint_sample(shuffled)
    assert hash_of(NAMES) == hash_of(shuffled)


def test_only_the_starts_of_the_sample_are_read() -> None:
    read: list[tuple[str, int]] = []
    hash_of(NAMES, read=read)
    assert [name for name, _ in read] == fingerprint_sample(NAMES)
    assert {length for _, length in read} == {HASHED_BYTES}


def test_what_it_tells_apart() -> None:
    """A kind of tensor that was trained in all layers, even one of seven; and not: a single tensor of another layer."""
    original = hash_of(NAMES)
    for kind in ("q_proj", "gate.", "experts", "norm", "embed"):
        assert hash_of(NAMES, frozenset(name for name in NAMES if kind in name)) != original
    assert hash_of(NAMES[:-1]) != original
    unsampled = next(name for name in NAMES if name not in fingerprint_sample(NAMES))
    assert hash_of(NAMES, frozenset({unsampled})) == original


def test_it_does_not_depend_on_where_the_tensors_lie(tmp_path: Path) -> None:
    from swarm_kernels.models.open import open_model

    model = tiny_model(num_hidden_layers=40)
    hashes = set()
    for size in ("50MB", "200KB"):
        model.save_pretrained(tmp_path / size, max_shard_size=size)
        source = open_model(str(tmp_path / size))
        hashes.add(source.weight_hash)
        source.close()
    assert len(hashes) == 1
