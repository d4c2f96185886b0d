"""One decoder layer of a student: the arithmetic of `ops.dispatch.decoder_layers`, with gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from swarm_kernels.models.config import ModelConfig


class DraftLayer(nn.Module):
    def __init__(self, config: ModelConfig, weights: dict[str, torch.Tensor]) -> None:
        """`weights`: by their names within a layer."""
        super().__init__()
        self._config = config
        self.names = sorted(weights)
        self.parts = nn.ParameterList(weights[name].float().clone() for name in self.names)

    def named_weights(self) -> list[tuple[str, torch.Tensor]]:
        return list(zip(self.names, self.parts, strict=True))

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """`[b, n, hidden]` of texts that begin at position 0."""
        q, k, v = self.heads(hidden)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        return self.rest(hidden, F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))

    def heads(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values `[b, heads, n, dim]`, not rotated."""
        config, x = self._config, self._norm("input_layernorm.weight", hidden)

        def heads(name: str, count: int) -> torch.Tensor:
            return self._linear(f"self_attn.{name}_proj", x).view(*x.shape[:2], count, config.head_dim).transpose(1, 2)

        q = self._norm("self_attn.q_norm.weight", heads("q", config.num_heads))
        k = self._norm("self_attn.k_norm.weight", heads("k", config.num_kv_heads))
        return q, k, heads("v", config.num_kv_heads)

    def rest(self, hidden: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """What follows attention, whose output is `mixed [b, heads, n, dim]`."""
        hidden = hidden + self._linear("self_attn.o_proj", mixed.transpose(1, 2).flatten(-2))
        x = self._norm("post_attention_layernorm.weight", hidden)
        gated = F.silu(self._linear("mlp.gate_proj", x)) * self._linear("mlp.up_proj", x)
        return hidden + self._linear("mlp.down_proj", gated)

    def _named(self, name: str) -> torch.Tensor | None:
        return self.parts[self.names.index(name)] if name in self.names else None

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self._named(name)
        if weight is None:
            return x
        return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), self._config.rms_norm_eps)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self._named(f"{name}.weight"), self._named(f"{name}.bias")
        assert weight is not None  # `layer_tensors` has all of a layer
        return F.linear(x, weight, bias)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, Hugging Face's convention; `x [b, heads, n, dim]`, tables `[n, rot]`."""
    width = cos.shape[-1]
    part, rest = x[..., :width], x[..., width:]
    left, right = part.chunk(2, -1)
    return torch.cat((part * cos + torch.cat((-right, left), -1) * sin, rest), -1)
