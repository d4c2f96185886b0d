"""What this node computes with: the open model, the device, the number format, and how much of it there is.

Owns the order in which these are found out, so that the cheapest mistake is reported first. Knows no network.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from swarm.config import NodeConfig, state_dir
from swarm.errors import OutOfMemory
from swarm_kernels.device.device import available_memory, choose_device, parse_dtype
from swarm_kernels.models.open import open_model
from swarm_kernels.models.source import ModelSource
from swarm_node.membership.memory_plan import ModelMemory
from swarm_node.membership.placement import manual_span
from swarm_node.membership.profiler import Calibration, calibrate

MEMORY_SHARE = 0.8  # of what is free, unless --max-memory says otherwise


@dataclass(frozen=True, slots=True)
class Hardware:
    source: ModelSource
    device: torch.device
    dtype: torch.dtype
    calibration: Calibration
    weights: ModelMemory
    budget: int  # bytes for weights, keys and values
    capacity: int  # layers
    heads: Path | None = None  # Medusa's, for the last of them

    @property
    def num_layers(self) -> int:
        return self.source.config.num_layers


def measure(config: NodeConfig) -> Hardware:
    """Open the model and find out what this machine can do with it. Raises SwarmError."""
    device = choose_device(config.gpu)
    dtype = parse_dtype(config.dtype)
    source = open_model(config.model)
    try:
        weights = ModelMemory.of(source, dtype)
        budget = config.max_memory or int(MEMORY_SHARE * available_memory(device) * config.model_fraction)
        if config.layers:  # the mistakes of a flag are told before anybody hears of this node
            weights.kv_tokens(budget, manual_span(config.layers, weights.num_layers).span, most=1)
        share = math.ceil(weights.num_layers * config.model_fraction)
        capacity = min(weights.capacity(budget), share)
        with memory_for("measuring this machine"):
            calibration = calibrate(source, dtype, device, config.threads, state_dir() / "calibration")
    except BaseException:
        source.close()
        raise
    return Hardware(source, device, dtype, calibration, weights, budget, capacity, config.medusa_heads)


@contextlib.contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Raises OutOfMemory for each way in which Python and torch say that there is no more memory."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise _too_little(what) from None
    except RuntimeError as error:
        if "allocate memory" not in str(error):  # how torch's CPU allocator says it
            raise
        raise _too_little(what) from None


def _too_little(what: str) -> OutOfMemory:
    return OutOfMemory(f"too little memory for {what}; close other programs, or lower --max-memory")
