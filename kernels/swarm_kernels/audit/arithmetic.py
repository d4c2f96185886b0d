"""Names what computes here, so that two machines of one name may expect the same bits from each other.

Owns the name. It is empty wherever that has not been shown: on GPUs, with plain torch (which also computes the sizes
that the kernels are not compiled for), in transformers' layers.
"""

from __future__ import annotations

import hashlib

import torch

from swarm_kernels.device.device import state_dtype
from swarm_kernels.models.config import ModelConfig
from swarm_kernels.ops.cpu import build, cpu_library
from swarm_kernels.ops.cpu.cpu_descriptors import supports_attention, supports_mlp


def arithmetic(config: ModelConfig, weights: torch.dtype, device: torch.device) -> str:
    """The compiled kernels (sources, compiler, flags), their instruction set, and torch with its own. `weights`: their
    format, one of `device.DTYPES`."""
    if device.type != "cpu" or not config.has_fast_path:
        return ""
    compiled = supports_attention(config.head_dim, state_dtype(weights)) and all(map(supports_mlp, config.inner_widths))
    if not compiled or cpu_library.isa() == cpu_library.REFERENCE:
        return ""
    parts = build.library().name, cpu_library.isa(), torch.__version__, torch.backends.cpu.get_cpu_capability()
    return f"{parts[1]} {hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"
