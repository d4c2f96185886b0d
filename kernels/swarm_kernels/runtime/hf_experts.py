"""transformers' experts interface on our op: every mixture of experts that goes through it, on packed weights.

Owns which gating a module has, found by trying it, the calls, and what Llama 4's classes lack for the interface, which
they do not use. `hf_packing` reads and packs the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base.experts import Gating, GatingKind
from swarm_kernels.ops.base.layer_weights import Experts, Linear

EXPERTS = "swarm"
"""Our name in transformers' experts interface."""
EXACT = "swarm_exact"
"""The same weights, one expert after another, with transformers' own gating: what a span is checked against."""

_SAMPLES, _WIDTH = 64, 16
_MIXTURE = "Llama4TextMoe"
_TOLERANCE = 1e-5  # of gatings, relative to the largest value


@dataclass(slots=True)
class ExpertWeights:
    """Of one module. `first`: gates, then values, whatever the module's order."""

    first: Sequence[Linear]
    second: Sequence[Linear]
    compiled: Experts | None  # None: only transformers knows its gating

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for linear in (*self.first, *self.second))


def is_experts(module: torch.nn.Module) -> bool:
    """Whether its calls go through the interface."""
    return hasattr(module, "is_concatenated") and hasattr(module, "is_transposed") and hasattr(module, "down_proj")


def attach(module: Any, first: Sequence[Linear], second: Sequence[Linear]) -> None:
    """Give a module its experts; its own parameters stay empty."""
    gating = gating_of(module)
    compiled = None if gating is None else dispatch.pack_experts(first, second, gating)
    module.swarm_experts = ExpertWeights(first, second, compiled)
    module.packed_bytes = module.swarm_experts.nbytes


def gating_of(module: Any) -> Gating | None:
    """What the module does between its linear layers, by what it answers to random numbers; None: nothing we know."""
    if module.has_post_expert_norm:
        return None
    limits = {float("inf"), *_numbers(module, "limit", "swiglu_limit")}
    alphas = {1.0, *_numbers(module, "alpha", "swiglu_alpha")}
    size = 2 * max([2.0, *(limit for limit in limits if limit != float("inf"))])  # beyond the limits too
    x = torch.randn(_SAMPLES, _WIDTH * (2 if module.has_gate else 1), generator=torch.Generator().manual_seed(1)) * size
    wanted = _apply(module, x)
    candidates = [
        Gating(GatingKind.SWIGLU, alpha, limit, shift) for alpha in alphas for limit in limits for shift in (0.0, 1.0)
    ]
    candidates += [Gating(GatingKind.GEGLU_TANH), Gating(GatingKind.RELU_SQUARED)]
    for gating in candidates:
        if gating.has_gates != module.has_gate:
            continue
        if (gating(x) - wanted).abs().max() <= _TOLERANCE * wanted.abs().max():
            return gating
    return None


def _numbers(module: Any, *names: str) -> list[float]:
    values = [getattr(module, name, None) for name in names]
    return [float(value) for value in values if isinstance(value, (int, float))]


def _apply(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The module's gating of `[gates; values]`."""
    if module.has_gate and not module.is_concatenated:
        x = torch.stack(x.chunk(2, -1), -1).flatten(-2)
    gated: torch.Tensor = (module._apply_gate if module.has_gate else module.act_fn)(x)
    return gated


def _experts(module: Any, hidden: torch.Tensor, index: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """transformers' experts interface: `hidden [n, width]`, `index`, `scores` `[n, k]` -> `[n, width]`."""
    compiled = module.swarm_experts.compiled
    if compiled is None:
        return _exact(module, hidden, index, scores)
    output: torch.Tensor = compiled(hidden, index, scores)
    return output


def _exact(module: Any, hidden: torch.Tensor, index: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    weights: ExpertWeights = module.swarm_experts
    outputs = torch.zeros(*index.shape, hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
    for expert in sorted(set(index.flatten().tolist())):
        rows, places = (index == expert).nonzero(as_tuple=True)
        output = weights.second[expert](_apply(module, weights.first[expert](hidden[rows])))
        outputs[rows, places] = module.post_expert_norm(output) if module.has_post_expert_norm else output
    return (outputs * scores[..., None]).sum(1).to(hidden.dtype)


def adopt_llama4(layer: torch.nn.Module, config: Any) -> None:
    """Have the layer's mixture, if it is one of Llama 4, call its experts through the interface. `config`: the text
    model's, which names the function."""
    for mixture in layer.modules():
        if type(mixture).__name__ != _MIXTURE:
            continue
        experts: Any = mixture.experts
        experts.is_concatenated = experts.is_transposed = experts.has_gate = True
        experts.has_bias = experts.has_post_expert_norm = False
        experts._apply_gate = MethodType(_llama4_gate, experts)
        experts.config = config
        mixture.forward = MethodType(_llama4_forward, mixture)


def _llama4_gate(experts: Any, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gated: torch.Tensor = up * experts.act_fn(gate)
    return gated


def _llama4_forward(mixture: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As its class does it, of the chosen experts only. Scores multiply an expert's inputs, not its outputs."""
    rows = hidden.reshape(-1, mixture.hidden_dim)
    scores, logits = mixture.router(rows)
    chosen = logits.topk(mixture.top_k, dim=1).indices
    run = ALL_EXPERTS_FUNCTIONS[mixture.experts.config._experts_implementation]
    out: torch.Tensor = mixture.shared_expert(rows)
    for index in chosen.split(1, 1):
        scaled = rows * scores.gather(1, index)
        out = out + run(mixture.experts, scaled, index, torch.ones_like(scaled[:, :1]))
    return out, logits


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)
ALL_EXPERTS_FUNCTIONS.register(EXACT, _exact)
