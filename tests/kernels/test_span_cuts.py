"""Where a chain is cut changes no bit: hidden states and logits of every cut into 1, 2 and 3 spans, in every number
format, of single rows, chunks of a prompt, draft trees and committed paths."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from kernel_cases import Part, make_plan, random_blocks, vary
from test_ops_layer import SHAPES, VARIANTS, batch, compiled, random_layer, rotary, two_tables
from tiny_models import ModelTensors
from zoo.compare import TREE, all_cuts, text
from zoo.shrink import LAYERS, VOCABULARY, tiny_config
from zoo.weights import random_model

from swarm.types import LayerSpan
from swarm_kernels.device.device import DTYPES, activation_dtype
from swarm_kernels.kvcache.cache import KVCacheManager, StepRequest
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base.torch_reference import decoder_layer
from swarm_kernels.runtime.hidden_codec import from_wire, to_wire
from swarm_kernels.runtime.llama_span import LlamaSpan
from swarm_kernels.runtime.load import load_span
from swarm_kernels.runtime.span import Span

COMPILED_FAMILIES = ("llama", "qwen3", "gemma2", "gemma3_text", "granite", "olmo2", "phi3", "mixtral", "gpt_oss")
"""Norms before, after and around the parts, scaled parts, scaled embeddings with a rounded and an exact scale;
mixtures of experts."""
TRANSFORMERS_FAMILIES = ("deepseek_v3", "falcon", "gemma", "qwen3_next")
NARROW = [name for name in DTYPES if name not in ("fp32", "fp16")]

STEPS = (
    StepRequest(b"a", 0, 23),
    StepRequest(b"a", 23, 9),
    StepRequest(b"a", 32, 1),
    StepRequest(b"a", 33, 0, TREE, tuple(range(len(TREE)))),
    StepRequest(b"a", 33, 1, commit_slots=(0, 2, 4)),
    StepRequest(b"a", 37, 1),
)
"""A prompt in two chunks, a row, a tree, a row after a committed path of it, a row."""

StepResult = tuple[dict[int, torch.Tensor], torch.Tensor]
"""The hidden states `[rows, hidden]` that leave each hop, by the end of its layers; and the logits."""


class SpansByLayers:
    """The spans of one model in one number format, each loaded once."""

    def __init__(self, kind: str, dtype: str) -> None:
        self.source = ModelTensors(random_model(tiny_config(kind)))
        self.dtype = DTYPES[dtype]
        self._spans: dict[LayerSpan, Span] = {}

    def span(self, start: int, end: int) -> Span:
        layers = LayerSpan(start, end)
        if layers not in self._spans:
            self._spans[layers] = load_span(self.source, layers, self.dtype)
        return self._spans[layers]

    def run(self, cuts: tuple[int, ...]) -> list[StepResult]:
        """All steps through hops that send each other bytes."""
        spans = [self.span(start, end) for start, end in itertools.pairwise((0, *cuts, LAYERS))]
        caches = [span.new_cache(128) for span in spans]
        for cache in caches:
            cache.open(b"a", 100)
        return [self._step(spans, caches, step, seed) for seed, step in enumerate(STEPS)]

    def _step(self, spans: list[Span], caches: list[KVCacheManager], step: StepRequest, seed: int) -> StepResult:
        hidden = spans[0].embed(text(step.rows, seed, VOCABULARY))
        sent: dict[int, torch.Tensor] = {}
        for span, cache in zip(spans, caches, strict=True):
            hidden = span.forward(hidden, cache.schedule([step]), cache)
            if span is not spans[-1]:
                body = bytes(to_wire(hidden, span.dtype))
                hidden = from_wire(body, step.rows, self.source.config.hidden_size, span.dtype)
            sent[span.layers.end] = hidden.float()
        return sent, spans[-1].logits(hidden)


def assert_cuts_change_nothing(spans: SpansByLayers) -> None:
    every_layer = spans.run(tuple(range(1, LAYERS)))
    assert len({rows.numpy().tobytes() for sent, _ in every_layer for rows in sent.values()}) == LAYERS * len(STEPS)
    for count in (1, 2, 3):
        for cuts in all_cuts(LAYERS, count):
            for (sent, logits), (expected, expected_logits) in zip(spans.run(cuts), every_layer, strict=True):
                assert set(sent) == {*cuts, LAYERS}
                for end, hidden in sent.items():
                    assert torch.equal(hidden, expected[end]), (cuts, end)
                assert torch.equal(logits, expected_logits), cuts


@pytest.mark.parametrize("dtype", ["fp32", *NARROW])
@pytest.mark.parametrize("kind", COMPILED_FAMILIES)
def test_cuts_change_no_bit_on_the_compiled_path(kind: str, dtype: str) -> None:
    spans = SpansByLayers(kind, dtype)
    assert isinstance(spans.span(0, LAYERS), LlamaSpan)
    assert_cuts_change_nothing(spans)


@pytest.mark.parametrize("dtype", NARROW)
def test_cuts_change_no_bit_on_any_instruction_set(isa: str, dtype: str) -> None:
    assert_cuts_change_nothing(SpansByLayers("gemma2", dtype))
    assert_cuts_change_nothing(SpansByLayers("llama", dtype))


@pytest.fixture
def plain_torch() -> Iterator[None]:
    dispatch.select_isa("reference")
    yield
    dispatch.select_isa("best")


@pytest.mark.usefixtures("plain_torch")
@pytest.mark.parametrize("dtype", [*NARROW, "fp16"])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "granite"])
def test_cuts_change_no_bit_in_plain_torch(kind: str, dtype: str) -> None:
    assert_cuts_change_nothing(SpansByLayers(kind, dtype))


@pytest.mark.parametrize("dtype", ["fp32", *NARROW])
@pytest.mark.parametrize("kind", TRANSFORMERS_FAMILIES)
def test_cuts_change_no_bit_on_transformers_layers(kind: str, dtype: str) -> None:
    spans = SpansByLayers(kind, dtype)
    assert not isinstance(spans.span(0, LAYERS), LlamaSpan)
    assert_cuts_change_nothing(spans)


@pytest.mark.parametrize("dtype", ["fp32", *NARROW])
def test_a_span_holds_nothing_that_the_wire_would_round(dtype: str) -> None:
    """After the embedding, which Gemma scales, and after each layer within a span."""
    spans = SpansByLayers("gemma2", dtype)
    span = spans.span(0, LAYERS)
    cache = span.new_cache(64)
    cache.open(b"a", 30)
    hidden = span.embed(text(9, 1, VOCABULARY))
    assert hidden.dtype is activation_dtype(span.dtype, span.device)
    metadata = cache.schedule([StepRequest(b"a", 0, 9)])
    for layer in range(LAYERS):
        assert torch.equal(hidden, hidden.to(span.dtype).float())
        hidden = span.forward(hidden, metadata, cache, layer, layer + 1)
    assert torch.equal(hidden, hidden.to(span.dtype).float())


@pytest.mark.parametrize("variant", ["llama", *VARIANTS])
def test_a_layer_rounds_what_it_would_return(isa: str, variant: str) -> None:
    """In C++ and in torch: to nearest, ties to even, of any layer's end."""
    generator = torch.Generator().manual_seed(16)
    plan, blocks = batch(generator)
    for layer in random_layer(SHAPES[1], torch.bfloat16, generator):
        layer = vary(layer, **VARIANTS.get(variant, {}))
        k_blocks, v_blocks = random_blocks(blocks, SHAPES[1].kv_heads, SHAPES[1].dim, torch.bfloat16, generator)
        hidden = torch.randn(plan.rows, SHAPES[1].hidden, generator=generator)
        tables = two_tables(plan, SHAPES[1])
        rounding = replace(layer, rounding=torch.bfloat16)
        run = dispatch.decoder_layer if compiled(layer, k_blocks, v_blocks) else decoder_layer
        assert compiled(rounding, k_blocks, v_blocks) == compiled(layer, k_blocks, v_blocks)
        wide = run(hidden, layer, *tables, k_blocks, v_blocks, plan)
        assert not torch.equal(wide, wide.bfloat16().float())
        assert torch.equal(run(hidden, rounding, *tables, k_blocks, v_blocks, plan), wide.bfloat16().float())


def test_ties_go_to_even_and_infinities_stay(isa: str) -> None:
    """A layer that adds nothing shows the rounding alone, at a width that is no multiple of a vector."""
    shape = replace(SHAPES[1], hidden=90)
    generator = torch.Generator().manual_seed(17)
    packed, _ = random_layer(replace(shape, extras=False), torch.float32, generator)
    silent = dispatch.pack_linear(torch.zeros(90, shape.middle))
    mute = dispatch.pack_linear(torch.zeros(90, shape.heads * shape.dim))
    layer = replace(
        packed,
        attention=replace(packed.attention, o=mute),
        mlp=replace(packed.mlp, down=silent),
        rounding=torch.bfloat16,
    )
    plan, blocks = make_plan([Part(0, line=7)], generator)
    k_blocks, v_blocks = random_blocks(blocks, shape.kv_heads, shape.dim, torch.bfloat16, generator)
    bits = torch.randint(-(2**31), 2**31, (7, 90), generator=generator) & ~0x7FFF | 0x8000  # halfway between two
    hidden = (bits % 2**31).to(torch.int32).view(torch.float32).nan_to_num(1.0).clamp(-1e15, 1e15)
    hidden[1::2, ::2] *= -1
    for scale in (1.0, 0.5):  # within the last product, and after it
        ours = replace(layer, residual_scale=scale)
        assert compiled(ours, k_blocks, v_blocks)
        out = dispatch.decoder_layer(hidden, ours, *rotary(plan, shape), k_blocks, v_blocks, plan)
        assert torch.equal(out, hidden.bfloat16().float())
