"""Self-test of the Triton kernels: compares them with the reference on this device before they are used.

Owns a small random batch that covers every path: prompt rows, a tree with gaps, one decoding row with a context long
enough to be split. Raises KernelError with the error found.
"""

from __future__ import annotations

import torch

from swarm.errors import KernelError
from swarm_kernels.batch import BLOCK_SIZE, AttentionMetadata
from swarm_kernels.ops.base.layer_weights import Attention, GatedMlp, LayerWeights, Linear, plain_linear
from swarm_kernels.ops.base.torch_reference import REFERENCE, decoder_layer
from swarm_kernels.ops.triton import layers
from swarm_kernels.ops.triton.backend import TRITON

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest accepted relative L2 error of one layer's output against the reference in the same dtype."""

_HEADS, _GROUPS, _WIDTH, _MIDDLE = 6, 2, 96, 160
_LONG = 40 * BLOCK_SIZE  # committed tokens of the sequence whose context is split


def run(device: torch.device, dtype: torch.dtype, dim: int = 64) -> None:
    """Compare one decoder layer and one capped, windowed attention with the reference, both with heads of `dim`.

    Raises KernelError.
    """
    generator = torch.Generator().manual_seed(0)
    plan, blocks = _batch(device)
    shapes = (blocks, _GROUPS, dim, BLOCK_SIZE), (blocks, _GROUPS, BLOCK_SIZE, dim)
    actual = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    expected = [tensor.clone() for tensor in actual]
    weights = _layer(device, dtype, dim, generator)
    hidden = torch.randn(plan.rows, _WIDTH, generator=generator).to(device, dtype)
    angles = torch.outer(plan.positions.float(), 1e4 ** (-torch.arange(0, dim, 2, device=device) / dim)).repeat(1, 2)
    turn = angles.cos(), angles.sin()
    got = layers.decoder_layers(hidden, (weights,), *turn, ((actual[0], actual[1]),), plan)
    want = decoder_layer(hidden, weights, *turn, expected[0], expected[1], plan)
    _compare("a layer", got - hidden, want - hidden, dtype)
    for name, mine, other in zip(("keys", "values"), actual, expected, strict=True):
        _compare(name, mine, other, dtype)
    q, k, v = (
        torch.randn(plan.rows, n, dim, generator=generator).to(device, dtype) for n in (_HEADS, _GROUPS, _GROUPS)
    )
    got = TRITON.attend(q, k, v, actual[0], actual[1], plan, dim**-0.5, 50, 5.0)
    want = REFERENCE.attend(q, k, v, expected[0], expected[1], plan, dim**-0.5, 50, 5.0)
    _compare("attention", got, want, dtype)


def _compare(what: str, got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    error = float((got.float() - want.float()).norm() / want.float().norm())
    if not error <= TOLERANCE[dtype]:
        raise KernelError(f"the kernels compute {what} in {dtype} with an error of {error:.2g}")


def _batch(device: torch.device) -> tuple[AttentionMetadata, int]:
    """Sequence 0: five prompt rows after three; 1: three tree slots on 20; 2: one row at _LONG. One slot copy."""
    long_blocks = _LONG // BLOCK_SIZE + 1
    blocks = torch.zeros(3, long_blocks, dtype=torch.int32)
    blocks[0, 0], blocks[1, :2] = 1, torch.tensor([2, 3])
    blocks[2] = torch.arange(5, 5 + long_blocks).flip(0)
    tree_blocks = torch.tensor([[0], [4], [0]], dtype=torch.int32)
    positions = [3, 4, 5, 6, 7, 20, 21, 21, _LONG]
    context_lens = [4, 5, 6, 7, 8, 20, 20, 20, _LONG + 1]
    sequence = [0] * 5 + [1] * 3 + [2]
    write = [BLOCK_SIZE + i for i in range(3, 8)] + [4 * BLOCK_SIZE + slot for slot in (0, 2, 5)] + [5 * BLOCK_SIZE]
    mask = [0] * 5 + [0b1, 0b101, 0b100001] + [0]
    copies = [4 * BLOCK_SIZE + 7], [2 * BLOCK_SIZE + 9]
    plan = AttentionMetadata(
        torch.tensor(positions), torch.tensor(sequence).int(), torch.tensor(context_lens).int(), torch.tensor(write),
        blocks, tree_blocks, torch.tensor(mask)[:, None], torch.tensor(copies[0]), torch.tensor(copies[1]),
        torch.tensor([[0] * 16, [20, 0, 21, 0, 0, 21] + [0] * 10, [0] * 16]).int(),
    )  # fmt: skip
    return on_device(plan, device), 5 + long_blocks


def on_device(plan: AttentionMetadata, device: torch.device) -> AttentionMetadata:
    """The same plan with its tensors on `device`."""
    return AttentionMetadata(*(getattr(plan, name).to(device) for name in AttentionMetadata.__dataclass_fields__))


def _layer(device: torch.device, dtype: torch.dtype, dim: int, generator: torch.Generator) -> LayerWeights:
    def linear(outputs: int, inputs: int) -> Linear:
        weight = torch.randn(outputs, inputs, generator=generator) * inputs**-0.5
        return plain_linear(weight.to(device, dtype))

    def norm(size: int) -> torch.Tensor:
        return (torch.rand(size, generator=generator) + 0.5).to(device)

    attention = Attention(
        qkv=linear((_HEADS + 2 * _GROUPS) * dim, _WIDTH),
        o=linear(_WIDTH, _HEADS * dim),
        heads=_HEADS,
        kv_heads=_GROUPS,
        head_dim=dim,
        scale=dim**-0.5,
        q_norm=norm(dim),
        k_norm=norm(dim),
    )
    mlp = GatedMlp(linear(2 * _MIDDLE, _WIDTH), linear(_WIDTH, _MIDDLE))
    return LayerWeights(attention, mlp, attn_norm=norm(_WIDTH), mlp_norm=norm(_WIDTH), eps=1e-5)
