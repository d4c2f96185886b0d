"""Model files made to exhaust whoever opens them: refused within bounds of time and memory, by a ModelError."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from model_files import SIZES, tiny_model
from safetensors.torch import save_file

from swarm.errors import CorruptModel, ModelError, UnsupportedModel
from swarm_kernels.draft.card import DraftMetadata, read_card
from swarm_kernels.draft.file import DraftWeights
from swarm_kernels.draft.medusa import MedusaHeads
from swarm_kernels.models.config import RopeConfig
from swarm_kernels.models.gguf import GgufSource
from swarm_kernels.models.gguf_header import GgufHeader
from swarm_kernels.models.hf_config import model_config
from swarm_kernels.models.safetensors import SafetensorsSource
from swarm_kernels.models.source import ModelFile
from swarm_kernels.runtime.rope import RopeTable

MIB = 1 << 20


@contextmanager
def within(seconds: float, mib: int) -> Iterator[None]:
    """Processor time of this process and Python's memory, with room for a busy machine."""
    tracemalloc.start()
    started = time.process_time()
    try:
        yield
        spent, peak = time.process_time() - started, tracemalloc.get_traced_memory()[1] / MIB
    finally:
        tracemalloc.stop()
    assert spent < seconds, f"{spent:.1f} s"
    assert peak < mib, f"{peak:.0f} MiB"


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def array(kind: int, count: int, content: bytes) -> bytes:
    return struct.pack("<IIQ", 9, kind, count) + content


def gguf_of(path: Path, *values: tuple[str, bytes]) -> Path:
    """A file of version 3 without tensors. `values`: keys and their type and content."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, len(values))
    path.write_bytes(head + b"".join(text(key.encode()) + value for key, value in values))
    return path


def open_header(path: Path) -> GgufHeader:
    file = ModelFile(path)
    try:
        return GgufHeader(file)
    finally:
        file.close()


def test_400_mb_of_arrays_are_not_even_read(tmp_path: Path) -> None:
    """Each was decoded into a tuple: 50 million numbers took 2 GB and 20 s."""
    path = gguf_of(tmp_path / "m.gguf", *((f"a{i}", array(12, 1 << 22, bytes(8 << 22))) for i in range(12)))
    with within(5, 200), pytest.raises(CorruptModel, match="larger than 64 MiB"):
        open_header(path)
    path.unlink()


def test_an_array_that_fits_takes_no_memory_before_it_is_asked_for(tmp_path: Path) -> None:
    path = gguf_of(tmp_path / "m.gguf", ("a", array(0, 1 << 25, bytes(1 << 25))))
    with within(5, 130):
        header = open_header(path)
        assert header.count("a") == 1 << 25
        with pytest.raises(CorruptModel, match="numbers"):
            header.numbers("a")


def test_arrays_of_empty_texts_are_bounded_together(tmp_path: Path) -> None:
    half = array(8, 1 << 20, bytes(8 << 20))
    open_header(gguf_of(tmp_path / "a.gguf", ("a", half), ("b", half)))
    with pytest.raises(CorruptModel, match="texts in arrays"):
        open_header(gguf_of(tmp_path / "b.gguf", ("a", half), ("b", half), ("c", array(8, 1, bytes(8)))))


def test_4000_arrays_in_each_other(tmp_path: Path) -> None:
    nested = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 4000 + struct.pack("<IQ", 0, 0)
    with within(1, 10), pytest.raises(UnsupportedModel, match="nested arrays"):
        open_header(gguf_of(tmp_path / "m.gguf", ("a", nested)))


def gguf_model(tmp_path: Path, **changes: bytes) -> GgufSource:
    """The metadata of a Llama, with some values replaced."""

    def number(value: int) -> bytes:
        return struct.pack("<IQ", 10, value)

    values = {
        "general.architecture": struct.pack("<I", 8) + text(b"llama"),
        "llama.embedding_length": number(64), "llama.block_count": number(1), "llama.context_length": number(64),
        "llama.attention.head_count": number(4), "llama.feed_forward_length": number(64), "llama.vocab_size": number(9),
        **{f"llama.{key}": value for key, value in changes.items()},
    }  # fmt: skip
    return GgufSource(gguf_of(tmp_path / "m.gguf", *values.items()))


@pytest.mark.parametrize(
    "changes",
    [
        {"attention.head_count_kv": array(6, 1, struct.pack("<f", float("nan")))},
        {"attention.head_count_kv": array(6, 1, struct.pack("<f", float("inf")))},
        {"attention.key_length": struct.pack("<IQ", 10, 0), "rope.dimension_count": struct.pack("<IQ", 10, 4)},
        {"rope.dimension_count": struct.pack("<IQ", 10, 1 << 63)},
        {"rope.freq_base": struct.pack("<Id", 12, -1.0)},
        {"attention.head_count": struct.pack("<IQ", 10, 1 << 40)},
    ],
)
def test_numbers_that_nothing_can_be_computed_with(tmp_path: Path, changes: dict[str, bytes]) -> None:
    with pytest.raises(CorruptModel):
        gguf_model(tmp_path, **changes)


CONFIG: dict[str, Any] = {**SIZES, "model_type": "llama"}


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 10**400},
        {"rope_theta": 10**4000},
        {"partial_rotary_factor": 1e300},
        {"rope_scaling": {"rope_type": ["x"] * 1000, "factor": 2}},
        {"hidden_act": {"a": 1}},
        {"hidden_act": "x" * 10_000},
        {"model_type": "x" * 10_000},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": "all"},
        {"vocab_size": "9" * 100_000},
        {"eos_token_id": [["x" * 100_000]]},
        {"model_type": "gemma3n_text", "intermediate_size": [[48], 48]},
        {"model_type": "gemma3n_text", "intermediate_size": [0] * 100_000},
    ],
)
def test_config_values_of_a_wrong_kind_or_size(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError) as caught:
        model_config({**CONFIG, **changes})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("scaling", "dim"),
    [
        ({"rope_type": "linear", "factor": "much"}, 16),
        ({"rope_type": "dynamic", "factor": [2]}, 16),
        ({"rope_type": "dynamic", "factor": 2.0}, 2),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 1e308, "beta_slow": 1e-308}, 5),
        ({"rope_type": "llama3", "factor": 0}, 16),
        (None, 1),
    ],
)
def test_rotary_scaling_that_cannot_be_computed(scaling: dict[str, Any] | None, dim: int) -> None:
    with pytest.raises(CorruptModel):
        RopeTable(RopeConfig(1e4, scaling), dim, 64, torch.device("cpu"))


def folder_of(tmp_path: Path, config: bytes) -> Path:
    tiny_model().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes(config)
    return tmp_path


def test_a_config_nested_deep_is_corrupt(tmp_path: Path) -> None:
    """900 levels are read, but cannot be copied."""
    for depth in (900, 100_000):
        nested = json.dumps(CONFIG)[:-1].encode() + b', "x": ' + b"[" * depth + b"]" * depth + b"}"
        with pytest.raises(CorruptModel, match=r"nested|not valid JSON"):
            SafetensorsSource(folder_of(tmp_path, nested))


def test_a_huge_config_is_corrupt(tmp_path: Path) -> None:
    """200 MB of empty lists would take 5 GB."""
    folder = folder_of(tmp_path, b'{"x": [' + b"[]," * (3 << 20) + b"[]]}")
    with within(5, 50), pytest.raises(CorruptModel, match="too large"):
        SafetensorsSource(folder)


def with_header(path: Path, header: bytes, values: bytes = b"") -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + values)
    return path


@pytest.mark.parametrize(
    "header",
    [
        b'{"a": [' + b"[]," * (1 << 20) + b"[]]}",
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a": {"dtype": "F32", "shape": [' + b"1," * (1 << 20) + b'1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1e3], "data_offsets": [0, 4000]}}',
        b'{"a": {"dtype": "F32", "shape": [99999999999999999999999], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}',
        b'{"a": {"dtype": "F32"}}',
        b'{"__metadata__": {"x": 1}, "a": 5}',
    ],
)
def test_hostile_safetensors_headers(tmp_path: Path, header: bytes) -> None:
    folder = folder_of(tmp_path, json.dumps(CONFIG).encode())
    with_header(folder / "model.safetensors", header, bytes(4))
    with within(5, 60), pytest.raises(CorruptModel):
        SafetensorsSource(folder)


def test_names_of_metadata_may_be_those_of_a_tensor_s_fields(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x", {"shape": "square", "dtype": "any", "data_offsets": "none"})
    with pytest.raises(CorruptModel, match=r"heads|Medusa"):  # that is: its header was read
        MedusaHeads.load(tmp_path / "x", model_config(CONFIG))


def test_an_index_of_anything_but_names_is_corrupt(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, json.dumps(CONFIG).encode())
    for content in (b'{"weight_map": {"a": ' + b"[" * 5000 + b"]" * 5000 + b"}}", b'{"weight_map": {"a": 5}}', b"[]"):
        (folder / "model.safetensors.index.json").write_bytes(content)
        with pytest.raises(CorruptModel, match="weight_map"):
            SafetensorsSource(folder)
    shards = {f"t{i}": f"{i}.safetensors" for i in range(5000)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(CorruptModel, match="shards"):
        SafetensorsSource(folder)


CARD = DraftMetadata("m", "h", 1, 2)


@pytest.mark.parametrize(
    "card",
    [
        '{"model": "m", "weight_hash": "h", "base": "1", "layers": 2}',
        '{"model": "m", "weight_hash": "h", "base": -1, "layers": 2}',
        '{"model": "m", "weight_hash": "h", "base": 1, "layers": 1e300}',
        '{"model": "m", "weight_hash": "h", "base": 1, "layers": 2, "evaluation": ' + "[" * 5000 + "]" * 5000 + "}",
        "[" * 100_000,
        "",
    ],
)
def test_hostile_cards_of_drafts(tmp_path: Path, card: str) -> None:
    path = tmp_path / "x.draft"
    save_file({"draft.vocabulary": torch.arange(3)}, path, {"format": "swarm-draft-1", "card": card})
    with pytest.raises(CorruptModel):
        read_card(path)


@pytest.mark.parametrize(
    "ids",
    [torch.tensor([-5, 3]), torch.tensor([3, 3]), torch.tensor([2.5, 3.0]), torch.zeros(0), torch.zeros(2, 2)],
)
def test_hostile_vocabularies_of_drafts(tmp_path: Path, ids: torch.Tensor) -> None:
    """Negative ids took rows from the end of the head."""
    path = tmp_path / "x.draft"
    DraftWeights(CARD, {"w": torch.ones(2, 4)}, torch.arange(3)).save(path)
    good = DraftWeights.load(path)
    assert torch.allclose(good.tensors["w"], torch.ones(2, 4))
    card = '{"model": "m", "weight_hash": "h", "base": 1, "layers": 2}'
    save_file({"draft.vocabulary": ids}, path, {"format": "swarm-draft-1", "card": card})
    with pytest.raises(CorruptModel, match="vocabulary"):
        DraftWeights.load(path)


def test_a_draft_whose_scales_do_not_fit(tmp_path: Path) -> None:
    card = '{"model": "m", "weight_hash": "h", "base": 1, "layers": 2}'
    tensors = {"draft.vocabulary": torch.arange(3), "w": torch.ones(1, 4), "w.scale": torch.ones(1 << 16, 1)}
    save_file(tensors, tmp_path / "x.draft", {"format": "swarm-draft-1", "card": card})
    with pytest.raises(CorruptModel, match="scale"):
        DraftWeights.load(tmp_path / "x.draft")
