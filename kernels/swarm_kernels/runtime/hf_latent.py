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

ALIGNMENT = 16
"""Latent keys are padded with zeros to a multiple of it: what the compiled kernels take."""

_ATTRIBUTES = ("expand_kv", "kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class AbsorbedWeights:
    """What `kv_b_proj` of one attention module does, applied to queries and outputs. Takes no memory of its own."""

    def __init__(self, module: Any) -> None:
        """`module`: with loaded weights."""
        self.rank = int(module.kv_lora_rank)
        self.nope = int(module.qk_nope_head_dim)
        self.rope = int(module.qk_rope_head_dim)
        self.head_dim = int(module.v_head_dim)
        self.key_dim = _padded(self.rank + self.rope)
        self.value_dim = _padded(self.rank)  # more than the latent, where it is not aligned: cut off in `outputs`
        weight = _weight(module.kv_b_proj, self.rank)
        by_head = weight.view(-1, self.nope + self.head_dim, self.rank)
        self._of_keys, self._of_values = by_head.split([self.nope, self.head_dim], 1)  # [H, nope, rank], [H, v, rank]

    def keys(self, latent: torch.Tensor, rotated: torch.Tensor) -> torch.Tensor:
        """`latent [1, 1, n, rank]`, `rotated [1, 1, n, rope]` -> `[1, 1, n, key_dim]`."""
        return _pad(torch.cat((latent, rotated), -1), self.key_dim)

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """`[H, n, nope + rope]` -> `[n, H, key_dim]`, contiguous."""
        heads, rows, _ = query.shape
        absorbed = query.new_zeros(rows, heads, self.key_dim)
        absorbed[..., : self.rank] = torch.bmm(query[..., : self.nope], self._of_keys).transpose(0, 1)
        absorbed[..., self.rank : self.rank + self.rope] = query[..., self.nope :].transpose(0, 1)
        return absorbed

    def outputs(self, attended: torch.Tensor) -> torch.Tensor:
        """`[n, H, value_dim]` -> `[n, H, v_head_dim]`."""
        latents = attended[..., : self.rank].transpose(0, 1)
        return torch.bmm(latents, self._of_values.transpose(1, 2)).transpose(0, 1)


def absorb(layers: Iterable[torch.nn.Module], attention: str) -> bool:
    """Let the layers' attention modules hand latent keys to the attention that is registered as `attention`, if each of
    them has one latent attention, all of one size. -> whether they do. With another attention they expand as before."""
    modules: list[Any] = []
    for layer in layers:
        found = [module for module in layer.modules() if all(hasattr(module, name) for name in _ATTRIBUTES)]
        if len(found) != 1:
            return False
        modules += found
    if len({(m.kv_lora_rank, m.qk_nope_head_dim, m.qk_rope_head_dim, m.v_head_dim) for m in modules}) != 1:
        return False
    for module in modules:
        _attach(module, AbsorbedWeights(module), attention)
    return True


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


def _weight(linear: torch.nn.Module, inputs: int) -> torch.Tensor:
    """`[outputs, inputs]` of a linear layer without bias. One that is packed or quantized gives it for unit vectors."""
    weight = getattr(linear, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.is_floating_point() and weight.dim() == 2:
        return weight.detach()
    raise TypeError(f"{type(linear).__name__} has no plain weight of {inputs} inputs")


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _pad(x: torch.Tensor, size: int) -> torch.Tensor:
    return x if x.shape[-1] == size else torch.nn.functional.pad(x, (0, size - x.shape[-1]))
