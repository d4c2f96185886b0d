"""What this node computes with: the open model, the device, the dtype, the memory budget and the measured speed.

Owns the order in which these are determined, so that the cheapest error is reported first. Uses no network.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
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
from swarm_kernels.runtime.load import check_splittable
from swarm_node.membership.memory_plan import POLICY, ModelMemory
from swarm_node.membership.placement import manual
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
    capacity: int  # layers; 0: none as a whole, see `expert_room`
    medusa_heads: Path | None = None  # for the last layer
    expert_room: int = 0  # experts of one layer that it could hold for a leader, if it holds no whole layer
    lead_room: int = -1  # ... that it could hold if it led the layer; -1: it could not
    drafter: str = ""  # for the last layer

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
        room = _room(config, source, device, memory, budget)
        if device.type == "cpu" and source.config.has_fast_path and dispatch.isa() == "reference":
            logger.warning("no compiled kernels, so this node is several times slower: %s", dispatch.describe())
        with memory_for("measuring this machine"):
            folder = state_dir() / "calibration"
            calibration = calibrate(source, dtype, device, config.threads, folder, room.probed_experts)
    except BaseException:
        source.close()
        raise
    facts = source, device, dtype, calibration, memory, budget
    return Hardware(*facts, room.capacity, config.medusa_heads, room.expert_room, room.lead_room, config.drafter)


async def in_thread(measuring: Callable[[], Hardware], stack: AsyncExitStack) -> Hardware:
    """Measure in a thread; when cancelled meanwhile, the thread closes the model's files. `stack` closes them later."""
    abandoned = threading.Event()

    def work() -> Hardware:
        hardware = measuring()
        if abandoned.is_set():
            hardware.source.close()
        return hardware

    try:
        hardware = await asyncio.to_thread(work)
    except asyncio.CancelledError:
        abandoned.set()
        raise
    stack.callback(hardware.source.close)
    return hardware


@dataclass(frozen=True, slots=True)
class _Room:
    """See `Hardware`. `probed_experts`: how many of a layer are loaded to measure this machine; None: all."""

    capacity: int
    expert_room: int = 0
    lead_room: int = -1
    probed_experts: int | None = None


def _room(config: NodeConfig, source: ModelSource, device: torch.device, memory: ModelMemory, budget: int) -> _Room:
    """What fits into `budget`. A wrong flag is reported before this node publishes anything. Raises OutOfMemory,
    UsageError."""
    set_by_hand = manual(config, memory.num_layers, memory.experts)
    if set_by_hand is not None and set_by_hand.share is not None:
        check_splittable(source, device)
        share = set_by_hand.share
        if set_by_hand.span is None:
            memory.check_experts(budget, share)
        else:
            memory.kv_tokens(budget, set_by_hand.span, 1, len(share.experts))
        return _Room(0, probed_experts=len(share.experts))
    if set_by_hand is not None and set_by_hand.span is not None:
        memory.kv_tokens(budget, set_by_hand.span, most=1)
    try:
        return _Room(min(memory.capacity(budget), math.ceil(memory.num_layers * config.model_fraction)))
    except OutOfMemory:
        experts, as_leader = memory.expert_room(budget), memory.lead_room(budget)
        if device.type != "cpu" or set_by_hand is not None or (experts < 1 and as_leader < 0):
            raise
        return _Room(0, experts, as_leader, max(0, min(experts, as_leader)))


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
