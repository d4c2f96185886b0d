"""Checkpoints of fp8 blocks and NF4 in spans of `--dtype auto`: as they are stored, beside their dequantized models."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_folders import write
from tiny_models import Chain, hf_greedy, hf_logits

from swarm.types import LayerSpan
from swarm_kernels.calibration.cost_curve import verify_layer
from swarm_kernels.calibration.random_weights import RandomWeights
from swarm_kernels.device.device import CODES4, FLOAT8, INT4
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.models.native_format import MatrixFormats, native_dtype
from swarm_kernels.models.open import open_model
from swarm_kernels.ops.base.layer_weights import Linear, Mixture
from swarm_kernels.ops.cpu import binding
from swarm_kernels.ops.cpu.cpu_experts import PackedExperts
from swarm_kernels.ops.cpu.cpu_linear import PackedLinear
from swarm_kernels.runtime.hf_linears import PackedModule
from swarm_kernels.runtime.hf_span import HfSpan
from swarm_kernels.runtime.llama_span import LlamaSpan
from swarm_kernels.runtime.load import load_span
from swarm_kernels.runtime.span import Span
from swarm_node.membership.memory_plan import ModelMemory

PROMPT = [(7 * i * i + 3) % 96 for i in range(23)]
FORMATS = {"fp8": (torch.int8, FLOAT8, binding.FP8), "nf4": (INT4, CODES4, binding.NF4)}
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3_moe": {
        "hidden_size": 192, "moe_intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
    },
    "deepseek_v3": {
        "hidden_size": 192, "intermediate_size": 256, "moe_intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 128, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1,
    },
}  # fmt: skip


def formats_in(span: Span) -> set[int]:
    """Of the linear layers and experts of a span's layers."""
    linears: list[Linear] = []

    def add_experts(experts: object) -> None:
        assert isinstance(experts, PackedExperts)
        linears.extend([*experts.first, *experts.second])

    if isinstance(span, LlamaSpan):
        for layer in span.weights:
            linears += [layer.attention.qkv, layer.attention.o]
            if isinstance(layer.mlp, Mixture):
                add_experts(layer.mlp.experts)
            else:
                linears += [layer.mlp.gate_up, layer.mlp.down]
    else:
        assert isinstance(span, HfSpan)
        for module in (part for index in span.layers for part in span.layer(index).modules()):
            if isinstance(module, PackedModule):
                linears.append(module.linear)
            if hasattr(module, "swarm_experts"):
                add_experts(module.swarm_experts.compiled)
    return {linear.desc.format for linear in linears if isinstance(linear, PackedLinear)}


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("form", FORMATS)
def test_a_checkpoint_is_served_as_it_is_stored(form: str, kind: str, tmp_path: Path) -> None:
    model = write(tmp_path, form, kind, num_hidden_layers=2, vocab_size=96, **SIZES[kind])
    dtype, native, packed = FORMATS[form]
    with closing(open_model(str(tmp_path / "packed"))) as source:
        wanted = model.state_dict()
        name = "model.layers.0.self_attn.o_proj.weight"
        stored = source.as_stored(name)
        assert stored is not None
        assert torch.equal(stored.embedding_rows(torch.arange(len(wanted[name]))), wanted[name])
        assert torch.equal(source.tensor(name).float(), wanted[name])
        assert (native_dtype(source), source.native(name)) == (dtype, native)
        assert MatrixFormats.of(source, dtype)[name] == native
        chain = Chain(source, (1,), dtype)
        for span in chain.spans:
            assert formats_in(span) == {packed}
            if isinstance(span, LlamaSpan):
                verify_layer(span, source)
        chain.open(b"s")
        found = chain.run([StepRequest(b"s", 0, len(PROMPT))], PROMPT)
        logits = hf_logits(model, PROMPT)
        assert (found - logits).norm() < 0.05 * logits.norm()  # of bf16 or 8 bits of inputs, and the head's 8 bits


@pytest.mark.parametrize("form", FORMATS)
def test_tokens_in_fp32_are_those_of_the_dequantized_model(form: str, tmp_path: Path) -> None:
    model = write(tmp_path, form, "llama", num_hidden_layers=3, vocab_size=96, **SIZES["llama"])
    with closing(open_model(str(tmp_path / "packed"))) as source:
        found = Chain(source, (1, 2)).greedy(b"s", PROMPT, 64, (12, 11))
    assert found == hf_greedy(model, PROMPT, 64)


def test_random_weights_stand_for_fp8_in_its_format(tmp_path: Path) -> None:
    """So that the time of a layer that is measured before it is fetched is that of the layer that will be served."""
    write(tmp_path, "fp8", "qwen3_moe", num_hidden_layers=2, vocab_size=96, **SIZES["qwen3_moe"])
    with closing(open_model(str(tmp_path / "packed"))) as source:
        assert formats_in(load_span(RandomWeights(source), LayerSpan(0, 1), torch.int8)) == {binding.FP8}


@pytest.mark.parametrize("form", FORMATS)
def test_memory_is_planned_for_what_is_loaded(form: str, tmp_path: Path) -> None:
    sizes = SIZES["llama"] | {"hidden_size": 512, "intermediate_size": 1024}
    write(tmp_path, form, "llama", num_hidden_layers=2, vocab_size=96, **sizes)
    with closing(open_model(str(tmp_path / "packed"))) as source:
        dtype = native_dtype(source)
        (span,) = Chain(source, (), dtype).spans
        planned = 2 * ModelMemory.of(source, dtype).layer
        assert isinstance(span, LlamaSpan)
        assert 0.97 < sum(layer.nbytes for layer in span.weights) / planned < 1.03
