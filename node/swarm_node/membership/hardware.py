"""What this node computes with: the open model, the device, the dtype, the memory budget and the measured speed.

Owns the order in which these are determined, so that the cheapest error is reported first. Uses no network.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from swarm.config import NodeConfig, state_dir
from swarm.errors import OutOfMemory
from swarm_kernels.device.device import available_memory, choose_device, parse_dtype
from swarm_kernels.draft.tail import tail_drafter_bytes
from swarm_kernels.models.native_format import native_dtype
from swarm_kernels.models.open import open_model
from swarm_kernels.models.source import ModelSource
from swarm_kernels.ops import dispatch
from swarm_node.membership.memory_plan import POLICY, ModelMemory
from swarm_node.membership.placement import manual_span
from swarm_node.membership.profiler import Calibration, calibrate

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hardware:
    source: ModelSource
    device: torch.device
    dtype: torch.dtype
    calibration: Calibration
    memory: ModelMemory
    budget: int  # bytes for weights, keys and values
    capacity: int  # layers
    medusa_heads: Path | None = None  # for the last layer
    drafter: str = ""  # likewise

    @property
    def num_layers(self) -> int:
        return self.source.config.num_layers


def measure(config: NodeConfig) -> Hardware:
    """Open the model and find out what this machine can do with it. Raises SwarmError."""
    device = choose_device(config.gpu)
    given = None if config.dtype == "auto" else parse_dtype(config.dtype)
    source = open_model(config.model)
    try:
        dtype = given or native_dtype(source)
        memory = ModelMemory.of(source, dtype)
        budget = config.max_memory or int(POLICY.free_fraction * available_memory(device) * config.model_fraction)
        budget -= tail_drafter_bytes(config.drafter, source) if config.drafter else 0  # it may get the last layer
        if config.layers:  # a wrong flag is reported before this node publishes anything
            memory.kv_tokens(budget, manual_span(config.layers, memory.num_layers).span, most=1)
        max_layers = math.ceil(memory.num_layers * config.model_fraction)
        capacity = min(memory.capacity(budget), max_layers)
        if device.type == "cpu" and source.config.has_fast_path and dispatch.isa() == "reference":
            logger.warning("no compiled kernels, so this node is several times slower: %s", dispatch.describe())
        with memory_for("measuring this machine"):
            calibration = calibrate(source, dtype, device, config.threads, state_dir() / "calibration")
    except BaseException:
        source.close()
        raise
    return Hardware(source, device, dtype, calibration, memory, budget, capacity, config.medusa_heads, config.drafter)


@contextlib.contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Raises OutOfMemory for each way in which Python and torch report that memory is exhausted."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise _too_little(what) from None
    except RuntimeError as error:
        if "allocate memory" not in str(error):  # the wording of torch's CPU allocator
            raise
        raise _too_little(what) from None


def _too_little(what: str) -> OutOfMemory:
    return OutOfMemory(f"too little memory for {what}; close other programs, or lower --max-memory")
