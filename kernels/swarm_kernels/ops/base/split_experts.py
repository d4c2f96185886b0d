"""A mixture whose experts are partly elsewhere: ours are computed here, the others asked for, all are added up here.

Owns which rows go where, and that the sum is that of one machine with all experts, bit for bit: outputs come back one
by one and not in sums of some. Who computes the others is not known here; until somebody is set, they are zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from swarm.errors import KernelError
from swarm_kernels.ops.base.experts import check_routing
from swarm_kernels.ops.base.layer_weights import Experts

Wait = Callable[[], torch.Tensor]
"""-> `[pairs, hidden]` fp32. Raises SwarmError where they cannot be had."""

Ask = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], Wait]
"""(layer, `x [n, hidden]`, `rows [pairs]`, `experts [pairs]`) -> how to wait for the outputs of expert `experts[i]` for
row `rows[i]` of x, pair by pair. It does not wait itself."""

AddUp = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`outputs [n, k, hidden]` fp32, `scores [n, k]` -> `[n, hidden]`, as the op of whole mixtures adds them up."""


def zeros(layer: int, x: torch.Tensor, rows: torch.Tensor, experts: torch.Tensor) -> Wait:
    """For measuring and checking what is here alone."""
    return lambda: torch.zeros(len(rows), x.shape[1])


@dataclass(slots=True, eq=False)
class ExpertsElsewhere:
    """Of all layers of a span: who computes the experts that it does not hold."""

    ask: Ask = zeros


@dataclass(frozen=True, slots=True)
class HeldExperts:
    """Which experts of each of its mixtures a span holds; `elsewhere` are the others."""

    experts: range
    elsewhere: ExpertsElsewhere = field(default_factory=ExpertsElsewhere)


@dataclass(frozen=True, slots=True, eq=False)
class SplitExperts:
    """See `layer_weights.Experts`. `own`: experts `held` of `count`; None if that is none of them."""

    own: Experts | None
    held: range
    count: int
    hidden: int
    layer: int
    elsewhere: ExpertsElsewhere
    add_up: AddUp

    @property
    def nbytes(self) -> int:
        return 0 if self.own is None else self.own.nbytes

    def __call__(self, x: torch.Tensor, index: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        check_routing(x, index, scores, self.hidden)
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < self.count:
            raise KernelError(f"an expert was chosen that is none of the {self.count}")
        here = (index >= self.held.start) & (index < self.held.stop)
        rows, places = (~here).nonzero(as_tuple=True)
        wait = self.elsewhere.ask(self.layer, x, rows, index[rows, places]) if len(rows) else None
        outputs = torch.empty(*index.shape, self.hidden)
        own_rows, own_places = here.nonzero(as_tuple=True)
        if self.own is not None and len(own_rows):
            chosen = index[own_rows, own_places] - self.held.start
            outputs[own_rows, own_places] = outputs_of(self.own, x[own_rows], chosen)
        if wait is not None:
            outputs[rows, places] = wait()
        return self.add_up(outputs, scores).to(x.dtype)


def outputs_of(experts: Experts, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`x [pairs, hidden]`, `index [pairs]` -> the output of each row's expert, `[pairs, hidden]` fp32: a sum of one,
    which adds nothing but the sign of a zero. Raises KernelError."""
    return experts(x.float(), index[:, None], torch.ones(len(index), 1))
