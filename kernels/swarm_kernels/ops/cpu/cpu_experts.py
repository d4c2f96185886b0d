"""Mixtures of experts on the compiled CPU kernels: one call for the experts of a layer, and descriptors of mixtures in
stacks of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swarm.errors import KernelError
from swarm_kernels.ops.base.experts import Gating, check_routing
from swarm_kernels.ops.base.layer_weights import Mixture
from swarm_kernels.ops.base.split_experts import SplitExperts
from swarm_kernels.ops.cpu import binding, cpu_library
from swarm_kernels.ops.cpu.code_blocks import BLOCK
from swarm_kernels.ops.cpu.cpu_linear import PackedLinear, linear_desc


@dataclass(frozen=True, slots=True, eq=False)
class PackedExperts:
    """See `layer_weights.Experts`. Every expert may have another number format."""

    first: Sequence[PackedLinear]
    second: Sequence[PackedLinear]
    gating: Gating
    desc: binding.ExpertsDesc

    @property
    def count(self) -> int:
        return len(self.first)

    @property
    def hidden(self) -> int:
        return self.first[0].in_features

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for linear in (*self.first, *self.second))

    def __call__(self, x: torch.Tensor, index: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        check_routing(x, index, scores, self.hidden)
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


def add_up(outputs: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """See `split_experts.AddUp`: the sum is the code that adds up a whole mixture."""
    rows, chosen, hidden = outputs.shape
    each, weights = outputs.to(torch.float32).contiguous(), scores.to(torch.float32).contiguous()
    out = torch.zeros(rows, hidden)
    status = cpu_library.loaded().swarm_sum_experts(
        each.data_ptr(), weights.data_ptr(), rows, chosen, hidden, out.data_ptr()
    )
    cpu_library.check(status)
    return out


def supports_mixture(mixture: Mixture) -> bool:
    """Whether all its linear layers are packed, and the inner width of a shared expert is a multiple of 16."""
    shared = mixture.shared
    linears = (mixture.router, mixture.shared_gate, *(() if shared is None else (shared.gate_up, shared.down)))
    packed = all(isinstance(linear, PackedLinear) for linear in linears if linear is not None)
    even = shared is None or shared.down.in_features % BLOCK == 0
    return packed and even and isinstance(mixture.experts, PackedExperts | SplitExperts)


def describe_mixture(mixture: Mixture, vectors: list[torch.Tensor]) -> binding.MixtureDesc:
    """Of a supported one. Appends to `vectors` the fp32 tensor that the descriptor points into, if there is one."""
    correction = None
    if mixture.correction is not None:
        vectors.append(mixture.correction.to(torch.float32).contiguous())
        correction = vectors[-1].data_ptr()
    shared, how = mixture.shared, mixture.routing
    if isinstance(mixture.experts, PackedExperts):
        experts = mixture.experts.desc
    else:  # the layer is run in two parts, and Python calls its experts in between
        experts = binding.ExpertsDesc(None, None, mixture.experts.count, mixture.experts.hidden, 0)
    return binding.MixtureDesc(
        linear_desc(mixture.router),
        linear_desc(None if shared is None else shared.gate_up),
        linear_desc(None if shared is None else shared.down),
        linear_desc(mixture.shared_gate),
        correction,
        binding.RoutingDesc(
            how.scores, how.normalized, how.epsilon, how.scale, how.chosen, how.groups, how.used_groups
        ),
        experts,
        0 if shared is None else shared.activation,
    )
