"""Random models whose every parameter matters: no norm is 1, no bias 0, no router or sink left as initialized."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from swarm_kernels.runtime.hf_legacy_attention import REFERENCE

_KEPT = (
    "inv_freq",
    "embed_scale",
    "position_ids",
    "embed_positions",
    "causal_mask",
    "masked_bias",
    "slope_rate",
    "query_decay",
    "key_decay",
    "diagonal_decay",
)


def random_model(config: PretrainedConfig, seed: int = 0) -> Any:
    """A transformers model in fp32 with the attention that says what is right, eager for nearly all. Attention and
    positions matter to it."""
    torch.manual_seed(seed)
    attention = REFERENCE.get(config.model_type, "eager")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _randomize(name, parameter)
        for name, buffer in model.named_buffers():
            if name in model.state_dict() and buffer.is_floating_point() and not name.endswith(_KEPT):
                _randomize(name, buffer)
    return model


def _randomize(name: str, tensor: torch.Tensor) -> None:
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "A_log" or "decay" in leaf:
        tensor.add_(torch.rand_like(tensor) * 0.5)
    elif tensor.dim() > 1 and "embed" in name:
        tensor.normal_(0, 0.05 if tensor.shape[-1] > 1 else 0.3)
    elif tensor.dim() > 1 and "router" not in name and ".gate." not in name:
        tensor.normal_(0, 1.2 / tensor.shape[-1] ** 0.5)
    elif tensor.dim() > 1:
        tensor.normal_(0, 2.0 / tensor.shape[-1] ** 0.5)  # routing is decided clearly: no ties to break
    elif "norm" in name and leaf == "weight":
        tensor.add_(torch.randn_like(tensor) * 0.1)
    elif tensor.dim() == 0:
        tensor.add_(0.1)
    else:
        tensor.normal_(0, 0.3)
