"""Makes the tensors of quantized checkpoints, as the libraries write them, for tests of reading them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from swarm_kernels.models.quantized.checkpoint import parts_of, unpacked_table
from swarm_kernels.models.quantized.schemes import scheme_of


@dataclass(frozen=True)
class Entry:
    """A row of a checkpoint's table."""

    shape: tuple[int, ...]
    dtype: str


NAMES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
    torch.int8: "I8", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip


def table_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Entry]:
    return {name: Entry(tuple(tensor.shape), NAMES[tensor.dtype]) for name, tensor in tensors.items()}


def unpacked(config: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By plain name, all that a checkpoint holds."""
    scheme, stored = scheme_of(config, "config.json"), table_of(tensors)
    packed = unpacked_table(scheme, stored, tensors.__getitem__, "the model")
    found = {}
    for name, tensor in packed.items():
        value = tensor.unpack({role: tensors[part] for role, part in tensor.parts.items()})
        assert (tuple(value.shape), value.dtype) == (tensor.shape, tensor.dtype)
        found[name] = value
    left = set(stored) - parts_of(scheme, stored, packed) - set(packed)
    return found | {name: tensors[name] for name in left}


@dataclass
class Gptq:
    """What AutoGPTQ stores of random numbers, and what they stand for, by its loops."""

    tensors: dict[str, torch.Tensor]
    weight: torch.Tensor  # [out, in]


def gptq(inputs: int, outputs: int, bits: int, group: int, plus_one: bool, ordered: bool, seed: int) -> Gptq:
    rng = torch.Generator().manual_seed(seed)
    groups, most = math.ceil(inputs / group), 2**bits
    quants = torch.randint(0, most, (inputs, outputs), generator=rng)
    zeros = torch.randint(1, most, (groups, outputs), generator=rng)
    scale = (torch.rand((groups, outputs), generator=rng) * 0.1 + 0.01).half()
    of = torch.arange(inputs) // group
    if ordered:
        of = of[torch.randperm(inputs, generator=rng)]
    weight = torch.empty((outputs, inputs), dtype=torch.float16)
    for i in range(inputs):
        g = int(of[i])
        weight[:, i] = scale[g] * (quants[i] - zeros[g]).half()
    tensors = {
        "m.qweight": _pack_rows(quants, bits),
        "m.qzeros": _pack_rows((zeros - int(plus_one)).T, bits).T.contiguous(),
        "m.scales": scale,
        "m.g_idx": of.int(),
    }
    return Gptq(tensors, weight)


def awq(inputs: int, outputs: int, group: int, seed: int) -> Gptq:
    """What AutoAWQ stores: eight outputs a word, in its own order."""
    rng = torch.Generator().manual_seed(seed)
    groups = math.ceil(inputs / group)
    quants = torch.randint(0, 16, (inputs, outputs), generator=rng)
    zeros = torch.randint(0, 16, (groups, outputs), generator=rng)
    scale = (torch.rand((groups, outputs), generator=rng) * 0.1 + 0.01).half()
    of = torch.arange(inputs) // group

    weight = ((quants - zeros[of]).half() * scale[of]).T.contiguous()
    return Gptq({"m.qweight": _awq_words(quants), "m.qzeros": _awq_words(zeros), "m.scales": scale}, weight)


def _awq_words(numbers: torch.Tensor) -> torch.Tensor:
    """`[n, outputs]` -> `[n, outputs / 8]` int32, in AutoAWQ's order."""
    words = torch.zeros((numbers.shape[0], numbers.shape[1] // 8), dtype=torch.int64)
    for column in range(words.shape[1]):
        for place, index in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            words[:, column] |= numbers[:, column * 8 + index] << (4 * place)
    return _as_int32(words)


def _pack_rows(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """`[n, columns]` -> `[n * bits / 32, columns]` int32, the first number in the lowest bits."""
    each = 32 // bits
    words = torch.zeros((math.ceil(numbers.shape[0] / each), numbers.shape[1]), dtype=torch.int64)
    for row in range(numbers.shape[0]):
        words[row // each] |= (numbers[row] & (2**bits - 1)) << (bits * (row % each))
    return _as_int32(words)


def _as_int32(words: torch.Tensor) -> torch.Tensor:
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def pack_gptq(module: str, weight: torch.Tensor, group: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """`[out, in]` as GPTQ stores it -> its tensors, and what they stand for in fp32."""
    numbers, zeros, scale, dequantized = _quantized(weight, group)
    tensors = {
        "qweight": _pack_rows(numbers.T, 4),
        "qzeros": _pack_rows((zeros - 1), 4).T.contiguous(),
        "scales": scale,
    }
    return {f"{module}.{name}": tensor for name, tensor in tensors.items()}, dequantized


def pack_awq(module: str, weight: torch.Tensor, group: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """As `pack_gptq`, as AWQ stores it."""
    numbers, zeros, scale, dequantized = _quantized(weight, group)
    tensors = {"qweight": _awq_words(numbers.T), "qzeros": _awq_words(zeros.T), "scales": scale}
    return {f"{module}.{name}": tensor for name, tensor in tensors.items()}, dequantized


def _quantized(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> numbers [out, in], zero points [out, groups], scales [groups, out] fp16, and their product in fp32."""
    groups = weight.unflatten(1, (-1, group))
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    scale = ((high - low) / 15).half()
    zeros = (-low / scale).round().clamp_(1, 15).long()
    numbers = ((groups / scale[..., None]).round() + zeros[..., None]).clamp_(0, 15).long()
    dequantized = ((numbers - zeros[..., None]).half() * scale[..., None]).flatten(1)
    return numbers.flatten(1), zeros, scale.T.contiguous(), dequantized.float()
