"""transformers' linear layers, embedding and head on our packed linears, for spans of 8 and 4 bits, and of bf16 on a
CPU, where ours take a quarter to a half of the time of torch's for few rows.

Owns which linear layers are packed, and the modules that stand for them. Reading their weights is `hf_weights`'s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

from swarm_kernels.device.device import activation_dtype, state_dtype
from swarm_kernels.ops.base.layer_weights import Linear
from swarm_kernels.runtime.weight_reader import Packs, packs_of

_ROUTER = re.compile(
    r"(?:^|\.)(?:\w*router\w*(?:\.\w+)*|gate|wg|shared_expert_gate|weights_proj|dt_proj|in_proj_(?:a|b|ba)|\w+_coefs)$"
)
_ROUTER_OUTPUTS = 1024  # more than any router has: a larger one of such a name is an ordinary layer


def stays_wide(name: str, outputs: int) -> bool:
    """Whether a linear layer keeps its floats: it decides where rows go (routers of experts) or what they see (sparse
    indexers), or how fast a state decays. An error there is not averaged over many sums, and these are small."""
    if "indexer" in name.split("."):
        return True
    return outputs <= _ROUTER_OUTPUTS and _ROUTER.search(name) is not None


@dataclass(frozen=True, slots=True)
class Format:
    """How a span holds its weights. `compute`: the dtype of transformers' parameters and activations, fp32 on a CPU
    where the weights are packed; `state`: of keys, values and hidden states between layers; `packs`: None where linear
    layers stay transformers', as in fp32 (the same bits as transformers'), in fp16 and on a GPU; there experts do in
    fp16 and bf16."""

    weights: torch.dtype
    compute: torch.dtype
    state: torch.dtype
    packs: Packs | None
    expert_packs: Packs | None  # None where experts stay transformers'

    @classmethod
    def of(cls, weights: torch.dtype, device: torch.device) -> Format:
        """`weights`: one of `device.DTYPES`."""
        if weights.is_floating_point:
            packs = packs_of(weights) if device.type == "cpu" and weights != torch.float16 else None
            return cls(weights, weights, weights, packs if weights == torch.bfloat16 else None, packs)
        state, packs = state_dtype(weights), packs_of(weights)
        return cls(weights, activation_dtype(state, device), state, packs, packs)

    @property
    def is_quantized(self) -> bool:
        return not self.weights.is_floating_point


class PackedModule(torch.nn.Module):
    """A linear layer of transformers: `[..., in]` -> `[..., out]`."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear
        self.in_features, self.out_features = linear.in_features, linear.out_features

    @property
    def packed_bytes(self) -> int:
        return self.linear.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        return self.linear(rows).view(*x.shape[:-1], self.out_features)


class PackedEmbedding(torch.nn.Module):
    """An embedding whose rows are those of a packed linear. What transformers' module does beside the lookup (scales)
    it still does, on the rows that were looked up."""

    def __init__(self, embedding: torch.nn.Module, rows: Linear, dtype: torch.dtype, shared: bool) -> None:
        """`shared`: with the head, which counts the bytes."""
        super().__init__()
        self.rows = rows
        self._dtype = dtype
        self._shared = shared
        self.embedding_dim = rows.in_features
        self._original = [embedding]  # in a list: its weight, on the meta device, is no parameter of ours

    @property
    def packed_bytes(self) -> int:
        return 0 if self._shared else self.rows.nbytes

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.rows.embedding_rows(ids.flatten()).to(self._dtype)
        order = torch.arange(len(found), device=ids.device).view(ids.shape)
        embedded: torch.Tensor = functional_call(self._original[0], {"weight": found}, (order,))
        return embedded


def linears_of(model: torch.nn.Module, prefix: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """The linear layers below `prefix` that are packed, by name."""
    for name, module in model.get_submodule(prefix).named_modules():
        if isinstance(module, (torch.nn.Linear, Conv1D)) and not stays_wide(name, _outputs(module)):
            yield f"{prefix}.{name}" if name else prefix, module


def _outputs(module: Any) -> int:
    return int(module.nf if isinstance(module, Conv1D) else module.out_features)


def replace_module(model: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def weight_bytes(module: torch.nn.Module) -> int:
    """Of parameters on a device, and of packed weights."""
    plain = sum(p.nbytes for p in module.parameters() if p.device.type != "meta")
    return plain + sum(getattr(part, "packed_bytes", 0) for part in module.modules())
