"""Which contiguous layers each device of a pipeline runs, so that the slowest stage is as fast as can be.

Two ways to the same least bottleneck: Jupiter's dynamic program (§IV-B1) and Hyperion's HypSplit-DP (§IV-A, Algorithm
1), a search over the answer with a feasibility program. Of all partitions with that bottleneck the one with the least
total time is returned, since a lone token pays the total. Devices are taken in the order given; what the links between
them cost is not considered.

All sums are exact (floats are scaled to whole numbers), so no stage exceeds its device's memory by rounding.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Literal

from swarm.errors import Infeasible, UsageError
from swarm.quantities import Amount, Amounts, NodeId, Schema, Speed
from swarm.types import LayerSpan

Method = Literal["jupiter", "hypsplit"]

_TICKS = 1 << 40  # of one bottleneck: total times are compared as whole numbers
_BISECTION_WIDTH = 1e-9  # relative; below it the search stops bisecting and asks for "strictly better" instead


class LayerCost(Schema, frozen=True):
    """One layer: `memory` of its weights and KV in any unit shared with the devices, `flops` of one forward pass.

    `flops` may be left out where all devices say what a layer takes them.
    """

    memory: Amount
    flops: Amount | None = None


class Device(Schema, frozen=True):
    """One stage's device: its memory, and either its speed or the measured ms of a layer or of each, `[num_layers]`.

    `id`: what to call it; its index if None.
    """

    memory: Amount
    flops_per_s: Speed | None = None
    layer_ms: Amount | Amounts | None = None
    id: NodeId | None = None


@dataclass(frozen=True, slots=True)
class Partition:
    """`spans[i]` and `stage_ms[i]` belong to device i, None and 0.0 if it idles. The spans cover `[0, L)` in order."""

    spans: tuple[LayerSpan | None, ...]
    stage_ms: tuple[float, ...]

    @property
    def bottleneck_ms(self) -> float:
        return max(self.stage_ms)


def partition(
    layers: Sequence[LayerCost], devices: Sequence[Device], method: Method = "jupiter", allow_idle: bool = False
) -> Partition:
    """The partition with the least bottleneck, then the least total time, then the fewest and the most even stages.

    Every device takes at least one layer, as in both papers, unless `allow_idle`. Remaining ties put more layers on
    earlier devices. Raises Infeasible with the constraint that binds, UsageError for input that cannot be right.
    """
    costs = _Costs(layers, devices)
    if method == "jupiter":
        bottleneck = _jupiter(costs, allow_idle)
    elif method == "hypsplit":
        bottleneck = _hypsplit(costs, allow_idle)
    else:
        raise UsageError(f"'{method}' is not a way to partition; choose jupiter or hypsplit")
    if math.isinf(bottleneck):
        raise Infeasible(_why_infeasible(layers, devices, costs, allow_idle))
    return _least_total(costs, bottleneck, allow_idle)


class _Costs:
    """Stage times and memory limits in constant time: per device, prefix sums of whole numbers over the layers."""

    def __init__(self, layers: Sequence[LayerCost], devices: Sequence[Device]) -> None:
        _check(layers, devices)
        self.num_layers, self.num_devices = len(layers), len(devices)
        flops = _exact_prefix([layer.flops or 0.0 for layer in layers])
        memory, unit = _exact_prefix([layer.memory for layer in layers])
        self._time: list[tuple[list[int], int]] = []  # per device: prefix sums [L + 1], and how many units make one ms
        self.reach: list[list[int]] = []  # per device [L + 1]: the furthest end its memory allows, for each start
        for device in devices:
            self._time.append(_device_time(device, flops, self.num_layers))
            room = math.floor(Fraction(device.memory) * unit)
            self.reach.append([bisect_right(memory, held + room) - 1 for held in memory])

    def ms(self, device: int, start: int, end: int) -> float:
        """Milliseconds `device` takes for layers `[start, end)`; never falls as the span grows."""
        prefix, unit = self._time[device]
        return (prefix[end] - prefix[start]) / unit

    def fits(self, device: int, start: int, end: int) -> bool:
        return end <= self.reach[device][start]


def _check(layers: Sequence[LayerCost], devices: Sequence[Device]) -> None:
    if any(device.flops_per_s is not None for device in devices):
        for i, layer in enumerate(layers):
            if layer.flops is None:
                raise UsageError(f"layers[{i}] needs its flops, for a device is given by flops_per_s")
    for i, device in enumerate(devices):
        if (device.flops_per_s is None) == (device.layer_ms is None):
            raise UsageError(f"devices[{i}] needs either flops_per_s or layer_ms")
    if not layers or not devices:
        raise UsageError("a partition needs at least one layer and one device")
    numbers = [x for layer in layers for x in (layer.memory, layer.flops or 0.0)] + [d.memory for d in devices]
    for i, device in enumerate(devices):
        if device.flops_per_s is not None:
            if not 1e-9 <= device.flops_per_s < math.inf:
                raise UsageError(f"device {i} has {device.flops_per_s:g} flops_per_s; a speed is above 0")
        elif isinstance(device.layer_ms, int | float):
            numbers.append(device.layer_ms)
        elif device.layer_ms is not None:
            if len(device.layer_ms) != len(layers):
                raise UsageError(f"device {i} gives {len(device.layer_ms)} layer times for {len(layers)} layers")
            numbers += device.layer_ms
    if not all(0 <= x < math.inf for x in numbers):
        raise UsageError("flops, memory and layer times must be finite and not negative")


def _exact_prefix(values: Sequence[float]) -> tuple[list[int], int]:
    """-> prefix sums `[len + 1]` in whole units, and how many units make 1. A float's denominator is a power of two."""
    ratios = [value.as_integer_ratio() for value in values]
    unit = max(denominator for _, denominator in ratios)
    return list(accumulate((n * (unit // d) for n, d in ratios), initial=0)), unit


def _device_time(device: Device, flops: tuple[list[int], int], num_layers: int) -> tuple[list[int], int]:
    if isinstance(device.layer_ms, int | float):
        return _exact_prefix([device.layer_ms] * num_layers)
    if device.layer_ms is not None:
        return _exact_prefix(device.layer_ms)
    prefix, unit = flops
    numerator, denominator = (device.flops_per_s or 1.0).as_integer_ratio()
    return [p * 1000 * denominator for p in prefix], unit * numerator


def _jupiter(costs: _Costs, allow_idle: bool) -> float:
    """The least bottleneck: W(y, n) = min over q < y of max(W(q, n-1), T_n(q..y)); inf if there is none.

    Stage time and memory only grow as q falls, so the inner scan ends at the first q that is too slow or too large.
    """
    best = [0.0] + [math.inf] * costs.num_layers  # W(y, 0)
    for device in range(costs.num_devices):
        row = list(best) if allow_idle else [math.inf] * len(best)
        for end in range(1, len(best)):
            least = row[end]
            for start in range(end - 1, -1, -1):
                if not costs.fits(device, start, end) or (stage := costs.ms(device, start, end)) >= least:
                    break
                least = min(least, max(best[start], stage))
            row[end] = least
        best = row
    return best[-1]


def _hypsplit(costs: _Costs, allow_idle: bool) -> float:
    """The least bottleneck by binary search; inf if there is none.

    The paper stops at a width of ε. Here every feasible answer is replaced by the bottleneck it really has, and the
    search ends when none is strictly better, so the result is exact.
    """
    high = _feasible(costs, math.inf, allow_idle)
    low = 0.0
    while 0 < high < math.inf:
        middle = (low + high) / 2
        last = high - low <= _BISECTION_WIDTH * high or not low < middle < high
        limit = math.nextafter(high, 0.0) if last else middle
        found = _feasible(costs, limit, allow_idle)
        if found < math.inf:
            high = found
        elif last:
            break
        else:
            low = limit
    return high


def _feasible(costs: _Costs, limit: float, allow_idle: bool) -> float:
    """The bottleneck of some partition whose stages all take at most `limit` ms; inf if there is none.

    DP(j, n) of Hyperion, eq. 14: can the first n layers go on the first j devices? Of the split points below n only the
    largest feasible one need be tried, for it leaves the last device the least; its bottleneck is carried along.
    """
    worst: list[float] = [0.0] + [math.inf] * costs.num_layers  # of the prefix's stages; inf: not feasible
    for device in range(costs.num_devices):
        row = list(worst) if allow_idle else [math.inf] * len(worst)
        start = -1
        for end in range(1, len(worst)):
            if worst[end - 1] < math.inf:
                start = end - 1
            if start < 0 or row[end] < math.inf or not costs.fits(device, start, end):
                continue
            stage = costs.ms(device, start, end)
            if stage <= limit:
                row[end] = max(worst[start], stage)
        worst = row
    return worst[-1]


def _least_total(costs: _Costs, bottleneck: float, allow_idle: bool) -> Partition:
    """Of the partitions with this bottleneck, the one with the least (total ticks, stages, sum of squared ticks)."""
    tick = bottleneck / _TICKS or 1.0
    best: dict[int, tuple[int, int, int]] = {0: (0, 0, 0)}  # end of the prefix -> its least key
    rows: list[dict[int, int]] = []  # per device: end -> start; absent: idle
    last = costs.num_devices - 1
    for device in range(costs.num_devices):
        row = dict(best) if allow_idle else {}
        starts: dict[int, int] = {}
        for end in range(1 if device < last else costs.num_layers, costs.num_layers + 1):
            for start in range(end - 1, -1, -1):
                if not costs.fits(device, start, end) or (stage := costs.ms(device, start, end)) > bottleneck:
                    break
                if start not in best:
                    continue
                total, stages, squares = best[start]
                ticks = round(stage / tick)
                key = (total + ticks, stages + 1, squares + ticks * ticks)
                if end not in row or key < row[end]:
                    row[end], starts[end] = key, start
        best = row
        rows.append(starts)
    return _trace_back(costs, rows)


def _trace_back(costs: _Costs, rows: Sequence[dict[int, int]]) -> Partition:
    spans: list[LayerSpan | None] = []
    end = costs.num_layers
    for starts in reversed(rows):
        spans.append(LayerSpan(starts[end], end) if end in starts else None)
        end = starts.get(end, end)
    spans.reverse()
    times = (costs.ms(i, span.start, span.end) if span else 0.0 for i, span in enumerate(spans))
    return Partition(tuple(spans), tuple(times))


def _why_infeasible(layers: Sequence[LayerCost], devices: Sequence[Device], costs: _Costs, allow_idle: bool) -> str:
    if len(layers) < len(devices) and not allow_idle:
        return f"{len(layers)} layers cannot give each of {len(devices)} devices one; drop devices or allow idle ones"
    largest = max(device.memory for device in devices)
    for i, layer in enumerate(layers):
        if layer.memory > largest:
            return f"layer {i} needs {layer.memory:g} of memory and the largest device has {largest:g}"
    need, have = math.fsum(layer.memory for layer in layers), math.fsum(device.memory for device in devices)
    if need > have:
        return f"the layers need {need:g} of memory and the devices have {have:g} together; {need - have:g} is missing"
    if not allow_idle and not math.isinf(_feasible(costs, math.inf, allow_idle=True)):
        return "it fits only if some devices, too small for the layers in their place, stay idle; allow idle devices"
    placed = 0
    for reach in costs.reach:
        placed = max(placed, reach[placed])
    return (
        f"in this order the devices hold at most the first {placed} of {len(layers)} layers, though their memory in all"
        " would do; put them in another order, or add memory"
    )
