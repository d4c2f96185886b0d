"""The trained modules: they map the target's states to states for the target's own head.

Medusa heads (the arithmetic of `draft.medusa`) and layers of a draft model (that of `ops.dispatch.decoder_layers`),
with gradients, initial weights and tensor names. The head stays the target's: it would be most of the file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from swarm_kernels.draft.card import DraftMetadata
from swarm_kernels.draft.file import FINAL_NORM, layer_tensors
from swarm_kernels.models.config import ModelConfig
from swarm_kernels.models.source import ModelSource
from swarm_kernels.runtime.rope import RopeTable


class Student(nn.Module, ABC):
    """The interface to the trainer.

    `[b, n, hidden]` -> `[levels, b, n, hidden]`; level l at position i predicts token `i + ahead[l]`.
    """

    base: int
    """Layers of the target below it."""

    ahead: tuple[int, ...]

    @abstractmethod
    def forward(self, hidden: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def scale_logits(self, scale: float) -> None:
        """Before the first step: multiply its logits by `scale`, as it should be less confident than the target."""

    @abstractmethod
    def weights(self) -> dict[str, torch.Tensor]:
        """By their names in its file."""

    @abstractmethod
    def metadata(self, model: str, weight_hash: str) -> DraftMetadata:
        """Its kind and shape, for its file."""


class HeadsStudent(Student):
    """`count` heads of one block on top of the whole target (Cai et al. 2024, §2.1): head k predicts the
    token k + 2 positions on.

    Medusa's heads each train an output matrix, most of a file of hundreds of MB. Here it is the target's times a
    projection `[hidden, hidden]`. As Medusa's, they start with the output of the target's head.
    """

    def __init__(self, config: ModelConfig, count: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.base = config.num_layers
        self.ahead = tuple(range(2, 2 + count))
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(count))
        for weight in self.blocks.parameters():
            nn.init.zeros_(weight)
        self.projections = nn.ParameterList(torch.eye(hidden) for _ in range(count))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = zip(self.blocks, self.projections, strict=True)
        return torch.stack([F.linear(hidden + F.silu(block(hidden)), projection) for block, projection in heads])

    def scale_logits(self, scale: float) -> None:
        with torch.no_grad():
            for projection in self.projections:
                projection.mul_(scale)

    def weights(self) -> dict[str, torch.Tensor]:
        named = {f"{k}.1.weight": projection.detach() for k, projection in enumerate(self.projections)}
        for name, weight in self.blocks.named_parameters():  # <head>.weight, <head>.bias
            named[name.replace(".", ".0.linear.")] = weight.detach()
        return named

    def metadata(self, model: str, weight_hash: str) -> DraftMetadata:
        return DraftMetadata(model, weight_hash, self.base, 0, len(self.blocks))


class LayersStudent(Student):
    """Layers on top of the target's first `base`, and the final norm; predicts the next token."""

    ahead = (1,)

    def __init__(self, config: ModelConfig, base: int, layers: Sequence[dict[str, torch.Tensor]], norm: torch.Tensor):
        """`layers[i]`: weights by their names within a layer."""
        super().__init__()
        self.config, self.base = config, base
        self.own = [_Layer(config, weights) for weights in layers]
        self._registered = nn.ModuleList(self.own)
        self.norm = nn.Parameter(norm.float().clone())
        self._rope = RopeTable(config.rope, config.head_dim, config.context_length, torch.device("cpu"))

    @classmethod
    def of_target(cls, source: ModelSource, base: int, copied: Sequence[int]) -> LayersStudent:
        """Initialized from the target's layers `copied` and its final norm: far better than random."""
        layers = [
            {name: source.tensor(f"model.layers.{layer}.{name}").float() for name in layer_tensors(source, layer)}
            for layer in copied
        ]
        return cls(source.config, base, layers, source.tensor(FINAL_NORM))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(hidden.shape[1])
        cos, sin = (table.to(hidden) for table in self._rope.at(positions, hidden.shape[1] - 1))
        for layer in self.own:
            hidden = layer(hidden, cos, sin)
        hidden = F.rms_norm(hidden, tuple(self.norm.shape), self.norm.to(hidden.dtype), self.config.rms_norm_eps)
        return hidden[None]

    def scale_logits(self, scale: float) -> None:
        with torch.no_grad():
            self.norm.mul_(scale)

    def metadata(self, model: str, weight_hash: str) -> DraftMetadata:
        return DraftMetadata(model, weight_hash, self.base, len(self.own))

    def weights(self) -> dict[str, torch.Tensor]:
        """By their names in a draft file: the layers come after the target's first `base`."""
        tensors = {FINAL_NORM: self.norm.detach()}
        for number, layer in enumerate(self.own):
            for name, weight in layer.named_weights():
                tensors[f"model.layers.{self.base + number}.{name}"] = weight.detach()
        return tensors


class _Layer(nn.Module):
    def __init__(self, config: ModelConfig, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._config = config
        self.names = sorted(weights)
        self.parts = nn.ParameterList(weights[name].float().clone() for name in self.names)

    def named_weights(self) -> list[tuple[str, torch.Tensor]]:
        return list(zip(self.names, self.parts, strict=True))

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        named = {name: part.to(hidden.dtype) for name, part in zip(self.names, self.parts, strict=True)}
        config = self._config

        def norm(name: str, x: torch.Tensor) -> torch.Tensor:
            return F.rms_norm(x, x.shape[-1:], named[name], config.rms_norm_eps) if name in named else x

        def linear(name: str, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, named[f"{name}.weight"], named.get(f"{name}.bias"))

        def heads(name: str, count: int, x: torch.Tensor) -> torch.Tensor:  # [b, heads, n, dim]
            return linear(f"self_attn.{name}_proj", x).view(*x.shape[:2], count, config.head_dim).transpose(1, 2)

        x = norm("input_layernorm.weight", hidden)
        q = norm("self_attn.q_norm.weight", heads("q", config.num_heads, x))
        k = norm("self_attn.k_norm.weight", heads("k", config.num_kv_heads, x))
        v = heads("v", config.num_kv_heads, x)
        mixed = F.scaled_dot_product_attention(
            _rotated(q, cos, sin), _rotated(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        hidden = hidden + linear("self_attn.o_proj", mixed.transpose(1, 2).flatten(-2))
        x = norm("post_attention_layernorm.weight", hidden)
        gated = F.silu(linear("mlp.gate_proj", x)) * linear("mlp.up_proj", x)
        hidden = hidden + linear("mlp.down_proj", gated)
        return hidden


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, Hugging Face's convention; `x [b, heads, n, dim]`, tables `[n, rot]`."""
    width = cos.shape[-1]
    part, rest = x[..., :width], x[..., width:]
    left, right = part.chunk(2, -1)
    return torch.cat((part * cos + torch.cat((-right, left), -1) * sin, rest), -1)
