"""Multi-head latent attention of transformers' layers (DeepSeek V2, section 2.1) on a latent cache.

A token's keys and values of all heads are linear functions of one latent of `kv_lora_rank` numbers. transformers
expands them (`expand_kv`) before its attention; here only the latent and the rotated key that all heads share are
cached, and the expansion moves to the queries and to what comes out of the attention ("absorbed" weights). With

    key of head h = [W_UK_h latent, rotated], value of head h = W_UV_h latent,

the score of a query [q, r] is (W_UK_h^T q) . latent + r . rotated, and the output W_UV_h (sum of weighted latents).
So all heads attend to one key [latent, rotated], whose first numbers are the value.

Owns the absorbed weights and which modules they belong to. `hf_attention` calls them; transformers' forward, which
projects, normalizes and rotates, is unchanged. Tokens and masks are not known here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

from swarm_kernels.ops import dispatch

ALIGNMENT = 16
"""Latent keys are padded with zeros to a multiple of it: what the compiled kernels take."""

_ATTRIBUTES = ("expand_kv", "kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class AbsorbedWeights:
    """What `kv_b_proj` of one attention module does, for queries and outputs."""

    def __init__(self, module: Any) -> None:
        """`module`: with loaded weights."""
        self.rank = int(module.kv_lora_rank)
        self.nope = int(module.qk_nope_head_dim)
        self.rope = int(module.qk_rope_head_dim)
        self.head_dim = int(module.v_head_dim)
        self.key_dim = _padded(self.rank + self.rope)
        self.value_dim = _padded(self.rank)  # more than the latent, where it is not aligned: cut off in `outputs`
        by_head = _weight(module.kv_b_proj).view(-1, self.nope + self.head_dim, self.rank)
        self._of_queries = dispatch.pack_head_linears(by_head[:, : self.nope].transpose(1, 2))
        self._of_outputs = dispatch.pack_head_linears(by_head[:, self.nope :])

    @property
    def nbytes(self) -> int:
        return self._of_queries.nbytes + self._of_outputs.nbytes

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.rank, self.nope, self.rope, self.head_dim

    def keys(self, latent: torch.Tensor, rotated: torch.Tensor) -> torch.Tensor:
        """`latent [1, 1, n, rank]`, `rotated [1, 1, n, rope]` -> `[1, 1, n, key_dim]`."""
        key = torch.cat((latent, rotated), -1)
        return key if key.shape[-1] == self.key_dim else F.pad(key, (0, self.key_dim - key.shape[-1]))

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """`[H, n, nope + rope]` -> `[n, H, key_dim]`, fp32 on a CPU."""
        query = query.transpose(0, 1)
        rows, heads, _ = query.shape
        end = self.rank + self.rope
        absorbed = query.new_empty(rows, heads, self.key_dim, dtype=torch.float32 if query.is_cpu else query.dtype)
        self._of_queries(query[..., : self.nope], absorbed[..., : self.rank])
        absorbed[..., self.rank : end] = query[..., self.nope :]
        absorbed[..., end:] = 0
        return absorbed

    def outputs(self, attended: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`[n, H, value_dim]` -> `[n, H, v_head_dim]` of `dtype`."""
        out = torch.empty(*attended.shape[:2], self.head_dim, dtype=dtype, device=attended.device)
        self._of_outputs(attended[..., : self.rank], out)
        return out

    def expansion(self) -> torch.Tensor:
        """The weight of `kv_b_proj`, `[H * (nope + v_head_dim), rank]`."""
        return torch.cat((self._of_queries.matrix().transpose(1, 2), self._of_outputs.matrix()), 1).flatten(0, 1)


class _Expansion(torch.nn.Module):
    """Stands for `kv_b_proj`, whose weights are the absorbed ones; only the check at load still expands."""

    def __init__(self, weights: AbsorbedWeights) -> None:
        super().__init__()
        self._weights = weights

    @property
    def packed_bytes(self) -> int:
        return self._weights.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weights.expansion().to(x.dtype))


def absorb(layers: Iterable[torch.nn.Module], attention: str) -> list[Any]:
    """Let the layers' latent attention modules hand latent keys to the attention registered as `attention`; with
    another one they expand as before. -> these modules; none, and nothing has changed, unless each of them has exactly
    one, and all are of one size."""
    modules: list[Any] = []
    for layer in layers:
        found = latent_modules(layer)
        if len(found) != 1:
            return []
        modules += found
    if len({tuple(getattr(module, name) for name in _ATTRIBUTES[2:]) for module in modules}) != 1:
        return []
    for module in modules:
        _attach(module, AbsorbedWeights(module), attention)
    return modules


def latent_modules(layer: torch.nn.Module) -> list[Any]:
    """transformers' latent attention modules in a layer or model."""
    return [module for module in layer.modules() if all(hasattr(module, name) for name in _ATTRIBUTES)]


def absorbed_weights(module: torch.nn.Module) -> AbsorbedWeights | None:
    """Those of a module that hands latent keys to the attention; None: it hands over keys of every head."""
    weights: AbsorbedWeights | None = getattr(module, "swarm_absorbed", None)
    return weights


def _attach(module: Any, weights: AbsorbedWeights, attention: str) -> None:
    expand = module.expand_kv  # bound to the module

    def expand_kv(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if module.config._attn_implementation != attention:
            keys, values = expand(latent, rotated)
            return keys, values
        return weights.keys(latent, rotated), latent

    module.swarm_absorbed = weights
    module.expand_kv = expand_kv
    module.kv_b_proj = _Expansion(weights)


def _weight(linear: Any) -> torch.Tensor:
    """`[outputs, inputs]` of a linear layer without bias, transformers' or one that packs it (`embedding_rows`)."""
    packed = getattr(linear, "linear", None)
    if packed is not None:
        rows: torch.Tensor = packed.embedding_rows(torch.arange(packed.out_features))
        return rows.to(torch.bfloat16)
    weight: torch.Tensor = linear.weight.detach()
    return weight


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
