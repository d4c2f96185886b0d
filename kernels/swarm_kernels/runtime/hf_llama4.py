"""Llama 4's mixtures of experts behind transformers' experts interface, which their own classes do not use.

Owns what these classes lack for it, and their routing: scores multiply an expert's inputs, not its outputs.
`hf_experts` has the interface's functions, `hf_packing` the weights.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

_MIXTURE = "Llama4TextMoe"


def adopt(layer: torch.nn.Module, config: Any) -> None:
    """Have the layer's mixture, if it is one of Llama 4, call its experts through the interface. `config`: the text
    model's, which names the function."""
    for mixture in layer.modules():
        if type(mixture).__name__ != _MIXTURE:
            continue
        experts: Any = mixture.experts
        experts.is_concatenated = experts.is_transposed = experts.has_gate = True
        experts.has_bias = experts.has_post_expert_norm = False
        experts._apply_gate = MethodType(_apply_gate, experts)
        experts.config = config
        mixture.forward = MethodType(_forward, mixture)


def _apply_gate(experts: Any, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gated: torch.Tensor = up * experts.act_fn(gate)
    return gated


def _forward(mixture: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As its class does it, of the chosen experts only."""
    rows = hidden.reshape(-1, mixture.hidden_dim)
    scores, logits = mixture.router(rows)
    chosen = logits.topk(mixture.top_k, dim=1).indices
    run = ALL_EXPERTS_FUNCTIONS[mixture.experts.config._experts_implementation]
    out: torch.Tensor = mixture.shared_expert(rows)
    for index in chosen.split(1, 1):
        scaled = rows * scores.gather(1, index)
        out = out + run(mixture.experts, scaled, index, torch.ones_like(scaled[:, :1]))
    return out, logits
