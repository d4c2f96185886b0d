"""Hugging Face folders: one file or shards, configs of every spelling, and what becomes of broken folders."""

from __future__ import annotations

import json
import random
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from model_files import tiny_model

from swarm.errors import CorruptModel, ModelError, ModelNotFound, UnsupportedModel, UsageError
from swarm_kernels.models.hf_config import model_config
from swarm_kernels.models.open import open_model
from swarm_kernels.models.safetensors import SafetensorsSource


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "tiny"
    tiny_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "tiny-shards"
    tiny_model().save_pretrained(folder, max_shard_size="100KB")
    return folder


@pytest.fixture
def copy(single: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(single, tmp_path / "copy"))


def test_tensors_are_those_that_were_saved(single: Path) -> None:
    source = open_model(str(single))
    wanted = tiny_model().state_dict()
    assert set(source.names()) == set(wanted)
    for name, weight in wanted.items():
        assert torch.equal(source.tensor(name), weight)
        assert source.shape(name) == tuple(weight.shape)
        assert source.nbytes(name) == weight.nbytes
    assert source.name == "tiny"
    assert not source.has("lm_head.bias")
    with pytest.raises(CorruptModel, match=r"no tensor 'lm_head\.bias'"):
        source.tensor("lm_head.bias")
    source.close()


def test_shards_hold_the_same_model_and_have_the_same_hash(single: Path, sharded: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 1
    one, many = open_model(str(single)), open_model(str(sharded))
    assert one.weight_hash == many.weight_hash
    for name in one.names():
        assert torch.equal(one.tensor(name), many.tensor(name))
    one.close()
    many.close()


def test_half_precision_stays_half(tmp_path: Path) -> None:
    hashes = set()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        tiny_model().to(dtype).save_pretrained(tmp_path / str(dtype))
        source = open_model(str(tmp_path / str(dtype)))
        assert source.tensor("model.norm.weight").dtype == dtype
        hashes.add(source.weight_hash)
        source.close()
    assert len(hashes) == 3


def test_loading_a_tensor_reads_that_tensor_alone(single: Path) -> None:
    source = SafetensorsSource(single)
    file = source.files[0]
    before = file.bytes_read
    weight = source.tensor("model.layers.1.mlp.up_proj.weight")
    assert file.bytes_read - before == weight.nbytes
    source.close()
    assert weight.sum().isfinite()  # outlives the source


def test_the_expected_hash_of_the_file_is_checked(single: Path, sharded: Path) -> None:
    with pytest.raises(CorruptModel, match="SHA-256"):
        open_model(str(single), expected_sha256="0" * 64)
    with pytest.raises(UsageError):
        open_model(str(sharded), expected_sha256="0" * 64)


def test_a_missing_shard_is_named(sharded: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "m"))
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelNotFound, match=re.escape(shard.name)):
        open_model(str(folder))


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "x.bin", "a/b.safetensors", ""])
def test_an_index_cannot_point_outside_its_folder(sharded: Path, tmp_path: Path, shard: str) -> None:
    folder = Path(shutil.copytree(sharded, tmp_path / "m"))
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = shard
    index.write_text(json.dumps(content))
    with pytest.raises(CorruptModel):
        open_model(str(folder))


def test_pickle_files_are_never_loaded(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"pickle files .* never loaded"):
        open_model(str(copy))


def test_folders_that_are_no_model(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFound, match=r"no \*\.safetensors"):
        open_model(str(tmp_path / "empty"))
    (copy / "config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        open_model(str(copy))
    (copy / "config.json").write_text("{")
    with pytest.raises(CorruptModel, match="not valid JSON"):
        open_model(str(copy))


@pytest.mark.parametrize("spec", ["", "no-such-model", "~nobody-here/x", "a" * 5000, "./missing", "x\0y"])
def test_an_unknown_spec_lists_the_possible_ones(spec: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        open_model(spec)
    assert len(str(caught.value)) < 500


def test_every_truncation_is_corrupt(copy: Path) -> None:
    file = copy / "model.safetensors"
    whole = file.read_bytes()
    for length in [*range(0, 4000, 97), *range(4000, len(whole), 20011), len(whole) - 1]:
        file.write_bytes(whole[:length])
        with pytest.raises(CorruptModel):
            open_model(str(copy))
    file.write_bytes(whole + b"\0")
    with pytest.raises(CorruptModel):
        open_model(str(copy))


def test_no_damage_to_the_header_does_worse_than_a_model_error(copy: Path) -> None:
    file = copy / "model.safetensors"
    whole = file.read_bytes()
    length = 8 + struct.unpack("<Q", whole[:8])[0]
    rng = random.Random(0)
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(length)] = rng.choice(b'0129{}[]",:\x00\xff aF')
        file.write_bytes(data)
        assert "\n" not in _complaint(copy)


def _complaint(folder: Path) -> str:
    """The sentence of the error, "" when the model opens."""
    try:
        open_model(str(folder)).close()
    except ModelError as error:
        return str(error)
    return ""


def _config(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 512,
    }  # fmt: skip
    return {**base, **changes}


def test_rope_in_both_spellings() -> None:
    new = model_config(_config(rope_parameters={"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}))
    old = model_config(_config(rope_theta=1e6, rope_scaling={"type": "linear", "factor": 2.0}))
    assert new.rope == old.rope
    assert new.rope.theta == 1e6
    assert new.rope.scaling == {"rope_type": "linear", "factor": 2.0}
    assert model_config(_config()).rope.theta == 10000.0
    assert model_config(_config(rope_parameters={"rope_type": "default", "rope_theta": 5.0})).rope.scaling is None
    yarn = model_config(_config(rope_scaling={"rope_type": "yarn", "factor": 4.0}))
    assert yarn.rope.scaling == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert model_config(_config(partial_rotary_factor=0.5)).rope.dim == 8


def test_defaults_are_those_of_the_family() -> None:
    assert model_config(_config()).head_dim == 16
    assert model_config(_config(model_type="qwen3")).head_dim == 128
    assert model_config(_config(model_type="qwen3")).qk_norm
    qwen2 = model_config(_config(model_type="qwen2"))
    assert qwen2.qkv_bias
    assert not qwen2.o_bias
    assert model_config(_config(attention_bias=True)).o_bias
    assert model_config(_config(num_key_value_heads=None)).num_kv_heads == 4


def test_sliding_windows_count_only_where_they_are_used() -> None:
    mistral = _config(model_type="mistral", max_position_embeddings=32768)
    assert model_config(mistral).sliding_window == 4096
    assert not model_config(mistral).is_llama_like
    for window in (None, 32768):
        assert model_config({**mistral, "sliding_window": window}).is_llama_like
    qwen = _config(model_type="qwen2", sliding_window=128)
    assert model_config(qwen).sliding_window is None
    assert model_config({**qwen, "use_sliding_window": True}).sliding_window is None  # from layer 28 on
    assert model_config({**qwen, "use_sliding_window": True, "max_window_layers": 1}).sliding_window == 128


def test_ends_of_answers_come_from_both_files() -> None:
    assert model_config(_config(eos_token_id=2), {"eos_token_id": [7, 2]}).eos_token_ids == (2, 7)
    assert model_config(_config(eos_token_id=None)).eos_token_ids == ()


def test_other_decoders_are_described_and_left_to_the_general_path() -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 128}
    config = model_config(gpt2, has_head=False)
    assert (config.hidden_size, config.num_layers, config.intermediate_size, config.context_length) == (64, 2, 256, 128)
    assert config.tie_word_embeddings
    assert not config.has_fast_path


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": None},
        {"hidden_size": "64"},
        {"hidden_size": 0},
        {"num_hidden_layers": True},
        {"num_hidden_layers": 1 << 40},
        {"num_attention_heads": 3},
        {"rms_norm_eps": float("nan")},
        {"rope_theta": -1},
        {"rope_parameters": [1]},
        {"eos_token_id": "two"},
        {"tie_word_embeddings": "yes"},
    ],
)
def test_values_that_cannot_be_are_corrupt(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptModel):
        model_config(_config(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": None, "text_config": {"hidden_size": 64}},
        {"is_encoder_decoder": True},
    ],
)
def test_unsupported_models_are_rejected(changes: dict[str, Any]) -> None:
    config = {key: value for key, value in _config(**changes).items() if value is not None}
    with pytest.raises(UnsupportedModel):
        model_config(config)


def test_weights_that_do_not_fit_the_config_are_corrupt(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "intermediate_size": 97}))
    with pytest.raises(CorruptModel, match="its config needs"):
        open_model(str(copy))
    (copy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(CorruptModel, match=r"no tensor 'model\.layers\.3"):
        open_model(str(copy))
