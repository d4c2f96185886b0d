"""Quantized checkpoints in folders, as they are released: opened, loaded and run, against their dequantized models."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from model_files import tiny_model
from quantized_tensors import pack_awq, pack_gptq
from safetensors.torch import save_file
from tiny_models import Chain, hf_greedy, hf_logits
from transformers import AutoConfig, AutoModelForCausalLM

from swarm.errors import CorruptModel, UnsupportedModel
from swarm.types import LayerSpan
from swarm_kernels.device.device import INT4
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.models.native_format import native_dtype
from swarm_kernels.models.open import open_model
from swarm_kernels.models.safetensors import SafetensorsSource
from swarm_kernels.ops.base.layer_weights import LayerWeights, Mixture
from swarm_kernels.ops.cpu import binding
from swarm_kernels.ops.cpu.cpu_experts import PackedExperts
from swarm_kernels.ops.cpu.cpu_linear import PackedLinear
from swarm_kernels.runtime.llama_span import LlamaSpan
from swarm_kernels.runtime.load import load_span
from swarm_kernels.runtime.span import Span

Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
PROMPT = [(7 * i * i + 3) % 96 for i in range(23)]


def gptq(module: str, weight: torch.Tensor) -> Packed:
    return pack_gptq(module, weight, group=32)


def awq(module: str, weight: torch.Tensor) -> Packed:
    return pack_awq(module, weight, group=32)


def fp8(module: str, weight: torch.Tensor) -> Packed:
    """Blocks of 16 x 32."""
    grid = (-(-weight.shape[0] // 16), -(-weight.shape[1] // 32))
    scale = torch.full(grid, float(weight.abs().max()) / 448)
    wide = scale.repeat_interleave(16, 0)[: weight.shape[0]].repeat_interleave(32, 1)[:, : weight.shape[1]]
    stored = (weight / wide).to(torch.float8_e4m3fn)
    return {f"{module}.weight": stored, f"{module}.weight_scale_inv": scale}, stored.float() * wide


def int8(module: str, weight: torch.Tensor) -> Packed:
    scale = weight.abs().amax(1, keepdim=True) / 127
    stored = (weight / scale).round().to(torch.int8)
    return {f"{module}.weight": stored, f"{module}.weight_scale": scale}, stored.float() * scale


WEIGHTS = {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
FORMATS: dict[str, tuple[Callable[[str, torch.Tensor], Packed], dict[str, Any], torch.dtype]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}, INT4),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, INT4),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [16, 32]}, torch.int8),
    "int8": (
        int8,
        {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"0": WEIGHTS}},
        torch.int8,
    ),
}


def write(folder: Path, name: str, model: Any) -> None:
    """The projections of the layers packed, all else as it is; `model` becomes the dequantized one."""
    pack, config, _ = FORMATS[name]
    tensors: dict[str, torch.Tensor] = {}
    for key, value in model.state_dict().items():
        if "_proj.weight" in key:
            packed, dequantized = pack(key.removesuffix(".weight"), value)
            tensors |= packed
            value.copy_(dequantized)
        else:
            tensors[key] = value.clone()
    folder.mkdir()
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
    saved = model.config.to_dict() | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(saved), encoding="utf-8")


@pytest.mark.parametrize("name", FORMATS)
def test_a_llama_is_that_of_its_dequantized_weights(name: str, tmp_path: Path) -> None:
    model = tiny_model("llama")
    write(tmp_path / "m", name, model)
    with closing(open_model(str(tmp_path / "m"))) as source:
        wanted = model.state_dict()
        assert set(source.names()) == set(wanted)
        for key, weight in wanted.items():
            assert torch.equal(source.tensor(key).float(), weight), key
            assert source.shape(key) == tuple(weight.shape)
            assert source.nbytes(key) == source.tensor(key).nbytes
        chain = Chain(source, (1, 2))
        chain.open(b"s")
        found = chain.run([StepRequest(b"s", 0, len(PROMPT))], PROMPT)
        assert torch.allclose(found, hf_logits(model, PROMPT), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", FORMATS)
def test_it_is_served_in_its_own_format(name: str, tmp_path: Path) -> None:
    """Nearer to the dequantized model than a span that rounds the weights once more."""
    model = tiny_model("llama")
    write(tmp_path / "m", name, model)
    with closing(open_model(str(tmp_path / "m"))) as source:
        dtype = native_dtype(source)
        assert dtype == FORMATS[name][2]
        wanted = hf_logits(model, PROMPT)

        def error(weights: torch.dtype) -> float:
            chain = Chain(source, (2,), weights)
            chain.open(b"s")
            found = chain.run([StepRequest(b"s", 0, len(PROMPT))], PROMPT)
            return float((found - wanted).norm() / wanted.norm())

        assert error(dtype) < 0.1


def test_the_fingerprints_of_two_formats_differ(tmp_path: Path) -> None:
    hashes = set()
    for name in FORMATS:
        write(tmp_path / name, name, tiny_model("llama"))
        with closing(open_model(str(tmp_path / name))) as source:
            hashes.add(source.weight_hash)
    assert len(hashes) == len(FORMATS)


def test_a_missing_part_is_a_sentence(tmp_path: Path) -> None:
    model = tiny_model("llama")
    config = FORMATS["gptq"][1]
    write(tmp_path / "m", "gptq", model)
    settings = json.loads((tmp_path / "m" / "config.json").read_text(encoding="utf-8"))
    for changed, error in (({"bits": 2}, UnsupportedModel), ({"group_size": 64}, CorruptModel)):
        settings["quantization_config"] = config | changed
        (tmp_path / "m" / "config.json").write_text(json.dumps(settings), encoding="utf-8")
        with pytest.raises(error):
            open_model(str(tmp_path / "m"))


def test_fp8_weights_whose_config_names_no_scales_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "m", "fp8", tiny_model("llama"))
    settings = json.loads((tmp_path / "m" / "config.json").read_text(encoding="utf-8"))
    del settings["quantization_config"]
    (tmp_path / "m" / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    with closing(open_model(str(tmp_path / "m"))) as source, pytest.raises(UnsupportedModel, match="names no scales"):
        load_span(source, LayerSpan(0, 1), torch.float32)


def write_gpt_oss(folder: Path) -> Any:
    """Random experts in MXFP4, the rest in bf16; -> the model with its dequantized weights."""
    config = AutoConfig.for_model(
        "gpt_oss", hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, vocab_size=96, sliding_window=8,
    )  # fmt: skip
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    tensors: dict[str, torch.Tensor] = {}
    rng = torch.Generator().manual_seed(4)
    for key, value in model.state_dict().items():
        if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = value.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=rng, dtype=torch.uint8)
            tensors |= {f"{key}_blocks": blocks, f"{key}_scales": torch.full(blocks.shape[:-1], 121, dtype=torch.uint8)}
        else:
            tensors[key] = value.bfloat16()
            value.copy_(tensors[key])
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    saved = config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(saved), encoding="utf-8")
    with closing(open_model(str(folder))) as source:
        for key, value in model.state_dict().items():
            if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
                value.copy_(source.tensor(key))
    return model


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    """Experts in MXFP4 through transformers' layers, token for token what the dequantized model says."""
    model = write_gpt_oss(tmp_path / "m")
    with closing(open_model(str(tmp_path / "m"))) as source:
        chain = Chain(source, (1,))
        chain.open(b"s")
        found = chain.run([StepRequest(b"s", 0, len(PROMPT))], PROMPT)
        assert torch.allclose(found, hf_logits(model, PROMPT), atol=1e-3, rtol=1e-3)


def test_tokens_of_mxfp4_are_those_of_the_dequantized_model(tmp_path: Path) -> None:
    """In fp32, over three spans: prompt in pieces, then one token after another."""
    model = write_gpt_oss(tmp_path / "m")
    with closing(open_model(str(tmp_path / "m"))) as source:
        found = Chain(source, (1, 2)).greedy(b"s", PROMPT, 64, (12, 11))
    assert found == hf_greedy(model, PROMPT, 64)


def test_gpt_oss_is_served_in_mxfp4_as_it_is_stored(tmp_path: Path) -> None:
    """`--dtype auto`: numbers and biases of experts to the last bit, gates before values; the attention in bf16."""
    model = write_gpt_oss(tmp_path / "m")
    with closing(open_model(str(tmp_path / "m"))) as source:
        assert native_dtype(source) == INT4
        chain = Chain(source, (1,), INT4)
        chain.open(b"s")
        found = chain.run([StepRequest(b"s", 0, len(PROMPT))], PROMPT)
        wanted = hf_logits(model, PROMPT)
        assert (found - wanted).norm() < 0.03 * wanted.norm()  # of the activations' 8 bits and the head's
        layer = first_layer(chain.spans[0])
        assert isinstance(layer.mlp, Mixture)
        experts = layer.mlp.experts
        assert isinstance(experts, PackedExperts)
        state = {name: value for name, value in model.state_dict().items() if name.startswith("model.layers.0.")}
        for expert in range(4):
            up, down = (linears[expert] for linears in (experts.first, experts.second))
            assert (up.desc.format, down.desc.format) == (binding.MXFP4, binding.MXFP4)
            stored = state["model.layers.0.mlp.experts.gate_up_proj"][expert].T
            assert torch.equal(up.embedding_rows(torch.arange(128)), torch.cat((stored[::2], stored[1::2])))
            bias = state["model.layers.0.mlp.experts.gate_up_proj_bias"][expert]
            assert up.bias is not None
            assert torch.equal(up.bias, torch.cat((bias[::2], bias[1::2])))
            wanted_down = state["model.layers.0.mlp.experts.down_proj"][expert].T
            assert torch.equal(down.embedding_rows(torch.arange(64)), wanted_down)
        assert isinstance(layer.attention.qkv, PackedLinear)
        assert layer.attention.qkv.desc.format == binding.BF16


def test_an_expert_of_a_tensor_of_all_is_read_without_the_others(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path / "m")
    name = "model.layers.1.mlp.experts.down_proj"
    with closing(open_model(str(tmp_path / "m"))) as source:
        assert isinstance(source, SafetensorsSource)
        before, size = source.files[0].bytes_read, 64 * 2 * 17  # outputs, groups, bytes of one
        part = source.sliced(name)[2:3]
        assert torch.equal(part, source.tensor(name)[2:3])
        assert source.files[0].bytes_read - before == size + 4 * size
        assert source.as_stored(name, 3) is not None
        assert source.files[0].bytes_read - before == 6 * size
        assert source.as_stored(name) is None
        assert source.as_stored("model.norm.weight") is None


def test_rows_of_a_matrix_are_read_without_the_others(tmp_path: Path) -> None:
    model = write_gpt_oss(tmp_path / "m")
    name = "model.layers.1.self_attn.q_proj.weight"
    with closing(open_model(str(tmp_path / "m"))) as source:
        assert isinstance(source, SafetensorsSource)
        before = source.files[0].bytes_read
        matrix = source.sliced(name)
        assert source.files[0].bytes_read == before
        assert (tuple(matrix.shape), matrix.dtype) == (source.shape(name), torch.bfloat16)
        assert torch.equal(matrix[5:9].float(), model.state_dict()[name][5:9])
        assert source.files[0].bytes_read - before == 4 * 64 * 2
        assert matrix[7:7].shape == (0, 64)
        assert torch.equal(matrix[60:1000], source.tensor(name)[60:])


def first_layer(span: Span) -> LayerWeights:
    assert isinstance(span, LlamaSpan)
    return span.weights[0]
