"""Whole decoder layers against the reference, and what their results may not depend on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from kernel_cases import Part, make_plan, random_blocks, random_tree, star, take_rows, vary

from swarm_kernels.batch import AttentionMetadata
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base.layer_weights import Activation, plain_linear
from swarm_kernels.ops.base.torch_reference import decoder_layer
from swarm_kernels.ops.cpu import cpu_library
from swarm_kernels.ops.cpu.cpu_backend import cpu_backend

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Shape:
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    middle: int
    extras: bool = False  # biases and head norms
    rot: int | None = None


SHAPES = (
    Shape(576, 9, 3, 64, 1536),
    Shape(128, 4, 2, 32, 256, extras=True),
    Shape(96, 4, 1, 80, 208, extras=True, rot=40),
    Shape(256, 2, 2, 128, 100),  # a middle that is no multiple of 16: not one call, but the same result
)


def random_layer(
    shape: Shape, dtype: torch.dtype, generator: torch.Generator
) -> tuple[dispatch.LayerWeights, dispatch.LayerWeights]:
    """The same layer packed for the kernels and plain."""

    def weight(outputs: int, inputs: int) -> torch.Tensor:
        return (torch.randn(outputs, inputs, generator=generator) * inputs**-0.5).to(dtype)

    attended = shape.heads * shape.dim
    weights = {
        "qkv": weight(attended + 2 * shape.kv_heads * shape.dim, shape.hidden),
        "o": weight(shape.hidden, attended),
        "gate_up": weight(2 * shape.middle, shape.hidden),
        "down": weight(shape.hidden, shape.middle),
    }
    biases = {
        name: (0.1 * torch.randn(w.shape[0], generator=generator)).to(dtype) if shape.extras else None
        for name, w in weights.items()
    }
    norms = [torch.rand(n, generator=generator) + 0.5 for n in (shape.hidden, shape.hidden, shape.dim, shape.dim)]

    def build(plain: bool) -> dispatch.LayerWeights:
        pack = plain_linear if plain else dispatch.pack_linear
        linears = {name: pack(w, biases[name]) for name, w in weights.items()}
        return dispatch.LayerWeights(
            dispatch.Attention(
                linears["qkv"],
                linears["o"],
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.dim,
                scale=shape.dim**-0.5,
                q_norm=norms[2] if shape.extras else None,
                k_norm=norms[3] if shape.extras else None,
            ),
            dispatch.GatedMlp(linears["gate_up"], linears["down"]),
            attn_norm=norms[0],
            mlp_norm=norms[1],
            eps=1e-5,
        )

    return build(plain=False), build(plain=True)


def rotary(plan: AttentionMetadata, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    rot = shape.rot or shape.dim
    angles = torch.outer(plan.positions.float(), 1e4 ** (-torch.arange(0, rot, 2) / rot)).repeat(1, 2)
    return angles.cos(), angles.sin()


def batch(generator: torch.Generator) -> tuple[AttentionMetadata, int]:
    parts = [
        Part(17, line=3),
        Part(200, tree=random_tree(40, generator), old=9),
        Part(0, tree=star(5)),
        Part(300, line=1),
        Part(0, line=20),
    ]
    return make_plan(parts, generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_matches_the_reference(isa: str, dtype: torch.dtype, shape: Shape) -> None:
    generator = torch.Generator().manual_seed(11)
    packed, plain = random_layer(shape, dtype, generator)
    plan, blocks = batch(generator)
    k_blocks, v_blocks = random_blocks(blocks, shape.kv_heads, shape.dim, dtype, generator)
    k_twin, v_twin = k_blocks.clone(), v_blocks.clone()
    hidden = torch.randn(plan.rows, shape.hidden, generator=generator)
    before = hidden.clone()
    cos, sin = rotary(plan, shape)
    out = dispatch.decoder_layer(hidden, packed, cos, sin, k_blocks, v_blocks, plan)
    expected = decoder_layer(hidden, plain, cos, sin, k_twin, v_twin, plan)
    assert torch.equal(hidden, before)
    tolerance = TOLERANCE[dtype]
    assert (out - expected).norm() <= tolerance * expected.norm()
    torch.testing.assert_close(k_blocks, k_twin, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(v_blocks, v_twin, rtol=tolerance, atol=tolerance)


WIDE = torch.Generator().manual_seed(21)
VARIANTS: dict[str, dict[str, Any]] = {
    "windows": {"window": 6},  # shorter than the trees are deep
    "wide windows": {"window": 131},
    "chunks": {"chunk": 16},
    "wide chunks": {"chunk": 205},  # begins within a tree
    "soft caps": {"softcap": 0.4},
    "sinks": {"sinks": torch.tensor([-2.0, 0.5, 3.0, -100.0])},
    "a window, a cap and sinks": {"window": 9, "softcap": 0.3, "sinks": torch.tensor([-2.0, 0.5, 90.0, 1.0])},
    "no rotation": {"rope": None},
    "another rotation": {"rope": 1},
    "another scale": {"scale": 0.31},
    "norms of all heads": {
        "q_norm": torch.rand(4 * 32, generator=WIDE) + 0.5, "k_norm": torch.rand(2 * 32, generator=WIDE) + 0.5,
    },
    "norms after the parts": {
        "attn_norm": None, "mlp_norm": None,
        "attn_post_norm": torch.rand(128, generator=WIDE) + 0.5, "mlp_post_norm": torch.rand(128, generator=WIDE),
    },
    "norms around the parts": {
        "attn_post_norm": torch.rand(128, generator=WIDE) + 0.5, "mlp_post_norm": torch.rand(128, generator=WIDE),
    },
    "gelu": {"activation": Activation.GELU},
    "gelu by tanh": {"activation": Activation.GELU_TANH},
    "scaled parts": {"residual_scale": 0.22},
    "scaled and normed parts": {"residual_scale": 1.7, "mlp_post_norm": torch.rand(128, generator=WIDE)},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_a_layer_match_the_reference(isa: str, variant: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(15)
    shape = SHAPES[1]
    packed, plain = random_layer(shape, dtype, generator)
    plan, blocks = batch(generator)
    k_blocks, v_blocks = random_blocks(blocks, shape.kv_heads, shape.dim, dtype, generator)
    twin = k_blocks.clone(), v_blocks.clone()
    hidden = torch.randn(plan.rows, shape.hidden, generator=generator)
    cos, sin = two_tables(plan, shape)
    ours, theirs = (vary(layer, **VARIANTS[variant]) for layer in (packed, plain))
    assert compiled(ours, k_blocks, v_blocks)
    out = dispatch.decoder_layer(hidden, ours, cos, sin, k_blocks, v_blocks, plan)
    expected = decoder_layer(hidden, theirs, cos, sin, *twin, plan)
    assert (out - expected).norm() <= TOLERANCE[dtype] * expected.norm()
    torch.testing.assert_close(k_blocks, twin[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    unchanged = decoder_layer(hidden, plain, cos, sin, *twin, plan)
    assert (unchanged - expected).norm() > 1e-4 * expected.norm()  # the variant makes a difference
    for row in range(0, plan.rows, 11):
        one = slice(row, row + 1)
        alone = dispatch.decoder_layer(
            hidden[one], ours, cos[:, one], sin[:, one], k_blocks, v_blocks, take_rows(plan, [row])
        )
        assert torch.equal(alone[0], out[row])


def two_tables(plan: AttentionMetadata, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotary table of the shape, and another one."""
    cos, sin = rotary(plan, shape)
    slower, _ = rotary(replace(plan, positions=plan.positions // 7), shape)
    return torch.stack((cos, slower)), torch.stack((sin, 0.9 * (1 - slower.square()).clamp_min(0).sqrt()))


def compiled(layer: dispatch.LayerWeights, k_blocks: torch.Tensor, v_blocks: torch.Tensor) -> bool:
    library = cpu_library.library()
    assert library is not None
    return cpu_backend(library).supports_layers([layer], [(k_blocks, v_blocks)], torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_do_not_depend_on_each_other_or_on_threads(isa: str, dtype: torch.dtype) -> None:
    shape = SHAPES[1]
    generator = torch.Generator().manual_seed(12)
    layer, _ = random_layer(shape, dtype, generator)
    plan, blocks = batch(generator)
    k_blocks, v_blocks = random_blocks(blocks, shape.kv_heads, shape.dim, dtype, generator)
    hidden = torch.randn(plan.rows, shape.hidden, generator=generator)
    cos, sin = rotary(plan, shape)
    together = dispatch.decoder_layer(hidden, layer, cos, sin, k_blocks, v_blocks, plan)
    for count in (1, 2, 3):
        dispatch.set_threads(count)
        assert torch.equal(dispatch.decoder_layer(hidden, layer, cos, sin, k_blocks, v_blocks, plan), together)
        for row in range(0, plan.rows, 9):
            one = slice(row, row + 1)
            alone = dispatch.decoder_layer(
                hidden[one], layer, cos[one], sin[one], k_blocks, v_blocks, take_rows(plan, [row])
            )
            assert torch.equal(alone[0], together[row])


def test_a_prompt_in_pieces_is_the_prompt_in_one(isa: str) -> None:
    """Chunked prefill leaves the same keys and hidden states, bit for bit."""
    shape = SHAPES[1]
    generator = torch.Generator().manual_seed(13)
    layer, _ = random_layer(shape, torch.bfloat16, generator)
    plan, blocks = make_plan([Part(0, line=75)], generator)
    k_blocks, v_blocks = random_blocks(blocks, shape.kv_heads, shape.dim, torch.bfloat16, generator)
    k_twin, v_twin = k_blocks.clone(), v_blocks.clone()
    hidden = torch.randn(75, shape.hidden, generator=generator)
    cos, sin = rotary(plan, shape)
    whole = dispatch.decoder_layer(hidden, layer, cos, sin, k_blocks, v_blocks, plan)
    pieces = []
    for begin, end in ((0, 1), (1, 30), (30, 31), (31, 75)):
        rows = list(range(begin, end))
        piece = take_rows(plan, rows)
        pieces.append(dispatch.decoder_layer(hidden[rows], layer, cos[rows], sin[rows], k_twin, v_twin, piece))
    assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(k_blocks, k_twin)
    assert torch.equal(v_blocks, v_twin)


def test_a_stack_is_its_layers_one_after_the_other(isa: str) -> None:
    shape = SHAPES[1]
    generator = torch.Generator().manual_seed(14)
    layers = [random_layer(shape, torch.bfloat16, generator)[0] for _ in range(3)]
    plan, blocks = batch(generator)
    caches = [random_blocks(blocks, shape.kv_heads, shape.dim, torch.bfloat16, generator) for _ in layers]
    twins = [(k.clone(), v.clone()) for k, v in caches]
    hidden = torch.randn(plan.rows, shape.hidden, generator=generator)
    cos, sin = rotary(plan, shape)
    out = dispatch.decoder_layers(hidden, layers, cos, sin, caches, plan)
    step = hidden
    for layer, (k_blocks, v_blocks) in zip(layers, twins, strict=True):
        step = dispatch.decoder_layer(step, layer, cos, sin, k_blocks, v_blocks, plan)
    assert torch.equal(out, step)
    assert all(torch.equal(k, k2) and torch.equal(v, v2) for (k, v), (k2, v2) in zip(caches, twins, strict=True))
