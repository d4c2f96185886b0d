"""Mixtures of experts on the compiled CPU kernels: one call a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarm.errors import KernelError
from swarm_kernels.ops.base.experts import Gating, check_routing
from swarm_kernels.ops.cpu import binding, cpu_library
from swarm_kernels.ops.cpu.cpu_linear import PackedLinear


@dataclass(frozen=True, slots=True, eq=False)
class PackedExperts:
    """See `experts.Experts`. Every expert may have another number format."""

    first: Sequence[PackedLinear]
    second: Sequence[PackedLinear]
    gating: Gating
    desc: binding.ExpertsDesc

    @property
    def count(self) -> int:
        return len(self.first)

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for linear in (*self.first, *self.second))

    def __call__(self, x: torch.Tensor, index: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        check_routing(x, index, scores, self.desc.hidden)
        rows, chosen = index.shape
        wide, places = x.to(torch.float32).contiguous(), index.contiguous()
        weights = scores.to(torch.float32).contiguous()
        out = torch.zeros_like(wide)
        if rows and chosen:
            status = cpu_library.loaded().swarm_experts(
                self.desc, wide.data_ptr(), places.data_ptr(), weights.data_ptr(), rows, chosen, out.data_ptr()
            )
            if status == binding.BAD_EXPERT:
                raise KernelError(f"an expert was chosen that is none of the {self.count}")
            cpu_library.check(status)
        return out.to(x.dtype)


def pack_experts(first: Sequence[PackedLinear], second: Sequence[PackedLinear], gating: Gating) -> PackedExperts:
    """See `dispatch.pack_experts`."""
    arrays = [(binding.LinearDesc * len(part))(*(linear.desc for linear in part)) for part in (first, second)]
    how = binding.GatingDesc(gating.kind, gating.alpha, gating.limit, gating.shift)
    hidden, width = first[0].in_features, second[0].in_features
    return PackedExperts(first, second, gating, binding.ExpertsDesc(*arrays, len(first), hidden, width, how))
