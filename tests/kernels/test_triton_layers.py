"""Whole layers on the Triton kernels, batches padded for CUDA graphs, and a lean span that runs on them.

Run as `test_triton_ops` is.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from kernel_cases import NONE, Part, chain, make_plan, random_blocks, random_tree, star, vary
from test_ops_layer import SHAPES, VARIANTS, Shape, random_layer, rotary, two_tables
from tiny_models import ModelTensors, hf_greedy, tiny_model

from swarm.errors import KernelError
from swarm.types import LayerSpan
from swarm_kernels.batch import AttentionMetadata
from swarm_kernels.device import device
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base.layer_weights import PlainLinear
from swarm_kernels.ops.base.torch_reference import REFERENCE, decoder_layer
from swarm_kernels.runtime import llama_span
from swarm_kernels.runtime.load import load_span

pytest.importorskip("triton", reason="Triton is not installed")

from swarm_kernels.ops.triton import attention, layers, selector, selftest
from swarm_kernels.ops.triton.backend import TRITON
from swarm_kernels.ops.triton.padded_batch import PaddedBatch, Size

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu") if INTERPRETED or not torch.cuda.is_available() else torch.device("cuda", 0)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
SMALL = Shape(48, 4, 2, 16, 72)

pytestmark = pytest.mark.skipif(
    not INTERPRETED and DEVICE.type == "cpu", reason="test_triton_interpreter runs it in a process of its own"
)


def on_device(weights: dispatch.LayerWeights) -> dispatch.LayerWeights:
    def moved(linear: dispatch.Linear) -> dispatch.Linear:
        assert isinstance(linear, PlainLinear)
        return PlainLinear(linear.weight.to(DEVICE), None if linear.bias is None else linear.bias.to(DEVICE))

    def there(vector: torch.Tensor | None) -> torch.Tensor | None:
        return None if vector is None else vector.to(DEVICE)

    a, mlp = weights.attention, weights.mlp
    linears = {"qkv": moved(a.qkv), "o": moved(a.o), "gate_up": moved(mlp.gate_up), "down": moved(mlp.down)}
    names = ("q_norm", "k_norm"), ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")
    norms = {name: there(getattr(part, name)) for part, mine in zip((a, weights), names, strict=True) for name in mine}
    return vary(weights, **linears, **norms)


def close(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert (out.cpu().float() - expected.float()).norm() <= TOLERANCE[dtype] * expected.float().norm()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (Shape(48, 4, 2, 32, 80), torch.float32),
        (Shape(96, 4, 1, 80, 208, extras=True, rot=40), torch.float32),
        (Shape(64, 3, 1, 64, 100, extras=True), torch.bfloat16),
        (Shape(64, 2, 2, 12, 96), torch.float16),
    ],
    ids=str,
)
def test_layers_match_the_reference(shape: Shape, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(11)
    _, plain = random_layer(shape, dtype, generator)
    parts = [
        Part(17, line=3),
        Part(30, tree=random_tree(12, generator), old=9),
        Part(0, tree=star(2)),
        Part(40, line=1),
    ]
    plan, blocks = make_plan(parts, generator)
    k_blocks, v_blocks = random_blocks(blocks, shape.kv_heads, shape.dim, dtype, generator)
    hidden = torch.randn(plan.rows, shape.hidden, generator=generator).to(dtype)
    cos, sin = rotary(plan, shape)
    mine = [x.to(DEVICE, copy=True) for x in (hidden, cos, sin, k_blocks, v_blocks)]
    cache = (mine[3], mine[4])
    depth = 1 if shape.extras else 2
    there = selftest.on_device(plan, DEVICE)
    out = layers.decoder_layers(mine[0], [on_device(plain)] * depth, mine[1], mine[2], [cache] * depth, there)
    expected = hidden
    for _ in range(depth):
        expected = decoder_layer(expected, plain, cos, sin, k_blocks, v_blocks, plan)
    close(out, expected, dtype)
    close(mine[3], k_blocks, dtype)
    close(mine[4], v_blocks, dtype)


@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", ["gelu", "norms around the parts", "norms after the parts", "scaled parts"])
def test_a_stack_has_the_bits_of_its_layers_one_by_one(variant: str, dtype: torch.dtype) -> None:
    """Every sum is rounded to the format in which hidden states travel, so cuts between layers change no bit. (Triton's
    interpreter cuts bf16 off where GPUs and torch round.)"""
    shape, generator = SHAPES[1], torch.Generator().manual_seed(18)
    ours = [on_device(vary(random_layer(shape, dtype, generator)[1], **VARIANTS[variant])) for _ in range(3)]
    plan, blocks = make_plan([Part(17, line=3), Part(0, tree=star(2))], generator)
    caches = [random_blocks(blocks, shape.kv_heads, shape.dim, dtype, generator) for _ in ours]
    mine = [(k.to(DEVICE, copy=True), v.to(DEVICE, copy=True)) for k, v in caches]
    hidden = torch.randn(plan.rows, shape.hidden, generator=generator).to(dtype).to(DEVICE)
    cos, sin = (table.to(DEVICE) for table in rotary(plan, shape))
    there = selftest.on_device(plan, DEVICE)
    whole = layers.decoder_layers(hidden, ours, cos, sin, [(k.clone(), v.clone()) for k, v in mine], there)
    for layer, cache in zip(ours, mine, strict=True):
        hidden = layers.decoder_layers(hidden, [layer], cos, sin, [cache], there)
    assert torch.equal(hidden, whole)


def test_a_rounding_of_hidden_states_is_left_to_others() -> None:
    """They have that format on a GPU."""
    plain = random_layer(SHAPES[1], torch.bfloat16, torch.Generator().manual_seed(19))[1]
    rounding = replace(plain, rounding=torch.bfloat16)
    assert layers.supports_stack([plain], torch.float32)
    assert layers.supports_stack([rounding], torch.bfloat16)
    assert not layers.supports_stack([rounding], torch.float32)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_a_layer_match_the_reference_or_are_refused(variant: str) -> None:
    shape, generator = SHAPES[1], torch.Generator().manual_seed(16)
    plain = vary(random_layer(shape, torch.float32, generator)[1], **VARIANTS[variant])
    supported = plain.attention.chunk is None and plain.attention.sinks is None
    assert layers.supports_stack([plain, plain], torch.float32) == supported
    if not supported:
        return
    parts = [Part(17, line=3), Part(30, tree=(*chain(9), 2, 3), old=7), Part(40, line=1)]
    plan, blocks = make_plan(parts, generator)
    cache = random_blocks(blocks, shape.kv_heads, shape.dim, torch.float32, generator)
    hidden = torch.randn(plan.rows, shape.hidden, generator=generator)
    tables = two_tables(plan, shape)
    mine = [x.to(DEVICE, copy=True) for x in (hidden, *tables, *cache)]
    ours = [on_device(plain)] * 2
    there = selftest.on_device(plan, DEVICE)
    out = layers.decoder_layers(mine[0], ours, mine[1], mine[2], [(mine[3], mine[4])] * 2, there)
    for _ in range(2):
        hidden = decoder_layer(hidden, plain, *tables, *cache, plan)
    close(out, hidden, torch.float32)
    close(mine[3], cache[0], torch.float32)
    size = Size.of(plan, layers.attention_shape(plain), torch.float32, 8)
    assert size is not None
    batch = PaddedBatch(size, shape.hidden, shape.dim, torch.float32, DEVICE, (2,))
    batch.load(mine[0], mine[1], mine[2], there)
    args = (batch.hidden, ours, batch.cos, batch.sin, [(mine[3], mine[4])] * 2, batch.plan, size.tiling)
    close(layers.decoder_layers(*args)[: plan.rows], hidden, torch.float32)


def test_row_kernels_match_the_reference() -> None:
    generator = torch.Generator().manual_seed(1)
    x, delta = (torch.randn(3, 100, generator=generator).to(DEVICE) for _ in range(2))
    weight = torch.rand(100, generator=generator).to(DEVICE)
    total, normed = layers.add_rms_norm(x, delta, weight, 1e-5)
    torch.testing.assert_close(total, x + delta)
    torch.testing.assert_close(normed, REFERENCE.rms_norm(x + delta, weight, 1e-5), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(TRITON.rms_norm(x[None], weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5)[None])
    gate, up = torch.randn(2, 3, 50, generator=generator).to(DEVICE)
    out = layers.silu_times(torch.cat((gate, up), 1))
    torch.testing.assert_close(out, torch.nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-5)
    assert TRITON.rms_norm(x[:0], weight, 1e-5).shape == (0, 100)


def test_the_self_test_passes() -> None:
    for head_dim in (64, 128):
        selftest.run(DEVICE, torch.float32, head_dim)


def test_a_padded_batch_is_the_batch() -> None:
    """Batches of several sizes take turns in the same buffers: nothing of one is left for the next."""
    generator = torch.Generator().manual_seed(12)
    _, plain = random_layer(SMALL, torch.float32, generator)
    weights = on_device(plain)
    tree, blocks = make_plan([Part(20, tree=random_tree(3, generator)), Part(5, line=1)], generator)
    line, _ = make_plan([Part(9, line=2)], generator)
    moved = replace(tree, copy_from=tree.slot_mapping[:1], copy_to=tree.block_tables[0, 1:2].long() * 16 + 4)
    heads = layers.attention_shape(plain)
    sizes = [Size.of(plan, heads, torch.float32, 8) for plan in (moved, tree, line)]
    assert [(size.rows, size.words, size.copies) for size in sizes if size] == [(4, 1, 16), (4, 1, 0), (2, 0, 0)]
    size = sizes[0]
    assert size is not None
    batch = PaddedBatch(size, SMALL.hidden, SMALL.dim, torch.float32, DEVICE)
    cache = random_blocks(blocks, SMALL.kv_heads, SMALL.dim, torch.float32, generator)
    ours = (cache[0].to(DEVICE, copy=True), cache[1].to(DEVICE, copy=True))

    def run() -> torch.Tensor:
        args = (batch.hidden, [weights], batch.cos, batch.sin, [ours], batch.plan, size.tiling)
        return layers.decoder_layers(*args)

    run()  # blank, as when a graph is captured
    assert torch.equal(ours[0].cpu(), cache[0])
    assert torch.equal(ours[1].cpu(), cache[1])
    for plan in (moved, line, tree, moved):
        hidden = torch.randn(plan.rows, SMALL.hidden, generator=generator)
        cos, sin = rotary(plan, SMALL)
        batch.load(*(x.to(DEVICE) for x in (hidden, cos, sin)), selftest.on_device(plan, DEVICE))
        expected = decoder_layer(hidden, plain, cos, sin, cache[0], cache[1], plan)
        close(run()[: plan.rows], expected, torch.float32)
        close(ours[0], cache[0], torch.float32)
        close(ours[1], cache[1], torch.float32)


def test_sizes_of_batches() -> None:
    generator = torch.Generator().manual_seed(1)
    heads = attention.AttentionShape(4, 2, 16)

    def size(*parts: Part) -> Size | None:
        return Size.of(make_plan(list(parts), generator)[0], heads, torch.bfloat16, 132)

    assert size(Part(0, line=65)) is None
    assert size(Part(100, line=1)) == size(Part(7, line=1))  # one graph for all short contexts
    assert size(Part(100, line=1)) != size(Part(3000, line=1))
    several = size(*[Part(30, line=1)] * 5)
    assert several is not None
    assert (several.rows, several.tiling.tiles) == (8, 8)
    empty = AttentionMetadata(*[NONE] * 4, NONE[None], NONE[None], NONE[None], NONE, NONE, NONE[None])
    assert Size.of(empty, heads, torch.float32, 8) is None


def test_stacks_are_checked_once_and_forgotten_with_their_caches() -> None:
    generator = torch.Generator().manual_seed(2)
    _, plain = random_layer(SMALL, torch.float32, generator)
    weights = on_device(plain)
    cache = tuple(x.to(DEVICE) for x in random_blocks(4, SMALL.kv_heads, SMALL.dim, torch.float32, generator))
    stack = TRITON.layer_stack([weights], [(cache[0], cache[1])], torch.float32)
    assert stack is not None
    assert TRITON.layer_stack([weights], [(cache[0], cache[1])], torch.float32) is stack
    other = cache[0].clone()
    assert TRITON.layer_stack([weights], [(other, cache[1])], torch.float32) is not stack
    assert TRITON.layer_stack([weights], [(cache[0].half(), cache[1].half())], torch.float32) is None
    with pytest.raises(KernelError, match="not of this layer's heads"):
        TRITON.layer_stack([weights], [(cache[0][:, :1].contiguous(), cache[1][:, :1].contiguous())], torch.float32)


def test_a_lean_span_generates_what_transformers_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every path a GPU takes; without one, capturing fails and the span goes on without graphs."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(selector, "backend", lambda device, dtype, head_dim=64: TRITON)
        monkeypatch.setattr(attention, "processors", lambda device: 8)
        before = dispatch.isa()
        dispatch.select_isa("reference")
    model = tiny_model("qwen2", num_hidden_layers=2)
    prompt = [5, 77, 102, 9, 9, 31]
    expected = hf_greedy(model, prompt, 4)
    span = load_span(ModelTensors(model), LayerSpan(0, 2), torch.float32, DEVICE)
    assert isinstance(span, llama_span.LlamaSpan)
    cache = span.new_cache(64)
    cache.open(b"a", 32)
    tokens, done, rows = list(prompt), 0, len(prompt)
    while len(tokens) < len(prompt) + 4:
        plan = cache.schedule([StepRequest(b"a", done, rows)])
        hidden = span.forward(span.embed(tokens[done : done + rows]), plan, cache)
        tokens.append(int(span.logits(hidden[-1:]).argmax()))
        done, rows = done + rows, 1
    assert tokens[len(prompt) :] == expected
    if DEVICE.type == "cpu":
        dispatch.select_isa("best")
        assert dispatch.isa() == before
    assert device.activation_dtype(torch.float32, DEVICE) == torch.float32
