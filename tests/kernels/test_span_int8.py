"""The lean span in 8 bits: near the fp32 model, and the same bits however rows are batched."""

from __future__ import annotations

import pytest
import torch
from tiny_models import Chain, ModelTensors, hf_logits, tiny_model

from swarm.errors import UnsupportedModel
from swarm.types import LayerSpan
from swarm_kernels.calibrate import self_check
from swarm_kernels.kv_cache import RowsRequest
from swarm_kernels.lean import LeanSpan
from swarm_kernels.span_loading import load_span

PROMPT = [(7 * i * i + 3) % 131 for i in range(41)]


def logits_of(chain: Chain, chunks: tuple[int, ...]) -> torch.Tensor:
    chain.open(b"s")
    done, rows = 0, []
    for size in chunks:
        rows.append(chain.run([RowsRequest(b"s", done, size)], PROMPT[done : done + size]))
        done += size
    return torch.cat(rows)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("cuts", [(), (2,), (1, 4)])
def test_batches_change_no_bit(tied: bool, cuts: tuple[int, ...]) -> None:
    source = ModelTensors(tiny_model("llama", tie_word_embeddings=tied))
    whole = logits_of(Chain(source, cuts, torch.int8), (41,))
    for chunks in ((1,) * 41, (20, 1, 20)):
        assert torch.equal(logits_of(Chain(source, cuts, torch.int8), chunks), whole)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_it_is_near_the_model_in_fp32(kind: str) -> None:
    model = tiny_model(kind)
    got = logits_of(Chain(ModelTensors(model), (3,), torch.int8), (41,))
    want = hf_logits(model, PROMPT)
    assert (got - want).norm() / want.norm() < 0.1


def test_memory_and_formats() -> None:
    source = ModelTensors(tiny_model("llama", tie_word_embeddings=True))
    int8, bf16 = (load_span(source, LayerSpan(0, 6), dtype) for dtype in (torch.int8, torch.bfloat16))
    assert isinstance(int8, LeanSpan)
    assert int8.dtype is torch.bfloat16
    assert int8.weight_dtype is torch.int8
    assert int8.kv_bytes_per_token_per_layer == bf16.kv_bytes_per_token_per_layer
    assert int8.layer_bytes < 0.6 * bf16.layer_bytes
    self_check(int8, source)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
def test_a_tied_embedding_is_held_once(dtype: torch.dtype) -> None:
    source = ModelTensors(tiny_model("llama", tie_word_embeddings=True))
    whole = load_span(source, LayerSpan(0, 6), dtype)
    first, last = load_span(source, LayerSpan(0, 3), dtype), load_span(source, LayerSpan(3, 6), dtype)
    assert whole.edge_bytes == last.edge_bytes < first.edge_bytes + last.edge_bytes
    ids = list(range(131))
    assert torch.equal(whole.embed(ids), first.embed(ids))
    assert whole.embed([]).shape == (0, 96)
    assert last.logits(torch.empty(0, 96)).shape == (0, 131)


def test_other_models_are_refused_in_8_bits() -> None:
    with pytest.raises(UnsupportedModel, match="8 bits"):
        load_span(ModelTensors(tiny_model("olmo2")), LayerSpan(0, 2), torch.int8)
