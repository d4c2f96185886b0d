"""Some experts of a run of layers, for nodes that lead these layers and do not hold them.

Owns which experts are here and in which number format their rows travel. Attention, routers and sums are the leader's
(`ops.base.split_experts`). On CPUs, by the same op as whole mixtures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from swarm.errors import InvalidRequest, OutOfMemory
from swarm.types import LayerSpan
from swarm_kernels.models.config import ModelConfig
from swarm_kernels.models.source import ModelSource
from swarm_kernels.ops.base.layer_weights import Experts
from swarm_kernels.ops.base.split_experts import outputs_of
from swarm_kernels.runtime.mixture_reader import read_experts
from swarm_kernels.runtime.span import Progress
from swarm_kernels.runtime.weight_reader import WeightReader, packs_of


def rows_dtype(weights: torch.dtype) -> torch.dtype:
    """In which rows travel to experts of this format without changing a bit of their outputs: what is multiplied with
    bf16 is rounded to it anyway; what is quantized to 8 bits is so from fp32."""
    return torch.bfloat16 if weights == torch.bfloat16 else torch.float32


def mixture_layers(config: ModelConfig, layers: LayerSpan) -> list[int]:
    """Those of `layers` whose MLP is a mixture of experts, on the fast path."""
    return [layer for layer in layers if config.decoder is not None and config.decoder.layers[layer].mixture]


@dataclass(frozen=True, slots=True)
class ExpertSpan:
    """Use `load.load_experts`. Calls must not overlap."""

    layers: LayerSpan
    experts: range
    hidden: int
    weight_dtype: torch.dtype
    by_layer: Mapping[int, Experts]

    @classmethod
    def load(
        cls, source: ModelSource, layers: LayerSpan, experts: range, dtype: torch.dtype, progress: Progress
    ) -> ExpertSpan:
        """See `load.load_experts`."""
        reader = WeightReader(source, dtype if dtype.is_floating_point else None, torch.device("cpu"))
        packs, found, mixtures = packs_of(dtype), {}, mixture_layers(source.config, layers)
        try:
            for layer in mixtures:
                found[layer] = read_experts(reader, source.config, layer, packs, experts)
                progress(len(found) / len(mixtures))
        except MemoryError:
            raise OutOfMemory(f"experts {experts.start}:{experts.stop} of layers {layers} do not fit") from None
        progress(1.0)
        return cls(layers, experts, source.config.hidden_size, dtype, found)

    @property
    def nbytes(self) -> int:
        return sum(experts.nbytes for experts in self.by_layer.values())

    @torch.inference_mode()
    def outputs(self, layer: int, x: torch.Tensor, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Of expert `experts[i]` of a layer for row `rows[i]` of `x [n, hidden]`, `[pairs, hidden]` fp32. Raises
        InvalidRequest for what is not here."""
        held = self.by_layer.get(layer)
        if held is None:
            raise InvalidRequest(f"layer {layer} has no experts here; those of layers {self.layers} are")
        outside = (experts < self.experts.start) | (experts >= self.experts.stop)
        if bool(outside.any()) or bool(((rows < 0) | (rows >= len(x))).any()):
            raise InvalidRequest(f"experts {self.experts.start}:{self.experts.stop} are here, others were asked for")
        return outputs_of(held, x[rows], experts - self.experts.start)
