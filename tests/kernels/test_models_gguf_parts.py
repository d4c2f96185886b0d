"""A GGUF model in several files, as llama-gguf-split writes them: one model, or a sentence on what is wrong."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from model_files import tiny_model, write_gguf

from swarm.errors import CorruptModel, ModelError, ModelNotFound, UsageError
from swarm.types import LayerSpan
from swarm_kernels.models.open import open_model
from swarm_kernels.runtime.load import load_span

PARTS = 3


def name_of(part: int, count: int = PARTS) -> str:
    return f"tiny-{part:05d}-of-{count:05d}.gguf"


def split(whole: Path, folder: Path, counts: Sequence[int] | None = None) -> list[Path]:
    """What `llama-gguf-split --split --no-tensor-first-split` makes: metadata and no tensors in the first part.

    `counts`: what each part says of `split.count`.
    """
    reader = gguf.GGUFReader(whole)
    folder.mkdir(exist_ok=True)
    tensors = list(reader.tensors)
    shares = [[], tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]]
    paths = []
    for number, share in enumerate(shares):
        path = folder / name_of(number + 1)
        writer: Any = gguf.GGUFWriter(path, "llama")
        if number == 0:
            for key, field in reader.fields.items():
                if not key.startswith("GGUF.") and key != "general.architecture":
                    writer.add_key_value(key, field.contents(), field.types[0])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", counts[number] if counts else PARTS)
        writer.add_int32("split.tensors.count", len(tensors))
        for tensor in share:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("whole") / "tiny.gguf", tiny_model(), gguf.GGMLQuantizationType.Q8_0)


@pytest.fixture
def parts(whole: Path, tmp_path: Path) -> list[Path]:
    return split(whole, tmp_path / "parts")


def test_any_part_opens_the_whole_model(whole: Path, parts: list[Path]) -> None:
    with closing(open_model(str(whole))) as one:
        for spec in (*parts, parts[0].parent):
            with closing(open_model(str(spec))) as many:
                assert (many.name, many.names(), many.weight_hash) == (one.name, one.names(), one.weight_hash)
                assert many.config.hf == one.config.hf
                assert all(torch.equal(many.tensor(name), one.tensor(name)) for name in one.names())
                load_span(many, LayerSpan(0, 3), torch.float32)


def test_missing_parts_are_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(ModelNotFound, match=rf"^{name_of(2)} of the 3 parts is missing from .*; fetch it too$"):
        open_model(str(parts[0]))
    parts[0].unlink()
    with pytest.raises(ModelNotFound, match=rf"^{name_of(1)} and 1 more of the 3 parts"):
        open_model(str(parts[2]))


def test_parts_that_do_not_belong_together(whole: Path, parts: list[Path], tmp_path: Path) -> None:
    shutil.copy(parts[1], parts[2])
    with pytest.raises(CorruptModel, match=r"is in two parts|is not part 3 of 3"):
        open_model(str(parts[0]))
    shutil.copy(parts[0], parts[2])
    with pytest.raises(CorruptModel, match="is not part 3 of 3"):
        open_model(str(parts[0]))
    other = split(whole, tmp_path / "other", counts=(PARTS, PARTS, 7))
    with pytest.raises(CorruptModel, match="is not part 3 of 3"):
        open_model(str(other[0]))


def test_a_part_with_another_name(parts: list[Path]) -> None:
    renamed = parts[1].rename(parts[1].with_name("renamed.gguf"))
    with pytest.raises(CorruptModel, match="one of 3 parts, but is not named as one; name them renamed-00001-of-00003"):
        open_model(str(renamed))


@pytest.mark.parametrize("count", [0, 1, 2, 1025, 65535])
def test_counts_that_are_not_those_of_the_name(whole: Path, tmp_path: Path, count: int) -> None:
    paths = split(whole, tmp_path / "parts", counts=(count,) * PARTS)
    with pytest.raises(ModelError):
        open_model(str(paths[1]))


def test_parts_with_other_tensors_than_the_first_says(parts: list[Path]) -> None:
    key = b"split.tensors.count" + struct.pack("<I", 5)
    data = parts[0].read_bytes()
    at = data.index(key) + len(key)
    parts[0].write_bytes(data[:at] + struct.pack("<i", 99) + data[at + 4 :])
    with pytest.raises(CorruptModel, match=r"tensors, not 99"):
        open_model(str(parts[0]))


def test_a_hash_is_of_one_file(parts: list[Path]) -> None:
    with pytest.raises(UsageError, match="a part of one"):
        open_model(str(parts[0]), expected_sha256="0" * 64)


def test_two_models_in_one_folder_are_not_chosen_from(whole: Path, parts: list[Path]) -> None:
    shutil.copy(whole, parts[0].with_name("another.gguf"))
    with pytest.raises(ModelNotFound, match="name one of them"):
        open_model(str(parts[0].parent))
