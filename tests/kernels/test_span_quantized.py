"""The fast path in 8 and 4 bits: near the fp32 model, and the same bits however rows are batched."""

from __future__ import annotations

import pytest
import torch
from tiny_models import Chain, ModelTensors, hf_logits, tiny_model

from swarm.types import LayerSpan
from swarm_kernels.calibration.cost_curve import verify_layer
from swarm_kernels.device.device import INT4
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base import int4_linear
from swarm_kernels.runtime.llama_span import LlamaSpan
from swarm_kernels.runtime.load import load_span
from swarm_kernels.runtime.span import Span

PROMPT = [(7 * i * i + 3) % 131 for i in range(41)]


def logits_of(chain: Chain, chunks: tuple[int, ...]) -> torch.Tensor:
    chain.open(b"s")
    done, rows = 0, []
    for size in chunks:
        rows.append(chain.run([StepRequest(b"s", done, size)], PROMPT[done : done + size]))
        done += size
    return torch.cat(rows)


BITS = pytest.mark.parametrize("dtype", [torch.int8, INT4], ids=str)


@BITS
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("cuts", [(), (2,), (1, 4)])
def test_batches_change_no_bit(tied: bool, cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    source = ModelTensors(tiny_model("llama", tie_word_embeddings=tied))
    whole = logits_of(Chain(source, cuts, dtype), (41,))
    for chunks in ((1,) * 41, (20, 1, 20)):
        assert torch.equal(logits_of(Chain(source, cuts, dtype), chunks), whole)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_it_is_near_the_model_in_fp32(kind: str) -> None:
    model = tiny_model(kind)
    for dtype in (torch.int8, INT4):
        if dtype == INT4:  # what 4 bits cost depends on the weights; this one is of weights they hold
            for name, weight in model.named_parameters():
                if "_proj" in name and weight.dim() == 2:
                    weight.data = int4_linear.quantize_linear(weight.data).embedding_rows(torch.arange(weight.shape[0]))
        want = hf_logits(model, PROMPT)
        got = logits_of(Chain(ModelTensors(model), (3,), dtype), (41,))
        assert (got - want).norm() / want.norm() < 0.1


@BITS
def test_memory_and_formats(dtype: torch.dtype) -> None:
    source = ModelTensors(tiny_model("llama", tie_word_embeddings=True))
    small, bf16 = (load_span(source, LayerSpan(0, 6), weights) for weights in (dtype, torch.bfloat16))
    assert isinstance(small, LlamaSpan)
    assert small.dtype is torch.bfloat16
    assert small.weight_dtype is dtype
    assert small.kv_bytes_per_token_per_layer == bf16.kv_bytes_per_token_per_layer
    assert small.layer_bytes < {torch.int8: 0.6, INT4: 0.4}[dtype] * bf16.layer_bytes
    verify_layer(small, source)


@BITS
def test_without_compiled_kernels_the_bits_are_the_same(dtype: torch.dtype) -> None:
    source = ModelTensors(tiny_model("llama"))
    rows = torch.randn(5, 96)
    compiled = load_span(source, LayerSpan(5, 6), dtype)
    dispatch.select_isa("reference")
    try:
        plain = load_span(source, LayerSpan(5, 6), dtype)
    finally:
        dispatch.select_isa("best")
    for ours, theirs in zip(linears(compiled), linears(plain), strict=True):
        assert torch.equal(ours(rows), theirs(rows))


def linears(span: Span) -> list[dispatch.Linear]:
    assert isinstance(span, LlamaSpan)
    assert span.head is not None
    return [span.weights[0].attention.qkv, span.weights[0].mlp.gate_up, span.head]


@pytest.mark.parametrize("dtype", [INT4, torch.int8, torch.bfloat16, torch.float32])
def test_a_tied_embedding_is_held_once(dtype: torch.dtype) -> None:
    source = ModelTensors(tiny_model("llama", tie_word_embeddings=True))
    whole = load_span(source, LayerSpan(0, 6), dtype)
    first, last = load_span(source, LayerSpan(0, 3), dtype), load_span(source, LayerSpan(3, 6), dtype)
    assert whole.edge_bytes == last.edge_bytes < first.edge_bytes + last.edge_bytes
    ids = list(range(131))
    assert torch.equal(whole.embed(ids), first.embed(ids))
    assert whole.embed([]).shape == (0, 96)
    assert last.logits(torch.empty(0, 96)).shape == (0, 131)
