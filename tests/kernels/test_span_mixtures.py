"""Mixtures of experts on the compiled path against transformers: families, ways to store experts, fewer bits, hostile
configs and tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from compiled_families import goes_to_transformers, has_the_defaults_of_its_class, is_transformers
from tiny_models import Chain, ModelTensors, hf_logits
from zoo.compare import compare
from zoo.families import FAMILIES, YARN
from zoo.shrink import tiny_config
from zoo.weights import random_model

from swarm.errors import CorruptModel, ResourceError
from swarm.types import LayerSpan
from swarm_kernels.calibration.cost_curve import verify_layer
from swarm_kernels.device.device import INT4
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.models.hf_config import model_config
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base import int4_linear
from swarm_kernels.ops.base.layer_weights import Mixture
from swarm_kernels.runtime.hf_span import HfSpan
from swarm_kernels.runtime.llama_span import LlamaSpan
from swarm_kernels.runtime.load import load_span

KINDS = ["glm4_moe", "gpt_oss", "granitemoe", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"]
SLIDING, FULL = "sliding_attention", "full_attention"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in KINDS},
    "qwen2_moe, window": FAMILIES["qwen2_moe, window"],
    "qwen2_moe, dense layers": ("qwen2_moe", {"mlp_only_layers": [0], "shared_expert_intermediate_size": 48,
                                              "norm_topk_prob": True, "qkv_bias": False}),
    "qwen3_moe, every other layer": ("qwen3_moe", {"decoder_sparse_step": 2, "norm_topk_prob": True}),
    "qwen3_moe, window, biases": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 9,
                                                "attention_bias": True}),
    "mixtral, window": ("mixtral", {"sliding_window": 9}),
    "mixtral, gelu by tanh": ("mixtral", {"hidden_act": "gelu_pytorch_tanh"}),
    "gpt_oss, yarn": ("gpt_oss", {"rope_parameters": {**YARN, "truncate": False}, "sliding_window": 9,
                                  "swiglu_limit": 0.8, "swiglu_alpha": 1.2}),
    "gpt_oss, no biases": ("gpt_oss", {"attention_bias": False}),
    "glm4_moe, one group": ("glm4_moe", {"n_group": 1, "norm_topk_prob": False, "use_qk_norm": True,
                                         "attention_bias": True, "routed_scaling_factor": 1.8}),
    "glm4_moe, groups, two shared": ("glm4_moe", {"n_group": 4, "topk_group": 2, "n_shared_experts": 2,
                                                  "first_k_dense_replace": 2}),
    "granitemoe, scales": ("granitemoe", {"logits_scaling": 2.0, "residual_multiplier": 0.5,
                                          "embedding_multiplier": 3.0, "attention_multiplier": 0.3,
                                          "attention_bias": True}),
    "olmoe, normalized": ("olmoe", {"norm_topk_prob": True, "attention_bias": True}),
    "minimax_m2, partial rotary": ("minimax_m2", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5}}),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_layers_trees_and_logits_are_transformers(name: str) -> None:
    kind, changes = VARIANTS[name]
    is_transformers(tiny_config(kind, **changes))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_generations_survive_cuts_kills_and_transfers(kind: str) -> None:
    is_transformers(tiny_config(kind), thorough=True)


# --- configs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_those_of_transformers_class(kind: str) -> None:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}}
    # gpt-oss's own default is YARN with a base of its own, and on the general path
    config = has_the_defaults_of_its_class(kind, num_attention_heads=16, **(rope if kind == "gpt_oss" else {}))
    assert config.decoder is not None
    assert config.decoder.mixture is not None


@pytest.mark.parametrize(
    ("kind", "changes", "field"),
    [
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act"),
        ("mixtral", {"num_experts": 3}, "num_local_experts"),
        ("olmoe", {"clip_qkv": 4.0}, "clip_qkv"),
        ("olmoe", {"head_dim": 8}, "head_dim"),
        ("gpt_oss", {"rope_parameters": None}, "rope_parameters"),
        ("gpt_oss", {"layer_types": [SLIDING]}, "layer_types"),
        ("glm4_moe", {"n_group": 8, "topk_group": 4}, "n_group"),
        ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm"),
        ("qwen3_moe", {"layer_types": [SLIDING] * 4}, "layer_types"),
        ("granitemoe", {"sliding_window": 8}, "sliding_window"),
    ],
)
def test_other_values_go_to_transformers(kind: str, changes: dict[str, Any], field: str) -> None:
    goes_to_transformers(kind, changes, field)


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0"),
        ("mixtral", {"num_local_experts": 1 << 20}, "num_local_experts is 1048576"),
        ("mixtral", {"num_experts_per_tok": 9}, "cannot take 9 of 8 experts"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("qwen3_moe", {"mlp_only_layers": "all"}, "mlp_only_layers is 'all'"),
        ("qwen2_moe", {"moe_intermediate_size": -1}, "moe_intermediate_size is -1"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
        ("glm4_moe", {"n_group": 3}, "cannot be chosen"),
        ("glm4_moe", {"topk_group": 3}, "cannot be chosen"),
        ("glm4_moe", {"num_experts_per_tok": 5}, "cannot be chosen"),
        ("gpt_oss", {"swiglu_limit": -7.0}, "swiglu_limit is -7.0"),
        ("minimax_m2", {"rotary_dim": 99, "rope_parameters": {"rope_theta": 1e4}}, "partial_rotary_factor"),
    ],
)
def test_impossible_configs_are_refused_in_a_sentence(kind: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CorruptModel, match=sentence):
        model_config({**tiny_config(kind).to_dict(), **changes})


def test_the_fraction_of_minimax_that_is_rotated_has_an_older_name() -> None:
    stored = tiny_config("minimax_m2").to_dict()
    stored["rope_parameters"] = None
    verdict = compare(
        tiny_config("minimax_m2", rotary_dim=8), thorough=False, stored={**stored, "rotary_dim": 8, "use_qk_norm": True}
    )
    assert verdict.word == "equal", (verdict.refused, verdict.wrong)
    assert verdict.fast


# --- how experts are stored -----------------------------------------------------------------------------------------

APART = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "minimax_m2": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen2_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "glm4_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}


def apart(kind: str, source: ModelTensors) -> ModelTensors:
    """The names and tensors that checkpoints of this kind have."""
    block, (gate, up, down) = APART[kind]
    for name in [name for name in source.names() if ".mlp." in name]:
        tensor, stored = source.tensor(name), name.replace(".mlp.", f".{block}.")
        source.forget(name)
        if ".experts." not in name:
            source.replace(stored, tensor)
            continue
        prefix = stored.rsplit(".", 1)[0]
        for expert, weight in enumerate(tensor):
            parts = {gate: weight.chunk(2)[0], up: weight.chunk(2)[1]} if "gate_up" in name else {down: weight}
            for part, matrix in parts.items():
                source.replace(f"{prefix}.{expert}.{part}.weight", matrix.clone())
    return source


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, INT4], ids=str)
@pytest.mark.parametrize("kind", APART)
def test_experts_that_are_stored_apart_are_read_one_by_one(kind: str, dtype: torch.dtype) -> None:
    model = random_model(tiny_config(kind))
    words = list(range(3, 23))
    logits = []
    for source in (ModelTensors(model), apart(kind, ModelTensors(model))):
        chain = Chain(source, (2,), dtype)
        chain.open(b"a")
        logits.append(chain.run([StepRequest(b"a", 0, 20)], words))
        assert all(isinstance(span, LlamaSpan) for span in chain.spans)
    assert torch.equal(*logits)


def test_granite_keeps_its_experts_together_under_names_of_its_own() -> None:
    model = random_model(tiny_config("granitemoe"))
    source, names = ModelTensors(model), ("input_linear.weight", "output_linear.weight", "router.layer.weight")
    for name in source.names():
        for ours, theirs in zip(("experts.gate_up_proj", "experts.down_proj", "router.weight"), names, strict=True):
            if name.endswith(ours):
                source.replace(name.replace(ours, theirs), source.tensor(name))
                source.forget(name)
    assert not any("experts" in name for name in source.names())
    chain = Chain(source, (1,))
    chain.open(b"a")
    got = chain.run([StepRequest(b"a", 0, 12)], list(range(12)))
    want = hf_logits(model, list(range(12)))
    assert torch.allclose(got, want, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("lost", ["experts.3.w1.weight", "experts.0.w1.weight", "gate.weight", "experts.7.w2.weight"])
def test_missing_and_misshapen_tensors_are_named(lost: str) -> None:
    source = apart("mixtral", ModelTensors(random_model(tiny_config("mixtral"))))
    name = f"model.layers.1.block_sparse_moe.{lost}"
    kept = source.tensor(name)
    for dtype in (torch.float32, torch.int8):
        source.forget(name)
        with pytest.raises((CorruptModel, KeyError)):
            load_span(source, LayerSpan(1, 2), dtype)
        source.replace(name, torch.zeros(3, 5))
        with pytest.raises(CorruptModel, match="has shape"):
            load_span(source, LayerSpan(1, 2), dtype)
        source.replace(name, kept)
    load_span(source, LayerSpan(1, 2), torch.int8)


@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"])
def test_misshapen_experts_in_one_tensor_are_named(part: str) -> None:
    source = ModelTensors(random_model(tiny_config("gpt_oss")))
    name = f"model.layers.1.mlp.experts.{part}"
    for wrong in (torch.zeros(3, 5), source.tensor(name)[:-1], source.tensor(name).transpose(0, 1).contiguous()):
        source.replace(name, wrong)
        with pytest.raises(CorruptModel, match=part):
            load_span(source, LayerSpan(1, 2), torch.float32)


def test_4_bits_of_a_checkpoint_are_taken_over_expert_by_expert() -> None:
    """Native 4 bits stay, 8 bits become 8."""
    source = apart("mixtral", ModelTensors(random_model(tiny_config("mixtral"))))
    source.native = lambda name: INT4 if ".w1." in name or ".w3." in name else torch.int8  # type: ignore[method-assign]
    asked: list[str] = []
    source.as_stored = lambda name: asked.append(name)  # type: ignore[method-assign,func-returns-value]
    span = load_span(source, LayerSpan(0, 1), INT4)
    assert isinstance(span, LlamaSpan)
    mixture = span.weights[0].mlp
    assert isinstance(mixture, Mixture)
    assert {name.rsplit(".", 2)[1] for name in asked} == {"w1"} or len(asked) >= 8  # none is given: rounded instead
    eight = load_span(source, LayerSpan(0, 1), torch.int8)
    assert isinstance(eight, LlamaSpan)
    assert mixture.experts.nbytes < eight.weights[0].mlp.nbytes


# --- fewer bits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, INT4], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_in_fewer_bits_it_is_near_the_model_and_batches_change_no_bit(kind: str, dtype: torch.dtype) -> None:
    model = random_model(tiny_config(kind, **({"attention_multiplier": 0.25} if kind == "granitemoe" else {})))
    if dtype == INT4:  # what 4 bits cost depends on the weights; this one is of weights they hold
        for name, weight in model.named_parameters():
            if "_proj" in name and name.endswith("weight") and weight.dim() == 2:
                weight.data = int4_linear.quantize_linear(weight.data).embedding_rows(torch.arange(weight.shape[0]))
    source = ModelTensors(model)
    words = [(7 * i * i + 3) % 200 for i in range(60)]
    outputs = []
    for chunks in ((60,), (1,) * 5 + (40, 15)):
        chain, done, rows = Chain(source, (2,), dtype), 0, []
        chain.open(b"s")
        for size in chunks:
            rows.append(chain.run([StepRequest(b"s", done, size)], words[done : done + size]))
            done += size
        outputs.append(torch.cat(rows))
    assert torch.equal(*outputs)
    want = hf_logits(model, words)
    distances = (outputs[0] - want).norm(dim=1) / want.norm(dim=1)
    assert distances.median() < (0.3 if dtype == INT4 else 0.1)  # experts in 4 bits are rounded here


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, INT4], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_span_passes_the_check_of_its_machine(kind: str, dtype: torch.dtype) -> None:
    source = ModelTensors(random_model(tiny_config(kind)))
    for layers in (LayerSpan(0, 2), LayerSpan(1, 3)):
        verify_layer(load_span(source, layers, dtype), source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("kind", ["glm4_moe", "qwen2_moe", "gpt_oss"])
def test_a_machine_that_computes_mixtures_wrongly_is_found(kind: str, dtype: torch.dtype) -> None:
    """In whatever part of one; the first layer of glm4_moe has none."""
    source = ModelTensors(random_model(tiny_config(kind)))
    span = load_span(source, LayerSpan(0, 2), dtype)
    assert isinstance(span, LlamaSpan)
    place = 1 if kind == "glm4_moe" else 0
    sound = span.weights[place]
    mixture = sound.mlp
    assert isinstance(mixture, Mixture)
    other = load_span(source, LayerSpan(2, 3), dtype)
    assert isinstance(other, LlamaSpan)
    theirs = other.weights[0].mlp
    assert isinstance(theirs, Mixture)
    breaks: list[dict[str, Any]] = [
        {"router": theirs.router},
        {"experts": theirs.experts},
        {"routing": replace(mixture.routing, scale=1.5)},
    ]
    if mixture.shared is not None:
        breaks.append({"shared": None, "shared_gate": None})
    if mixture.shared_gate is not None:
        breaks.append({"shared_gate": dispatch.pack_linear(torch.ones(1, 64))})
    for broken in breaks:
        span.weights[place] = replace(sound, mlp=replace(mixture, **broken))
        with pytest.raises(ResourceError, match=f"layer {place} .*must not join"):
            verify_layer(span, source)
    span.weights[place] = sound
    verify_layer(span, source)


def test_a_gpu_runs_mixtures_on_transformers_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no kernel of ours groups rows by expert."""
    loaded: list[torch.device] = []

    def load(source: Any, layers: Any, dtype: Any, device: torch.device, progress: Any) -> Any:
        loaded.append(device)
        raise CorruptModel("that was all")

    monkeypatch.setattr(HfSpan, "load", load)
    source = ModelTensors(random_model(tiny_config("qwen3_moe")))
    with pytest.raises(CorruptModel, match="that was all"):
        load_span(source, LayerSpan(0, 1), torch.bfloat16, "cuda:0")
    assert [device.type for device in loaded] == ["cuda"]
