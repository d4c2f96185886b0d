"""Spans on a latent cache: its size, forks, batches of several sessions, formats, and indexers that choose keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import ModelTensors, hf_logits
from zoo.compare import TOLERANCE, Pieces, compare, distance, text
from zoo.families import FAMILIES
from zoo.shrink import tiny_config
from zoo.weights import random_model

from swarm.errors import UnsupportedModel
from swarm.types import LayerSpan
from swarm_kernels.device.device import DTYPES
from swarm_kernels.kvcache.cache import KVCacheManager, StepRequest
from swarm_kernels.runtime import hf_indexer, hf_span
from swarm_kernels.runtime.hf_latent import AbsorbedWeights, absorb, absorbed_weights
from swarm_kernels.runtime.hf_span import HfSpan
from swarm_kernels.runtime.load import load_span

KINDS = ["deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"]
CHOOSING = {"index_topk": 24, "index_n_heads": 8}  # with two heads many scores are exactly 0, and ties are torch's
DEEPSEEK_V3 = {
    "hidden_size": 128, "num_attention_heads": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "head_dim": 64, "num_hidden_layers": 2,
}  # fmt: skip


def source_of(kind: str, **changes: Any) -> tuple[Any, ModelTensors]:
    model = random_model(tiny_config(kind, **{**FAMILIES.get(kind, (kind, {}))[1], **changes}))
    return model, ModelTensors(model)


def loaded(source: ModelTensors, dtype: torch.dtype = torch.float32) -> HfSpan:
    span = load_span(source, LayerSpan(0, source.config.num_layers), dtype)
    assert isinstance(span, HfSpan)
    return span


def run(span: HfSpan, cache: KVCacheManager, tokens: list[int], *requests: StepRequest) -> torch.Tensor:
    return span.logits(span.forward(span.embed(tokens), cache.schedule(requests), cache))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_a_token_takes_one_latent_and_one_rotated_key(kind: str, dtype: torch.dtype) -> None:
    """In DeepSeek-V3's sizes 576 numbers. The check at load has compared both formats with transformers."""
    _, source = source_of(kind, **DEEPSEEK_V3)
    span = loaded(source, dtype)
    assert span.kv_bytes_per_token_per_layer == 576 * dtype.itemsize == source.config.kv_elements * dtype.itemsize
    cache = span.new_cache(64)
    assert cache.nbytes == 64 * 2 * 576 * dtype.itemsize
    assert len(cache.pool.read(1, [0, 1], 20)) == 32 * 576 * dtype.itemsize


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_cut_kill_transfer_tree_and_rollback_is_transformers(kind: str) -> None:
    verdict = compare(tiny_config(kind, **FAMILIES[kind][1]), thorough=True)
    assert verdict.word == "equal", (verdict.refused, verdict.wrong)


@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v32"])
def test_sessions_share_batches_and_prefixes(kind: str) -> None:
    """A fork within a block, a tree beside another session's prompt, in one batch; every row as transformers has it."""
    model, source = source_of(kind, **(CHOOSING if kind == "deepseek_v32" else {}))
    span, first, second = loaded(source), text(45, 1, 256), text(30, 2, 256)
    cache = span.new_cache(512)
    cache.open(b"a", 100)
    cache.open(b"b", 100)
    run(span, cache, first[:40], StepRequest(b"a", 0, 40))
    cache.fork(b"a", b"c", 100, length=37)
    logits = run(
        span,
        cache,
        [*first[40:], *second, 7, 8, 9],
        StepRequest(b"a", 40, 5),
        StepRequest(b"b", 0, 30),
        StepRequest(b"c", 37, 0, (-1, 0, -1), (0, 1, 2)),
    )
    prefix = first[:37]
    assert distance(logits[:5], hf_logits(model, first)[40:]) <= TOLERANCE
    assert distance(logits[5:35], hf_logits(model, second)) <= TOLERANCE
    for row, branch in ((35, [7]), (36, [7, 8]), (37, [9])):
        assert distance(logits[row], hf_logits(model, [*prefix, *branch])[-1]) <= TOLERANCE
    after = run(span, cache, [3], StepRequest(b"c", 37, 1, commit_slots=(0, 1)))
    assert distance(after[0], hf_logits(model, [*prefix, 7, 8, 3])[-1]) <= TOLERANCE
    cache.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_indexers_choose_as_in_transformers(kind: str) -> None:
    """A text of 101 tokens, of which a row sees 24: over every cut, with trees, rollback, a kill and a transfer."""
    changes = {**CHOOSING, "indexer_types": ["full"] * 4} if kind == "glm_moe_dsa" else CHOOSING
    verdict = compare(tiny_config(kind, **changes), thorough=True)
    assert verdict.word == "equal", (verdict.refused, verdict.wrong)


def test_index_keys_are_cached_and_lift_the_limit_of_the_context() -> None:
    _, choosing = source_of("deepseek_v32", **CHOOSING)
    span = loaded(choosing)
    assert span.kv_bytes_per_token_per_layer == choosing.config.kv_elements * 4
    assert span.config.context_length == 256
    assert span.kv_shape.value_dim == 16
    _, sharing = source_of("glm_moe_dsa", **CHOOSING)  # its second layer takes over what the first chose
    span = loaded(sharing)
    assert span.config.context_length == 24
    assert span.kv_shape.value_dim == 0


def test_rows_are_scored_in_pieces_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, source = source_of("deepseek_v32", **CHOOSING)
    span, words = loaded(source), text(90, 4, 256)
    monkeypatch.setattr(hf_indexer, "_SCORES", 8 * 96 * 7)  # seven rows of eight heads
    cache = span.new_cache(128)
    cache.open(b"a", 100)
    assert distance(run(span, cache, words, StepRequest(b"a", 0, 90)), hf_logits(model, words)) <= TOLERANCE


def test_a_choice_that_is_ignored_is_found_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    _, source = source_of("deepseek_v32", **CHOOSING)
    monkeypatch.setattr(hf_indexer, "_most_keys", lambda plan: 0)
    with pytest.raises(UnsupportedModel, match="its attention differs"):
        loaded(source)


@pytest.mark.parametrize("part", ["queries", "outputs", "keys"])
def test_wrong_absorbed_weights_are_found_at_load(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    _, source = source_of("deepseek_v3")
    right = getattr(AbsorbedWeights, part)
    monkeypatch.setattr(AbsorbedWeights, part, lambda self, *args: right(self, *args) * 1.5)
    with pytest.raises(UnsupportedModel, match="its attention differs"):
        loaded(source)


def test_layers_that_differ_in_size_keep_their_expanded_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache has one shape; what is served without latents gives the same answers."""
    model, source = source_of("deepseek_v3")
    span = loaded(source)
    layers = [span.layer(index) for index in span.layers]
    assert absorb([*layers, torch.nn.Linear(2, 2)], "x") == []
    assert absorb([layers[0], torch.nn.ModuleList(layers[1:3])], "x") == []
    monkeypatch.setattr(hf_span, "absorb", lambda *_: [])
    expanded = loaded(source)
    assert absorbed_weights(expanded.attention_module(0)) is None
    assert expanded.kv_bytes_per_token_per_layer > 2 * span.kv_bytes_per_token_per_layer
    words = text(30, 6, 256)
    assert distance(Pieces(source).chain(()).run(StepRequest(b"a", 0, 30), words), hf_logits(model, words)) <= TOLERANCE


def test_absorbed_weights_are_those_of_the_model() -> None:
    model, source = source_of("deepseek_v3", **DEEPSEEK_V3)
    weights = absorbed_weights(loaded(source).attention_module(1))
    assert weights is not None
    expected = model.model.layers[1].self_attn.kv_b_proj.weight
    assert torch.equal(weights.expansion(), expected)
    assert weights.nbytes == expected.nbytes


def test_received_garbage_stays_in_its_session() -> None:
    """Blocks from a hostile peer: not a number, infinity, or the largest numbers there are."""
    _, source = source_of("deepseek_v32", **CHOOSING)
    span, words = loaded(source), text(60, 12, 256)
    cache = span.new_cache(256)
    for key in (b"a", b"b", b"c"):
        cache.open(key, 70)
    alone = run(span, cache, words, StepRequest(b"a", 0, 60))
    size = 4 * cache.shape.bytes_per_block // len(span.layers)
    for pattern in (b"\xff\xff\xff\x7f", b"\x00\x00\x80\x7f", b"\xff\xff\x7f\x7f"):
        blocks = cache.import_blocks(b"b", 60)
        for layer in span.layers:
            cache.pool.write(layer, blocks, pattern * (size // 4))
        again = run(span, cache, [*words, 5], StepRequest(b"c", 0, 60), StepRequest(b"b", 60, 1))
        assert distance(again[:60], alone) <= TOLERANCE
        cache.rollback(b"b", 0)
        cache.rollback(b"c", 0)
        assert distance(run(span, cache, words, StepRequest(b"c", 0, 60)), alone) <= TOLERANCE
        cache.rollback(b"c", 0)


@pytest.mark.parametrize("rows", [0, 1])
def test_slots_are_committed_with_and_without_rows(rows: int) -> None:
    model, source = source_of("deepseek_v32", **CHOOSING)
    span, words = loaded(source), text(40, 8, 256)
    cache = span.new_cache(128)
    cache.open(b"a", 100)
    run(span, cache, words, StepRequest(b"a", 0, 40))
    run(span, cache, [5, 6, 7], StepRequest(b"a", 40, 0, (-1, -1, 1), (0, 1, 2)))
    metadata = cache.schedule([StepRequest(b"a", 40, rows, commit_slots=(1, 2))])
    span.forward(span.embed([9] * rows), metadata, cache)
    after = run(span, cache, [11], StepRequest(b"a", 42 + rows, 1))
    assert distance(after[0], hf_logits(model, [*words, 6, 7, *[9] * rows, 11])[-1]) <= TOLERANCE


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v32"])
def test_packed_weights_are_absorbed_as_they_are_rounded(kind: str, dtype: str) -> None:
    """The check at load compares with transformers' expansion by the same weights. Keys and values stay bf16."""
    _, source = source_of(kind, **DEEPSEEK_V3, **({"index_head_dim": 128} if kind == "deepseek_v32" else {}))
    span = loaded(source, DTYPES[dtype])
    weights = absorbed_weights(span.attention_module(0))
    assert weights is not None
    stored = source.tensor("model.layers.0.self_attn.kv_b_proj.weight")
    rounded = weights.expansion().float()
    assert 0 < distance(rounded, stored) < (0.02 if dtype == "int8" else 0.1)
    assert span.kv_bytes_per_token_per_layer == 2 * (576 + span.index_dim)
