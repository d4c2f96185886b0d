"""GGUF files: values, names, configs, laziness, and what becomes of broken files."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from model_files import SIZES, tiny_model, write_gguf
from transformers import AutoConfig, AutoModelForCausalLM

from swarm.errors import CorruptModel, ModelError, ModelNotFound, UnsupportedModel
from swarm_kernels.models.gguf import GgufSource
from swarm_kernels.models.gguf_header import GgufHeader
from swarm_kernels.models.gguf_types.blocks import QUANT_BLOCKS
from swarm_kernels.models.gguf_types.dequant import dequantize
from swarm_kernels.models.open import ModelSource, open_model
from swarm_kernels.models.source import ModelFile


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_model())


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_tensors_are_those_of_the_model_it_was_made_from(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model(kind, **changes)
    source = open_model(str(write_gguf(tmp_path / "m.gguf", model)))
    wanted = {
        n: w for n, w in model.state_dict().items() if n != "lm_head.weight" or not changes.get("tie_word_embeddings")
    }
    assert set(source.names()) == set(wanted)
    for name, weight in wanted.items():
        got = source.tensor(name)
        assert got.dtype == torch.float32
        assert torch.equal(got, weight), name
        assert source.shape(name) == tuple(weight.shape)
        assert source.nbytes(name) == got.nbytes
    assert source.config.qkv_bias == (kind == "qwen2" or "attention_bias" in changes)
    assert source.config.o_bias == ("attention_bias" in changes)
    assert source.config.qk_norm == (kind == "qwen3")
    source.close()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_transformers_can_rebuild_the_config(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    source = GgufSource(write_gguf(tmp_path / "m.gguf", model, Quant.Q8_0))
    rebuilt = AutoConfig.for_model(**source.config.hf)
    for key in {*SIZES, "rope_parameters", "tie_word_embeddings", "hidden_act"} - {"eos_token_id"}:
        assert getattr(rebuilt, key) == getattr(model.config, key), key
    assert rebuilt.rms_norm_eps == pytest.approx(model.config.rms_norm_eps)
    again = AutoModelForCausalLM.from_config(rebuilt)
    again.load_state_dict({name: source.tensor(name) for name in source.names()})
    source.close()


@pytest.mark.parametrize("kind", sorted(QUANT_BLOCKS))
def test_unpacking_equals_gguf_py(kind: int) -> None:
    name, values, size = QUANT_BLOCKS[kind]
    assert (name, (values, size)) == (Quant(kind).name, gguf.GGML_QUANT_SIZES[Quant(kind)])
    rows, blocks = 5, 3
    stored = np.random.default_rng(kind).integers(0, 256, rows * blocks * size, dtype=np.uint8)
    if name in ("F32", "F16", "BF16"):
        stored = np.frombuffer(
            np.arange(rows * blocks, dtype=np.float32).tobytes()[: stored.size], dtype=np.uint8
        ).copy()
    shape = (rows, blocks * values)
    with np.errstate(all="ignore"):  # random scales overflow
        got = dequantize(stored.copy(), kind, shape).float().numpy()
        wanted = gguf.quants.dequantize(stored.reshape(rows, -1), Quant(kind)).astype(np.float32).reshape(shape)
    np.testing.assert_array_equal(got, wanted)


def test_values_stay_in_the_type_they_were_stored_in(tmp_path: Path) -> None:
    model = tiny_model()
    for quant, dtype in ((Quant.F16, torch.float16), (Quant.BF16, torch.bfloat16)):
        source = GgufSource(write_gguf(tmp_path / f"{quant.name}.gguf", model, quant))
        name = "model.layers.1.mlp.up_proj.weight"
        assert source.tensor(name).dtype == dtype
        assert source.nbytes(name) == source.tensor(name).nbytes
        assert torch.equal(source.tensor(name), model.state_dict()[name].to(dtype))
        source.close()


def test_opening_and_loading_a_few_layers_leaves_the_others_untouched(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model(hidden_size=256, intermediate_size=512))
    source = GgufSource(path)
    header = source.files[0].bytes_read - sum(min(t.nbytes, 4096) for t in source.header.tensors.values())
    assert header <= min(4 << 20, path.stat().st_size)
    wanted = source.tensor("model.layers.1.mlp.up_proj.weight")
    before = source.files[0].bytes_read
    assert torch.equal(source.tensor("model.layers.1.mlp.up_proj.weight"), wanted)
    assert source.files[0].bytes_read - before == wanted.nbytes
    source.close()
    with path.open("r+b") as file:  # garbage in the other layers, beyond what the fingerprint reads
        for name, tensor in source.header.tensors.items():
            if not name.startswith("blk.1.") and tensor.nbytes > 4096:
                file.seek(tensor.offset + 4096)
                file.write(b"\xff" * (tensor.nbytes - 4096))
    again = GgufSource(path)
    assert again.weight_hash == source.weight_hash
    assert torch.equal(again.tensor("model.layers.1.mlp.up_proj.weight"), wanted)
    again.close()


def test_the_hash_is_of_the_weights_and_not_of_the_file(tmp_path: Path) -> None:
    def titled(writer: gguf.GGUFWriter, arch: str) -> None:
        writer.add_name("another title")

    first = GgufSource(write_gguf(tmp_path / "a.gguf", tiny_model()))
    moved = GgufSource(write_gguf(tmp_path / "b.gguf", tiny_model(), metadata=titled))
    other = GgufSource(write_gguf(tmp_path / "c.gguf", tiny_model(seed=1)))
    assert first.weight_hash == moved.weight_hash != other.weight_hash
    assert len(first.weight_hash) == 32
    for source in (first, moved, other):
        source.close()


def test_llama_3_scaling_is_recovered_from_its_factors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    model = tiny_model(rope_parameters=scaling, head_dim=64)
    scaled = model.model.rotary_emb.inv_freq
    plain = 500000.0 ** (-torch.arange(0, 64, 2) / 64)
    factors = (plain / scaled).numpy().astype(np.float32)
    source = GgufSource(write_gguf(tmp_path / "m.gguf", model, extra={"rope_freqs.weight": factors}))
    assert source.config.rope.theta == 500000.0
    assert source.config.rope.scaling == {k: v for k, v in scaling.items() if k != "rope_theta"}
    source.close()
    odd = write_gguf(tmp_path / "odd.gguf", model, extra={"rope_freqs.weight": factors[::-1].copy()})
    with pytest.raises(UnsupportedModel):
        GgufSource(odd)


def test_rope_scaling_in_the_metadata(tmp_path: Path) -> None:
    def yarn(writer: gguf.GGUFWriter, arch: str) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    source = GgufSource(write_gguf(tmp_path / "m.gguf", tiny_model("qwen2"), metadata=yarn))
    assert source.config.rope.scaling == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    source.close()


def test_a_missing_file_and_other_architectures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no model at"):
        open_model(str(tmp_path / "none.gguf"))
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="mamba"):
        open_model(str(tmp_path / "m.gguf"))


def test_every_truncation_is_corrupt(tiny: Path, tmp_path: Path) -> None:
    whole = tiny.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 2048, 13), *range(2048, len(whole), 7919), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CorruptModel, match=r"truncated|not a GGUF"):
            open_model(str(cut))


def test_no_damage_to_the_header_does_worse_than_a_model_error(tiny: Path, tmp_path: Path) -> None:
    whole = tiny.read_bytes()
    source = GgufSource(tiny)
    end = min(t.offset for t in source.header.tensors.values())
    source.close()
    rng = random.Random(0)
    broken = tmp_path / "broken.gguf"
    for _ in range(800):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(end)
            data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        broken.write_bytes(data)
        assert "\n" not in _complaint(str(broken))


def _complaint(spec: str) -> str:
    """The sentence of the error, "" when the model opens: damage may hit a byte that means little."""
    try:
        open_model(spec).close()
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("at", [8, 16])
@pytest.mark.parametrize("count", [1 << 63, 1 << 40, 1 << 20])
def test_absurd_counts_allocate_nothing(tiny: Path, tmp_path: Path, at: int, count: int) -> None:
    data = bytearray(tiny.read_bytes())
    data[at : at + 8] = struct.pack("<Q", count)
    (tmp_path / "m.gguf").write_bytes(data)
    tracemalloc.start()
    with pytest.raises(CorruptModel):
        open_model(str(tmp_path / "m.gguf"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * len(data) + (1 << 20)


@pytest.mark.parametrize(("kind", "count"), [(8, 1 << 62), (8, 1 << 40), (4, 1 << 61), (0, 1 << 35), (9, 2), (77, 1)])
def test_absurd_arrays_are_refused(tmp_path: Path, kind: int, count: int) -> None:
    key = b"a.b"
    header = (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, kind, count)
    )
    path = tmp_path / "m.gguf"
    path.write_bytes(header + b"\0" * 4096)
    file = ModelFile(path)
    with pytest.raises(ModelError):
        GgufHeader(file)
    file.close()


def test_a_file_cut_short_while_open_is_an_error_and_not_a_crash(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny.read_bytes())
    source = open_model(str(path))
    path.write_bytes(b"")
    with pytest.raises(CorruptModel, match="cut short"):
        source.tensor("model.norm.weight")
    source.close()


@pytest.mark.real_model
def test_the_built_in_model_opens_with_its_shapes(real_model: ModelSource) -> None:
    config = real_model.config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert config.has_fast_path
    assert config.eos_token_ids == (2,)
    assert real_model.name == "smollm2-135m"
    embedding = real_model.tensor("model.embed_tokens.weight")
    assert embedding.shape == (49152, 576)
    assert isinstance(real_model, GgufSource)
    stored = real_model.header.tensors["blk.7.attn_v.weight"]
    blocks = real_model.files[0].read(stored.offset, stored.nbytes).reshape(192, -1)
    wanted = gguf.quants.dequantize(blocks, Quant.Q4_1)
    np.testing.assert_array_equal(real_model.tensor("model.layers.7.self_attn.v_proj.weight").numpy(), wanted)
