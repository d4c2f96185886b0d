"""Kinds of machines whose rows audits compare: instruction sets of our kernels, plain torch, transformers' layers.

Owns their names, and how this machine is held to one of them. Three hops of one model each.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch

from swarm.types import LayerSpan
from swarm_kernels.device.device import DTYPES
from swarm_kernels.models.config import ModelConfig
from swarm_kernels.models.source import ModelSource
from swarm_kernels.ops import dispatch
from swarm_kernels.runtime.hf_span import HfSpan
from swarm_kernels.runtime.load import load_span
from swarm_kernels.runtime.span import Span

EDGES = (10, 20, 30)
_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


@dataclass(frozen=True)
class Machine:
    """`isa`: of our kernels. `transformers`: its layers run, with a residual stream in the dtype of the wire, as on a
    GPU. `environment`: holds torch and oneDNN to an instruction set; it must be set before torch is loaded."""

    isa: str
    transformers: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def named(self) -> bool:
        """Whether two of this kind promise each other the same bits (`swarm_kernels.audit.arithmetic`)."""
        return self.isa != "reference" and not self.transformers

    def spans(self, source: ModelSource, dtype: str) -> list[Span]:
        """The three hops. `dtype`: of the weights."""
        dispatch.select_isa(self.isa)
        parts = [LayerSpan(a, b) for a, b in zip((0, *EDGES), EDGES, strict=False)]
        if self.transformers:
            device = torch.device("cpu")
            return [HfSpan.load(source, part, DTYPES[dtype], device, lambda fraction: None) for part in parts]
        return [load_span(source, part, DTYPES[dtype]) for part in parts]


MACHINES = {
    "avx512bf16": Machine("avx512bf16"),
    "avx512": Machine("avx512"),
    "avx2": Machine("avx2", environment=_AVX2),
    "portable": Machine("generic", environment={"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}),
    "torch": Machine("reference"),
    "torch avx2": Machine("reference", environment=_AVX2),
    "transformers": Machine("best", transformers=True),
    "transformers avx2": Machine("avx2", transformers=True, environment=_AVX2),
}


class DitheredSource:
    """A ModelSource whose matrices have lost the grid of the file's 4-bit format, as if they had never been quantized:
    noise of half a step is added, seeded by the tensor's name. Otherwise int4 would be free of errors here."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source

    def __getattr__(self, name: str) -> object:
        return getattr(self._source, name)

    @property
    def config(self) -> ModelConfig:
        return self._source.config

    def tensor(self, name: str) -> torch.Tensor:
        tensor = self._source.tensor(name)
        if tensor.ndim != 2 or "layers" not in name:
            return tensor
        blocks = tensor.float().reshape(-1, 32)
        step = (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / 15
        noise = torch.rand(blocks.shape, generator=torch.Generator().manual_seed(hash_of(name))) - 0.5
        return (blocks + step * noise).reshape(tensor.shape)


def hash_of(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
