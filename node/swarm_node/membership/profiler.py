"""What this machine can do: measured once for each model and remembered.

Owns the calibration files. How a span is timed is `swarm_kernels.calibration.cost_curve`'s; how live batches correct the measurement
is `plan.scheduling.layer_time`'s.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from filelock import FileLock

import swarm
from swarm.types import CostCurve, LayerSpan
from swarm_kernels.calibration import hetero_cores
from swarm_kernels.calibration.cost_curve import DEFAULT_WIDTHS, choose_threads, measure_cost
from swarm_kernels.device.core_groups import find_core_groups
from swarm_kernels.device.device import physical_cores, state_dtype
from swarm_kernels.models.source import ModelSource
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.triton import selector
from swarm_kernels.runtime.load import load_span

logger = logging.getLogger(__name__)

PROBE_LAYERS = 2
THREADS_BUDGET_S = 0.5
UNITS_BUDGET_S = 0.3
COST_BUDGET_S = 0.7
MAX_AGE_S = 86400.0  # of a remembered measurement
BUSY_AGE_S = 120.0  # of one that was taken while others kept the machine busy: for the nodes that start together
IDLE_SHARE = 0.75  # of the cores, that may have been busy in the last minute of a calm machine


@dataclass(frozen=True, slots=True)
class Calibration:
    """`cost`: ms a layer against rows of a batch, at `threads` threads."""

    threads: int
    cost: CostCurve
    narrow_thousandths: int = (
        0  # of each layer's columns, by a second unit of cores (`swarm_kernels.calibration.hetero_cores`); 0: none
    )


def calibrate(
    source: ModelSource, dtype: torch.dtype, device: torch.device, threads: int | None, folder: Path
) -> Calibration:
    """Measure a few layers of the model on this device, or recall what was measured before; sets the thread count.

    One process of a machine measures at a time: two at once would measure each other. Raises ModelError, OutOfMemory.
    """
    file = folder / f"{_key(source, dtype, device, threads)}.json"
    with _exclusive(file):
        found = _load_cached(file)
        if found is None:
            calm = _is_idle()
            found = _measure(source, dtype, device, threads)
            _store_cached(file, found, calm)
    _set_threads(found.threads, source, found.narrow_thousandths)
    return found


@contextlib.contextmanager
def _exclusive(file: Path) -> Iterator[None]:
    """Hold the lock beside `file`. On a full or read-only disk there is none, and no memory of measurements."""
    lock = FileLock(file.with_suffix(".lock"))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        logger.warning("measurements cannot be kept in %s: %s", file.parent, error.strerror)
        yield
        return
    try:
        yield
    finally:
        lock.release()


def _measure(source: ModelSource, dtype: torch.dtype, device: torch.device, threads: int | None) -> Calibration:
    begun = time.perf_counter()
    num_layers = source.config.num_layers
    start = 1 if num_layers > PROBE_LAYERS + 1 else 0  # inner layers bring neither embedding nor head
    probe = load_span(source, LayerSpan(start, min(start + PROBE_LAYERS, num_layers)), dtype, device)
    _set_threads(threads or physical_cores(), source)
    chosen = threads or (choose_threads(probe, budget_s=THREADS_BUDGET_S) if device.type == "cpu" else 1)
    units = hetero_cores.choose_division(probe, chosen, UNITS_BUDGET_S).groups if threads is None else None
    narrow = units.slow_permille if units else 0
    _set_threads(chosen, source, narrow)
    cost = measure_cost(probe, budget_s=COST_BUDGET_S)
    logger.info("calibrated in %.1f s: %d threads, %.3f ms a layer", time.perf_counter() - begun, chosen, cost.ms_at(1))
    return Calibration(chosen, cost, narrow)


def _is_idle() -> bool:
    """Whether a measurement taken now tells what this machine can do, and not what others leave of it."""
    return os.getloadavg()[0] < IDLE_SHARE * physical_cores()


def _set_threads(count: int, source: ModelSource, narrow_thousandths: int = 0) -> None:
    """torch's own threads wait for each other by spinning, which ruins a shared machine: none where we have kernels."""
    units = find_core_groups() if narrow_thousandths else None
    hetero_cores.apply(replace(units, slow_permille=narrow_thousandths) if units else None, count)
    compiled = source.config.has_fast_path and dispatch.isa() != "reference"
    torch.set_num_threads(1 if compiled else count)


def _key(source: ModelSource, dtype: torch.dtype, device: torch.device, threads: int | None) -> str:
    """Everything the measurement depends on."""
    if device.type == "cuda":
        name = f"{torch.cuda.get_device_name(device)} {selector.describe(device, state_dtype(dtype))}"
    else:
        name = f"cpu {physical_cores()} {dispatch.describe()}"
    facts = (source.weight_hash, str(dtype), name, threads, DEFAULT_WIDTHS, torch.__version__, swarm.__version__)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


def _load_cached(file: Path) -> Calibration | None:
    try:
        age_s = abs(time.time() - file.stat().st_mtime)
        stored = json.loads(file.read_bytes())
        if age_s > (MAX_AGE_S if stored["calm"] else BUSY_AGE_S):
            return None
        cost = CostCurve(tuple(map(int, stored["widths"])), tuple(map(float, stored["ms"])))
        calibration = Calibration(int(stored["threads"]), cost, int(stored["narrow_thousandths"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    sound = len(cost.widths) == len(cost.ms) > 0 and all(0 < ms < math.inf for ms in cost.ms)
    sound &= calibration.threads > 0 and 0 <= calibration.narrow_thousandths <= 1000
    return calibration if sound else None


def _store_cached(file: Path, calibration: Calibration, calm: bool) -> None:
    cost = calibration.cost
    measured = {"widths": cost.widths, "ms": cost.ms, "calm": calm}
    threads = {"threads": calibration.threads, "narrow_thousandths": calibration.narrow_thousandths}
    content = json.dumps({**threads, **measured})
    temporary = file.with_suffix(f".{os.getpid()}")
    try:
        temporary.write_text(content, encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        logger.warning("the measurement cannot be kept in %s: %s", file, error.strerror)
        with contextlib.suppress(OSError):
            temporary.unlink()
