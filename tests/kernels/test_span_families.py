"""The families on the compiled path against transformers: their variants, their configs in old spellings, quantized."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled_families import goes_to_transformers, has_the_defaults_of_its_class, is_transformers
from tiny_models import Chain, ModelTensors, hf_logits
from zoo.families import FAMILIES, LONG, YARN
from zoo.shrink import LAYERS, tiny_config
from zoo.weights import random_model

from swarm.types import LayerSpan
from swarm_kernels.calibration.cost_curve import verify_layer
from swarm_kernels.device.device import INT4
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.models.config import FAST_PATH_ARCHITECTURES
from swarm_kernels.models.mixture_families import MIXTURE_FAMILIES
from swarm_kernels.models.tensor_shapes import check_shapes
from swarm_kernels.ops.base import int4_linear
from swarm_kernels.runtime.llama_span import LlamaSpan
from swarm_kernels.runtime.load import load_span

NEW = ["mistral", "qwen2", "gemma2", "gemma3_text", "granite", "olmo2", "olmo3", "phi3", "smollm3"]
SLIDING, FULL = "sliding_attention", "full_attention"
SMALL_FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [2.0] * 6}
TABLES = {
    FULL: {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    SLIDING: {"rope_type": "default", "rope_theta": 300.0},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, longrope": ("llama", {"rope_parameters": LONG}),
    "llama, gelu": ("llama", {"hidden_act": "gelu"}),
    "llama, gelu by tanh": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral, window": ("mistral", {"sliding_window": 8}),
    "qwen2, window": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 9}),
    "qwen3, window": ("qwen3", {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 9}),
    "qwen3, kinds": ("qwen3", {"use_sliding_window": True, "layer_types": [FULL, SLIDING] * 2, "sliding_window": 9}),
    "gemma2": ("gemma2", {"head_dim": 24, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 3.0}),
    "gemma2, no caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2, biases": ("gemma2", {"attention_bias": True, "tie_word_embeddings": False, "layer_types": None}),
    "gemma3": ("gemma3_text", {"rope_parameters": TABLES, "final_logit_softcapping": 3.0}),
    "gemma3, all sliding": ("gemma3_text", {"layer_types": [SLIDING] * LAYERS}),
    "granite": FAMILIES["granite"],
    "granite, biases": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", {"num_key_value_heads": 1}),
    "olmo3": ("olmo3", {"rope_parameters": {FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 500.0}}}),
    "phi3, partial rotary": (
        "phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.75}},
    ),
    "phi3, longrope": (
        "phi3",
        {"rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e3, "partial_rotary_factor": 0.75, **SMALL_FACTORS,
         }, "original_max_position_embeddings": 128, "sliding_window": None},
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 0, 1]}),
    "smollm3, window": ("smollm3", {"use_sliding_window": True, "sliding_window": 9, "layer_types": None}),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_layers_trees_and_logits_are_transformers(name: str) -> None:
    kind, changes = VARIANTS[name]
    is_transformers(tiny_config(kind, **changes))


@pytest.mark.slow
@pytest.mark.parametrize("kind", NEW)
def test_generations_survive_cuts_kills_and_transfers(kind: str) -> None:
    is_transformers(tiny_config(kind), thorough=True)


OLD: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        {"rope_parameters": TABLES, "layer_types": [SLIDING, SLIDING, FULL, SLIDING]},
        {"rope_theta": 5000.0, "rope_local_base_freq": 300.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0},
         "sliding_window_pattern": 3},
    ),
    "olmo3": (
        "olmo3",
        {"rope_parameters": {FULL: {**YARN, "rope_theta": 5e5}, SLIDING: {"rope_type": "default", "rope_theta": 5e5}},
         "layer_types": [SLIDING] * 3 + [FULL]},
        {"rope_theta": 5e5, "rope_scaling": {key: value for key, value in YARN.items() if key != "rope_theta"}},
    ),
    "phi3": (
        "phi3",
        {"rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e3, "partial_rotary_factor": 0.75, **SMALL_FACTORS},
         "original_max_position_embeddings": 128},
        {"rope_theta": 1e3, "partial_rotary_factor": 0.75, "rope_scaling": {"type": "su", **SMALL_FACTORS}},
    ),
    "smollm3": (
        "smollm3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 2e6}, "no_rope_layers": [1, 1, 1, 0]},
        {},
    ),
    "gemma2": ("gemma2", {"layer_types": [SLIDING, FULL] * 2}, {"rope_theta": 10000.0, "hidden_act": "gelu"}),
}  # fmt: skip


@pytest.mark.parametrize("name", OLD)
def test_configs_in_their_old_spelling(name: str) -> None:
    """Without what transformers derives, as the files on hubs are."""
    kind, changes, old = OLD[name]
    config = tiny_config(kind, **changes)
    derived = ("rope_parameters", "layer_types", "no_rope_layers")
    stored = {key: value for key, value in config.to_dict().items() if key not in derived} | old
    is_transformers(config, stored=stored)


@pytest.mark.parametrize("kind", NEW)
def test_defaults_are_those_of_transformers_class(kind: str) -> None:
    has_the_defaults_of_its_class(kind, num_attention_heads=4, num_key_value_heads=2)


BEYOND: list[tuple[str, dict[str, Any], str]] = [
    ("gemma2", {"hidden_activation": "relu"}, "hidden_activation"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma2", {"layer_types": [SLIDING] * 3}, "layer_types"),
    ("gemma2", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
    ("gemma2", {"sliding_window": None}, "sliding_window"),
    ("gemma2", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "rope_parameters"),
    ("gemma3_text", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping"),
    ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters"),
    ("gemma3_text", {"rope_parameters": {FULL: {"rope_type": "dynamic", "factor": 2.0}}}, "rope_parameters.full"),
    ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
    ("granite", {"sliding_window": 8}, "sliding_window"),
    ("mistral", {"sliding_window": 0}, "sliding_window"),
    ("mistral", {"sliding_window": 8, "layer_types": [FULL] * 4}, "layer_types"),
    ("olmo2", {"layer_types": [SLIDING] * 4}, "layer_types"),
    ("olmo3", {"original_max_position_embeddings": 8}, "original_max_position_embeddings"),
    ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters.rope_type"),
    ("phi3", {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 9}}, "original_max"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
    ("smollm3", {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers"),
    ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval"),
]


@pytest.mark.parametrize(("kind", "changes", "field"), BEYOND)
def test_other_values_go_to_transformers(kind: str, changes: dict[str, Any], field: str) -> None:
    config = goes_to_transformers(kind, changes, field)
    check_shapes(config, {}, "a folder")  # which leaves them to transformers, too


@pytest.mark.parametrize("kind", ["gemma2", "olmo3", "phi3", "smollm3"])
def test_a_tree_longer_than_the_window(kind: str) -> None:
    """The first tokens of a path drop out of sight while it is still a tree, and siblings are never in it."""
    changes: dict[str, Any] = {"sliding_window": 6}
    if kind == "smollm3":
        changes |= {"use_sliding_window": True, "layer_types": None}
    model = random_model(tiny_config(kind, **changes))
    chain = Chain(ModelTensors(model), (2,))
    assert all(isinstance(span, LlamaSpan) for span in chain.spans)
    chain.open(b"a")
    words = list(range(3, 30))
    chain.run([StepRequest(b"a", 0, 8)], words[:8])
    slots = (5, 3, 11, 0, 1, 9, 17, 2, 4)  # in no order
    parents = (-1, *slots[:-1])
    chain.run([StepRequest(b"a", 8, 0, (*parents, 5, -1), (*slots, 6, 7))], [*words[8:17], 90, 91])
    rest = chain.run([StepRequest(b"a", 8, 0, (4, *range(20, 29)), tuple(range(20, 30)))], words[17:])
    expected = hf_logits(model, words)[17:]
    assert torch.allclose(rest, expected, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, INT4], ids=str)
@pytest.mark.parametrize("kind", NEW)
def test_in_fewer_bits_it_is_near_the_model_and_batches_change_no_bit(kind: str, dtype: torch.dtype) -> None:
    model = random_model(tiny_config(kind, **({"attention_multiplier": 0.25} if kind == "granite" else {})))
    if dtype == INT4:  # what 4 bits cost depends on the weights; this one is of weights they hold
        for name, weight in model.named_parameters():
            if "_proj" in name and weight.dim() == 2:
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
    assert (outputs[0] - want).norm() / want.norm() < 0.1


@pytest.mark.parametrize("kind", NEW)
def test_a_sound_span_passes_the_check_of_its_machine(kind: str) -> None:
    source = ModelTensors(random_model(tiny_config(kind)))
    for dtype in (torch.float32, torch.int8):
        verify_layer(load_span(source, LayerSpan(1, 3), dtype), source)


def test_every_fast_type_is_tried() -> None:
    assert {kind for kind, _ in VARIANTS.values()} | {"llama"} | MIXTURE_FAMILIES.keys() == set(FAST_PATH_ARCHITECTURES)
