"""The trained modules: they map the target's states to states for the target's own head.

Medusa heads (the arithmetic of `draft.medusa`) and layers of a draft model (that of `ops.dispatch.decoder_layers`),
with gradients, initial weights and tensor names. The head stays the target's: it would be most of the file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from swarm_kernels.draft.file import FINAL_NORM, DraftMetadata, layer_tensors
from swarm_kernels.models.config import ModelConfig
from swarm_kernels.models.source import ModelSource
from swarm_kernels.runtime.rope import RopeTable
from swarm_training.distill.draft_layer import DraftLayer
from swarm_training.distill.features import TrainingExample, padded_states


class Student(nn.Module, ABC):
    """The interface to the trainer.

    What `inputs` makes of chats -> `[levels, b, n, hidden]`; level l at position i predicts token `i + ahead[l]`.
    """

    base: int
    """Layers of the target below it."""

    ahead: tuple[int, ...]

    def initialize(self, examples: Sequence[TrainingExample]) -> None:
        """Before the first step: compute what can be computed at once."""

    def inputs(self, examples: Sequence[TrainingExample], device: torch.device) -> tuple[torch.Tensor, ...]:
        """By default the target's states `[b, n, hidden]`."""
        return (padded_states(examples, device),)

    @abstractmethod
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor: ...

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

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        (hidden,) = inputs
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
        self.own = [DraftLayer(config, weights) for weights in layers]
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

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        (hidden,) = inputs
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
