"""How fast this machine is: measured once for each model, and cached.

Owns the calibration files. A span is timed by `swarm_kernels.calibration.cost_curve`; live batches correct the
measurement in `swarm.planner.scheduling.layer_time`.
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
from swarm_kernels.calibration.random_weights import RandomWeights
from swarm_kernels.calibration.split_watch import SplitWatch
from swarm_kernels.device.core_groups import find_core_groups
from swarm_kernels.device.device import physical_cores, state_dtype
from swarm_kernels.models.layers import tensors_of_span
from swarm_kernels.models.source import ModelSource
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base.split_experts import HeldExperts
from swarm_kernels.ops.triton import selector
from swarm_kernels.runtime.load import load_span
from swarm_kernels.runtime.mixture_reader import mixture_layers
from swarm_kernels.runtime.span import Span
from swarm_node.membership.policy import CalibrationPolicy

logger = logging.getLogger(__name__)

POLICY = CalibrationPolicy()


@dataclass(frozen=True, slots=True)
class Calibration:
    """`cost`: ms a layer against rows of a batch, at `threads` threads."""

    threads: int
    cost: CostCurve
    slow_permille: int = 0  # share of each layer's columns on the slow cores (`calibration.hetero_cores`); 0: no split


def calibrate(
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    threads: int | None,
    folder: Path,
    experts: int | None = None,
) -> Calibration:
    """Measure a few layers of the model on this device, or load the cached measurement; sets the thread count.

    `experts`: where not one layer fits, so many of one are loaded; what others would compute takes no time then, and
    who leads a layer measures it again with them.

    One process of a machine measures at a time: two at once would slow each other down. Raises ModelError, OutOfMemory.
    """
    file = folder / f"{_key(source, dtype, device, threads, experts)}.json"
    with _exclusive(file):
        found = _load_cached(file)
        if found is not None and found.slow_permille and not _still_pays(source, dtype, device, found, experts):
            found = None  # the cost curve is that of the split
        if found is None:
            idle = _is_idle()
            found = _measure(source, dtype, device, threads, experts)
            _store_cached(file, found, idle)
    _set_threads(found.threads, source, found.slow_permille)
    return found


@contextlib.contextmanager
def _exclusive(file: Path) -> Iterator[None]:
    """Hold the lock beside `file`. On a full or read-only disk there is no lock, and nothing is cached."""
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


def _still_pays(
    source: ModelSource, dtype: torch.dtype, device: torch.device, found: Calibration, experts: int | None
) -> bool:
    """Whether the cached split of the columns beats one pool of threads today too."""
    probe = _probe(source, dtype, device, experts)
    _set_threads(found.threads, source)
    return hetero_cores.confirm_division(probe, found.threads, found.slow_permille).groups is not None


def _probe(source: ModelSource, dtype: torch.dtype, device: torch.device, experts: int | None) -> Span:
    """A few layers to time, or one with some of its experts."""
    num_layers = source.config.num_layers
    if experts is not None:
        mixtures = mixture_layers(source.config, LayerSpan(0, num_layers))
        layer, held = mixtures[len(mixtures) // 2], HeldExperts(range(experts))
        one = LayerSpan(layer, layer + 1)
        return load_span(_at_hand(source, one, held.experts), one, dtype, device, held=held)
    start = 1 if num_layers > POLICY.probe_layers + 1 else 0  # inner layers bring neither embedding nor head
    layers = LayerSpan(start, min(start + POLICY.probe_layers, num_layers))
    return load_span(_at_hand(source, layers), layers, dtype, device)


def _measure(
    source: ModelSource, dtype: torch.dtype, device: torch.device, threads: int | None, experts: int | None
) -> Calibration:
    begun = time.perf_counter()
    probe = _probe(source, dtype, device, experts)
    _set_threads(threads or physical_cores(), source)
    chosen = threads or (choose_threads(probe, budget_s=POLICY.threads_budget_s) if device.type == "cpu" else 1)
    groups = hetero_cores.choose_division(probe, chosen).groups if threads is None else None
    slow_permille = groups.slow_permille if groups else 0
    _set_threads(chosen, source, slow_permille)
    cost = measure_cost(probe, budget_s=POLICY.cost_budget_s)
    logger.info("calibrated in %.1f s: %d threads, %.3f ms a layer", time.perf_counter() - begun, chosen, cost.ms_at(1))
    return Calibration(chosen, cost, slow_permille)


def _at_hand(source: ModelSource, layers: LayerSpan, experts: range | None = None) -> ModelSource:
    """Weights to time these layers with: their own, unless they would have to be fetched for that."""
    names = list(tensors_of_span(source, layers, experts))
    if source.missing_bytes(names) and RandomWeights.can_stand_for(source, names):
        return RandomWeights(source)
    return source


def _is_idle() -> bool:
    """Whether a measurement taken now is not disturbed by other programs."""
    return os.getloadavg()[0] < POLICY.idle_load * physical_cores()


def _set_threads(count: int, source: ModelSource, slow_permille: int = 0) -> None:
    """torch's own threads spin while they wait, which slows a shared machine: use one where we have kernels."""
    groups = find_core_groups() if slow_permille else None
    hetero_cores.apply(replace(groups, slow_permille=slow_permille) if groups else None, count)
    compiled = source.config.has_fast_path and dispatch.isa() != "reference"
    torch.set_num_threads(1 if compiled else count)


def split_watch(calibration: Calibration) -> SplitWatch | None:
    """What undoes this calibration's split between core groups when it stops paying; None without a split."""
    groups = find_core_groups() if calibration.slow_permille else None
    if groups is None:
        return None
    return SplitWatch(replace(groups, slow_permille=calibration.slow_permille), calibration.threads)


def _key(
    source: ModelSource, dtype: torch.dtype, device: torch.device, threads: int | None, experts: int | None
) -> str:
    """Everything the measurement depends on."""
    if device.type == "cuda":
        name = f"{torch.cuda.get_device_name(device)} {selector.describe(device, state_dtype(dtype))}"
    else:
        name = f"cpu {physical_cores()} {dispatch.describe()}"
    facts = (
        source.weight_hash,
        str(dtype),
        name,
        threads,
        experts,
        DEFAULT_WIDTHS,
        torch.__version__,
        swarm.__version__,
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


def _load_cached(file: Path) -> Calibration | None:
    try:
        age_s = abs(time.time() - file.stat().st_mtime)
        stored = json.loads(file.read_bytes())
        if age_s > (POLICY.max_age_s if stored["idle"] else POLICY.busy_max_age_s):
            return None
        cost = CostCurve(tuple(map(int, stored["widths"])), tuple(map(float, stored["ms"])))
        calibration = Calibration(int(stored["threads"]), cost, int(stored["slow_permille"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    sound = len(cost.widths) == len(cost.ms) > 0 and all(0 < ms < math.inf for ms in cost.ms)
    sound &= calibration.threads > 0 and 0 <= calibration.slow_permille <= 1000
    return calibration if sound else None


def _store_cached(file: Path, calibration: Calibration, idle: bool) -> None:
    cost = calibration.cost
    measured = {"widths": cost.widths, "ms": cost.ms, "idle": idle}
    threads = {"threads": calibration.threads, "slow_permille": calibration.slow_permille}
    content = json.dumps({**threads, **measured})
    temporary = file.with_suffix(f".{os.getpid()}")
    try:
        temporary.write_text(content, encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        logger.warning("the measurement cannot be kept in %s: %s", file, error.strerror)
        with contextlib.suppress(OSError):
            temporary.unlink()
