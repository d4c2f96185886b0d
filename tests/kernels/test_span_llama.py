"""The fast path against transformers: the same greedy tokens, however the layers are cut and the rows are batched."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import Chain, ModelTensors, hf_greedy, hf_logits, tiny_model

from swarm.errors import CorruptModel, UnsupportedModel, UsageError
from swarm.types import LayerSpan
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.models.config import RopeConfig
from swarm_kernels.models.source import ModelSource
from swarm_kernels.runtime.load import load_span
from swarm_kernels.tokenizer.tokenizer import load_tokenizer

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-one-head": ("llama", {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 3.0}}),
    "qwen2-yarn": (
        "qwen2",
        {"rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 24,
        }},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 12}),
}  # fmt: skip
CUTS = [(), (2,), (1, 4), (1, 2, 3, 5)]


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(131) for _ in range(length)]


@pytest.mark.parametrize("family", FAMILIES)
def test_chained_spans_generate_what_transformers_does(family: str) -> None:
    kind, changes = FAMILIES[family]
    model = tiny_model(kind, **changes)
    source = ModelTensors(model)
    assert source.config.has_fast_path
    prompt = prompt_of(37, 1)
    expected = hf_greedy(model, prompt, 12)
    assert len(set(expected)) > 3  # a constant output would prove little
    for cuts, chunks in zip(CUTS, [(), (37,), (1, 16, 20), (5, 5, 27)], strict=True):
        assert Chain(source, cuts).greedy(b"a", prompt, 12, chunks) == expected


@pytest.mark.parametrize("family", ["llama", "qwen2-tied", "qwen3"])
def test_a_span_reads_its_own_tensors_once_and_no_others(family: str) -> None:
    kind, changes = FAMILIES[family]
    source = ModelTensors(tiny_model(kind, **changes))
    shares: list[float] = []
    for layers in (LayerSpan(0, 2), LayerSpan(2, 5), LayerSpan(5, 6)):
        source.read.clear()
        span = load_span(source, layers, torch.float32, progress=shares.append)
        expected = {name for name in source.names() if any(f".layers.{layer}." in name for layer in layers)}
        if layers.start == 0:
            expected.add("model.embed_tokens.weight")
        if layers.end == 6:
            expected |= {"model.norm.weight", "lm_head.weight"}
            if source.config.tie_word_embeddings:
                expected ^= {"lm_head.weight", "model.embed_tokens.weight"}
        assert sorted(source.read) == sorted(expected)
        stored = sum(source.nbytes(name) for name in source.names() if f".layers.{layers.start}." in name)
        assert stored <= span.layer_bytes <= 1.1 * stored
        assert span.kv_bytes_per_token_per_layer == 4 * 2 * source.config.num_kv_heads * source.config.head_dim
        assert span.new_cache(32).nbytes == 32 * len(layers) * span.kv_bytes_per_token_per_layer
    assert shares.count(1.0) >= 3
    assert all(0 < share <= 1 for share in shares)


def test_what_cannot_be_loaded() -> None:
    source = ModelTensors(tiny_model("llama"))
    with pytest.raises(UsageError, match="the model has 6"):
        load_span(source, LayerSpan(3, 7), torch.float32)
    config = source.config
    source.config = replace(config, intermediate_size=96)
    with pytest.raises(CorruptModel, match="its config needs"):
        load_span(source, LayerSpan(0, 1), torch.float32)
    for rope, error in (
        ({"rope_type": "spiral"}, UnsupportedModel),
        ({"rope_type": "llama3", "factor": 8.0}, CorruptModel),
        ({"rope_type": "yarn", "factor": "much"}, CorruptModel),
    ):
        source.config = replace(config, rope=RopeConfig(scaling=rope))
        with pytest.raises(error, match="rope scaling"):
            load_span(source, LayerSpan(0, 1), torch.float32)


@pytest.mark.real_model
def test_smollm2_matches_transformers_in_fp32(real_model: ModelSource) -> None:
    tokens = load_tokenizer(real_model).encode("The capital of France is Paris. The largest city of Italy is")
    expected = hf_logits(_transformers_twin(real_model), tokens)
    for cuts in ((), (11, 23)):
        chain = Chain(real_model, cuts)
        chain.open(b"a")
        logits = chain.run([StepRequest(b"a", 0, len(tokens))], tokens)
        assert torch.allclose(logits, expected, atol=2e-3)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def _transformers_twin(source: ModelSource) -> Any:
    """transformers' model with the tensors of `source`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = source.config
    config = LlamaConfig(
        hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads, vocab_size=c.vocab_size,
        max_position_embeddings=c.context_length, rms_norm_eps=c.rms_norm_eps, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.tie_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source.tensor(name))
    return model.eval()
