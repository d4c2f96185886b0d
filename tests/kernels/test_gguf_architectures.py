"""GGUF files of every architecture that is read: transformers' tokens and logits, and the tensors they were made of."""

from __future__ import annotations

import contextlib
import random
import re
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from gguf_converter import ARCHITECTURES, convert
from tiny_models import hf_greedy, hf_logits
from zoo.compare import Pieces, text
from zoo.shrink import tiny_config
from zoo.weights import random_model

from swarm.errors import CorruptModel, ModelError, UnsupportedModel
from swarm.types import LayerSpan
from swarm_kernels.device.device import INT4
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.models.gguf import GgufSource
from swarm_kernels.models.gguf_types import architecture
from swarm_kernels.models.gguf_types.four_bits import four_bits_from_gguf
from swarm_kernels.models.gguf_types.table import ARCHITECTURES as READ
from swarm_kernels.models.open import open_model
from swarm_kernels.ops import dispatch
from swarm_kernels.runtime.load import load_span

_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
_MSCALE = {"mscale": 0.7, "mscale_all_dim": 0.7}
_LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5],
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "original_max_position_embeddings": 128,
    "partial_rotary_factor": 0.75,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_PHI_MOE = {
    "rope_type": "longrope", "rope_theta": 1e4, "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7], "original_max_position_embeddings": 4096,
    "short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122,
}  # fmt: skip
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"sliding_window": None}),
    "qwen2moe": ("qwen2_moe", {}),
    "qwen3moe": ("qwen3_moe", {"norm_topk_prob": True, "sliding_window": None}),
    "gpt-oss": ("gpt_oss", {"rope_parameters": {**_YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}}),
    "deepseek v2": ("deepseek_v2", {"n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy"}),
    "deepseek v2 lite": (
        "deepseek_v2",
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_parameters": {**_YARN, **_MSCALE}},
    ),
    "deepseek v3": ("deepseek_v3", {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 7, "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3, window": ("phi3", {}),
    "phi3, longrope": (
        "phi3", {"sliding_window": None, "rope_parameters": _LONG, "original_max_position_embeddings": 128},
    ),
    "granite": (
        "granite",
        {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 4.0},
    ),
    "granitemoe": ("granitemoe", {"attention_multiplier": 0.2, "residual_multiplier": 0.4}),
    "granitemoe, shared": ("granitemoeshared", {"shared_intermediate_size": 40, "attention_multiplier": 0.2}),
    "glm4": ("glm4", {"attention_bias": True}),
    "glm4moe": ("glm4_moe", {"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5}),
    "seed_oss": ("seed_oss", {}),
    "seed_oss, other biases": ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    "olmo2": ("olmo2", {"head_dim": None}),
    "olmo3": ("olmo3", {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}),
    "olmoe": ("olmoe", {"rms_norm_eps": 1e-5}),
    "smollm3": ("smollm3", {}),
    "llama4": ("llama4_text", {"attention_chunk_size": 8192, "rope_parameters": _LLAMA3}),
    "minimax-m2": ("minimax_m2", {"rope_parameters": _HALF}),
    "phimoe": ("phimoe", {"rms_norm_eps": 1e-5, "sliding_window": None}),
    "phimoe, released": (
        "phimoe",
        {"attention_bias": True, "lm_head_bias": True, "max_position_embeddings": 1 << 17, "sliding_window": 1 << 17,
         "rope_parameters": _PHI_MOE},
    ),
    "mimo2": ("mimo_v2_flash", {"head_dim": 24}),
    "lfm2": ("lfm2", {"block_auto_adjust_ff_dim": False}),
    "lfm2moe": ("lfm2_moe", {}),
}  # fmt: skip


def tiny(name: str) -> Any:
    kind, changes = CASES[name]
    changes = dict(changes)
    if changes.get("head_dim", 0) is None:
        del changes["head_dim"]
    return random_model(tiny_config(kind, **changes))


def _skip_if_states_are_refused(pieces: Pieces) -> None:
    """Short convolutions are read from GGUF, whether a span runs them or not."""
    if "conv" not in (pieces.source.config.hf.get("layer_types") or ()):
        return
    try:
        pieces.chain(())
    except UnsupportedModel as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_logits_are_those_of_the_original(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    words = text(60, 3, 256)
    with closing(open_model(str(convert(model, tmp_path / "m.gguf")))) as source:
        pieces = Pieces(source)
        layers = source.config.num_layers
        _skip_if_states_are_refused(pieces)
        ours = pieces.chain((layers // 2,)).run(StepRequest(b"a", 0, len(words)), words)
        theirs = hf_logits(model, words)
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-4
        expected = hf_greedy(model, words[:40], 12)
        assert pieces.chain((1, layers - 1)).greedy(words[:40], 12) == expected


@pytest.mark.parametrize("name", ["deepseek v2", "deepseek v3"])
def test_older_files_keep_keys_and_values_of_latent_attention_in_one_matrix(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    split, whole = (convert(model, tmp_path / f"{split}.gguf", split_latents=split) for split in (True, False))
    with closing(open_model(str(split))) as newer, closing(open_model(str(whole))) as older:
        assert newer.config == older.config
        assert newer.names() == older.names()
        for tensor in newer.names():
            assert torch.equal(newer.tensor(tensor), older.tensor(tensor))


@pytest.mark.parametrize("name", CASES)
def test_tensors_and_sizes_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    model.save_pretrained(tmp_path / "hf")
    with (
        closing(open_model(str(convert(model, tmp_path / "m.gguf")))) as source,
        closing(open_model(str(tmp_path / "hf"))) as original,
    ):
        assert set(source.names()) == set(original.names()) - {"lm_head.weight"} | set(source.names()) & {
            "lm_head.weight"
        }
        for tensor in source.names():
            ours, theirs = source.tensor(tensor), original.tensor(tensor)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-7 if "gemma" in name else 0)
            assert (source.shape(tensor), source.nbytes(tensor)) == (tuple(ours.shape), ours.nbytes)


def test_every_name_is_one_of_llama_cpp() -> None:
    """gguf-py says which tensors an architecture has. Older files leave the suffix of the routers' biases out."""
    names = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()} | {"mistral": gguf.MODEL_ARCH.LLAMA}
    for name, read in READ.items():
        known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[names[name]]}
        sources = {source for rule in read.rules for source in rule.sources}
        stems = {re.sub(r"\.(weight|bias)$", "", source) for source in sources}
        assert {"blk.{bid}." + stem for stem in stems} <= known, name
        assert {re.sub(r"\.(weight|bias)$", "", edge) for edge in read.edges} <= known | {"output"}, name
    assert {gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[arch]] for arch in ARCHITECTURES.values()} | {"mistral"} == set(READ)


@pytest.mark.parametrize("quant", [Quant.Q4_0, Quant.Q4_1, Quant.Q8_0])
def test_an_expert_is_read_without_the_others(quant: Quant, tmp_path: Path) -> None:
    model = random_model(tiny_config("qwen3_moe", norm_topk_prob=True, moe_intermediate_size=32, sliding_window=None))
    path = convert(model, tmp_path / "m.gguf", quant)
    with closing(GgufSource(path)) as source:
        stored = source.header.tensors["blk.1.ffn_up_exps.weight"]
        everything = source.files[0].read(stored.offset, stored.nbytes)
        wanted = gguf.quants.dequantize(everything.reshape(8, 32, -1), quant)
        before = source.files[0].bytes_read
        name = "model.layers.1.mlp.experts.5.up_proj.weight"
        assert torch.equal(source.tensor(name), torch.from_numpy(wanted[5]))
        assert source.files[0].bytes_read - before == stored.nbytes // 8
        assert source.native(name) == (torch.int8 if quant == Quant.Q8_0 else INT4)
        each = everything.reshape(8, -1)[5].copy()
        packed, expected = source.as_stored(name), four_bits_from_gguf(each, stored.ggml_type, (32, 64))
        assert (packed is None) == (expected is None) == (quant == Quant.Q8_0)
        if packed is not None and expected is not None:
            assert torch.equal(packed.numbers, expected.numbers)
            assert torch.equal(packed.scale, expected.scale)


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss", "llama4", "granitemoe", "deepseek v3"])
def test_quantized_mixtures_compute_with_what_is_stored(name: str, tmp_path: Path) -> None:
    """The tokens of a model whose weights are those that gguf-py unpacks."""
    kind, changes = CASES[name]
    wide = {"moe_intermediate_size": 32, "intermediate_size": 64, "intermediate_size_mlp": 64}
    config = tiny_config(kind, **changes)
    model = random_model(
        tiny_config(kind, **changes, **{key: size for key, size in wide.items() if hasattr(config, key)})
    )
    words = text(50, 3, 256)
    with closing(open_model(str(convert(model, tmp_path / "m.gguf", Quant.Q8_0)))) as source:
        ours = Pieces(source).chain((2,)).run(StepRequest(b"a", 0, len(words)), words)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    plain = gguf.GGUFWriter(tmp_path / "plain.gguf", reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            plain.add_key_value(key, field.contents(), field.types[0], *field.types[1:2])
    for tensor in reader.tensors:
        plain.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    plain.write_header_to_file()
    plain.write_kv_data_to_file()
    plain.write_tensors_to_file()
    plain.close()
    with closing(open_model(str(tmp_path / "plain.gguf"))) as unpacked:
        theirs = Pieces(unpacked).chain((2,)).run(StepRequest(b"a", 0, len(words)), words)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["qwen3moe", "mixtral", "deepseek v3", "llama4", "phi3, window", "glm4"])
def test_four_bits_are_taken_over_as_they_are(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of `Q4_0` reach the kernels without another rounding, experts among them."""
    rounded = []
    round_weights = dispatch.quantize_linear

    def recording(weight: torch.Tensor, bias: torch.Tensor | None = None, bits: int = 8) -> Any:
        rounded.append((bits, tuple(weight.shape)))
        return round_weights(weight, bias, bits=bits)

    monkeypatch.setattr(dispatch, "quantize_linear", recording)
    kind, changes = CASES[name]
    wide = {"moe_intermediate_size": 32, "intermediate_size": 64, "intermediate_size_mlp": 64, "q_lora_rank": 32}
    wide["v_head_dim"] = 16
    config = tiny_config(kind, **changes)
    changes = changes | {key: size for key, size in wide.items() if hasattr(config, key)}
    model = random_model(tiny_config(kind, **changes))
    path = convert(model, tmp_path / "m.gguf", Quant.Q4_0, split_latents=False)  # newer files hold the keys transposed
    with closing(open_model(str(path))) as source:
        load_span(source, LayerSpan(1, 3), INT4)
    assert [shape for bits, shape in rounded if bits == 4] == []


def added(key: str, value: float) -> Any:
    return lambda writer, arch: writer.add_float32(f"{arch}.{key}", value)


def test_what_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny("qwen3moe")
    path = convert(model, tmp_path / "a.gguf", change=added("attn_logit_softcapping", 30.0))
    with pytest.raises(UnsupportedModel, match=r"'qwen3moe\.attn_logit_softcapping', which is not read"):
        open_model(str(path))
    path = convert(model, tmp_path / "b.gguf", change=added("expert_weights_scale", 2.5))
    with pytest.raises(UnsupportedModel, match="scales its experts"):
        open_model(str(path))

    def extra(writer: gguf.GGUFWriter, arch: str) -> None:
        writer.add_tensor("blk.2.attn_sinks.weight", torch.zeros(4).numpy())

    with pytest.raises(UnsupportedModel, match=r"a tensor 'blk\.2\.attn_sinks\.weight'"):
        open_model(str(convert(model, tmp_path / "c.gguf", change=extra)))

    def other(writer: gguf.GGUFWriter, arch: str) -> None:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)

    with pytest.raises(UnsupportedModel, match="routes to its experts otherwise"):
        open_model(str(convert(tiny("minimax-m2"), tmp_path / "d.gguf", change=other)))


@pytest.mark.parametrize("count", [4, 9, 4097, (1 << 32) - 1])
@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss", "mixtral"])
def test_a_number_of_experts_that_the_tensors_do_not_have(name: str, count: int, tmp_path: Path) -> None:
    def wrong(writer: gguf.GGUFWriter, arch: str) -> None:
        writer.add_expert_count(count)

    with pytest.raises(CorruptModel, match=r"holds 8 experts, but its metadata says|no usable|num_local_experts is"):
        open_model(str(convert(tiny(name), tmp_path / "m.gguf", change=wrong)))


def test_a_tensor_of_a_split_pair_alone_and_wrong_shapes(tmp_path: Path) -> None:
    whole = convert(tiny("deepseek v3"), tmp_path / "m.gguf").read_bytes()
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(whole.replace(b"blk.1.attn_v_b.weight", b"blk.9.attn_v_b.weight"))
    with pytest.raises(CorruptModel, match=r"layer 1 has only a part of attn_k_b\.weight, attn_v_b\.weight"):
        open_model(str(alone))
    name = b"blk.1.attn_v_b.weight"
    at = whole.index(name) + len(name) + 4
    sizes = struct.unpack_from("<3Q", whole, at)
    swapped = struct.pack("<3Q", sizes[2], sizes[1], sizes[0])
    alone.write_bytes(whole[:at] + swapped + whole[at + 24 :])
    with pytest.raises(CorruptModel, match="which does not fit the others"):
        open_model(str(alone))


def test_a_flood_of_experts_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "_MAX_VIEWS", 100)
    with pytest.raises(CorruptModel, match="claims more than 100 tensors and experts"):
        open_model(str(convert(tiny("qwen3moe"), tmp_path / "m.gguf")))


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek v3", "granitemoe, shared", "phi3, longrope", "qwen2moe"])
def test_no_damage_to_the_header_does_worse_than_a_model_error(name: str, tmp_path: Path) -> None:
    path = convert(tiny(name), tmp_path / "m.gguf")
    whole = path.read_bytes()
    with closing(GgufSource(path)) as source:
        end = min(tensor.offset for tensor in source.header.tensors.values())
    rng = random.Random(0)
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(end)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        path.write_bytes(data)
        with contextlib.suppress(ModelError):
            open_model(str(path)).close()
