"""Names what computes here, so that two machines of one name may expect the same bits from each other.

Owns the name. It is empty wherever that has not been shown: on GPUs, with plain torch, in transformers' layers.
"""

from __future__ import annotations

import hashlib

import torch

from swarm_kernels.models.config import ModelConfig
from swarm_kernels.ops.cpu import build, cpu_library


def arithmetic(config: ModelConfig, device: torch.device) -> str:
    """The compiled kernels (sources, compiler, flags), their instruction set, and torch with its own."""
    if device.type != "cpu" or not config.has_fast_path or cpu_library.isa() == cpu_library.REFERENCE:
        return ""
    parts = build.library().name, cpu_library.isa(), torch.__version__, torch.backends.cpu.get_cpu_capability()
    return f"{parts[1]} {hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"
