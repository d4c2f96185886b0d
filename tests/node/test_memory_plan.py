"""Bytes to layers and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mtp_reference import Checkpoint
from tiny_models import ModelTensors, tiny_model

from swarm.errors import OutOfMemory
from swarm.types import LayerSpan
from swarm_kernels.device.device import DTYPES
from swarm_kernels.runtime.load import load_span
from swarm_node.membership.memory_plan import POLICY, ModelMemory

weights = st.builds(
    ModelMemory,
    num_layers=st.integers(1, 200),
    layer=st.integers(1, 1 << 32),
    embedding=st.integers(0, 1 << 32),
    head=st.integers(0, 1 << 32),
    kv_token=st.integers(1, 1 << 20),
    context=st.integers(1, 1 << 20),
    tied=st.booleans(),
)


@given(weights, st.data())
def test_capacity_is_the_inverse_of_memory_for(w: ModelMemory, data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, w.num_layers))
    assert w.capacity(w.memory_for(layers)) >= layers
    if layers == w.num_layers or w.memory_for(layers) < w.memory_for(w.num_layers):
        assert w.capacity(w.memory_for(layers)) == layers


@given(weights, st.integers(0, 1 << 40))
def test_what_fits_by_capacity_has_room_for_keys_and_values(w: ModelMemory, budget: int) -> None:
    try:
        layers = w.capacity(budget)
    except OutOfMemory:
        assert budget < w.memory_for(1)
        return
    for start in {0, w.num_layers - layers}:
        span = LayerSpan(start, start + layers)
        assert w.span_bytes(span) + POLICY.workspace_bytes <= budget
        assert w.kv_tokens(budget, span, 1 << 40) >= 1


def test_too_little_memory_says_how_much_is_needed() -> None:
    w = ModelMemory(10, 100 << 20, 0, 0, 1, 1)
    with pytest.raises(OutOfMemory, match="100 MiB of memory do not hold one layer of this model, which takes 164 MiB"):
        w.capacity(100 << 20)
    with pytest.raises(OutOfMemory, match="layers 0:4 take 464 MiB"):
        w.kv_tokens(200 << 20, LayerSpan(0, 4), 10)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v32"])
def test_a_latent_cache_is_estimated_as_it_is(kind: str, dtype: str) -> None:
    sizes = {
        "num_key_value_heads": 6,
        "kv_lora_rank": 40,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "head_dim": 16,
    }
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 8,
    }
    source = ModelTensors(
        tiny_model(
            kind, **sizes, **experts, q_lora_rank=24, v_head_dim=16, num_hidden_layers=2, first_k_dense_replace=1
        )
    )
    span = load_span(source, LayerSpan(0, 1), DTYPES[dtype])
    assert ModelMemory.of(source, DTYPES[dtype]).kv_token == span.kv_bytes_per_token_per_layer
    assert span.kv_bytes_per_token_per_layer == DTYPES[dtype].itemsize * (64 + (128 if kind == "deepseek_v32" else 0))


@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
@pytest.mark.parametrize(("kind", "shape"), [("mixtral", {"num_local_experts": 4}), ("gemma2", {"head_dim": 32})])
def test_the_estimate_holds_for_experts_and_other_layers_of_transformers(
    kind: str, shape: dict[str, int], dtype: str
) -> None:
    sizes = {"hidden_size": 192, "intermediate_size": 320, "vocab_size": 1600}
    source = ModelTensors(tiny_model(kind, **sizes, **shape))
    w, span = ModelMemory.of(source, DTYPES[dtype]), load_span(source, LayerSpan(0, 2), DTYPES[dtype])
    assert w.kv_token == span.kv_bytes_per_token_per_layer
    assert w.layer == pytest.approx(span.layer_bytes, rel=0.05)
    assert w.embedding == pytest.approx(span.edge_bytes, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("ends", [(0, 6), (0, 2), (4, 6), (1, 3)])
def test_the_estimate_is_what_a_loaded_span_takes(tied: bool, dtype: str, ends: tuple[int, int]) -> None:
    shape = {"hidden_size": 192, "intermediate_size": 320, "vocab_size": 1600}  # to drown padding and norms
    source = ModelTensors(tiny_model("llama", tie_word_embeddings=tied, **shape))
    layers = LayerSpan(*ends)
    w, span = ModelMemory.of(source, DTYPES[dtype]), load_span(source, layers, DTYPES[dtype])
    assert w.kv_token == span.kv_bytes_per_token_per_layer
    assert w.layer == pytest.approx(span.layer_bytes, rel=0.05)
    assert w.span_bytes(layers) == pytest.approx(len(layers) * span.layer_bytes + span.edge_bytes, rel=0.05)


@pytest.mark.parametrize("layout", ["mimo", "glm, own ends", "qwen3.5"])
def test_layers_that_only_drafters_read_take_no_memory_of_a_node(layout: str) -> None:
    checkpoint = Checkpoint(layout)
    planned = ModelMemory.of(checkpoint.source, DTYPES["bf16"])
    for name in checkpoint.tensors:
        checkpoint.source.forget(name)
    assert ModelMemory.of(checkpoint.source, DTYPES["bf16"]) == planned
