"""The balanced partition against brute force: both methods, speeds and measured times, memory, idle devices, errors."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarm.errors import Infeasible, UsageError
from swarm.planner.pipeline.partition import Device, LayerCost, Partition, partition
from swarm.types import LayerSpan


def stage_ms(device: Device, layers: list[LayerCost], start: int, end: int) -> float:
    if device.layer_ms is not None:
        return sum(device.layer_ms[start:end])
    assert device.flops_per_s is not None
    return sum(layer.flops for layer in layers[start:end]) / device.flops_per_s * 1000


def fits(device: Device, layers: list[LayerCost], start: int, end: int) -> bool:
    """Exactly: a float sum of a large and a small layer can round down to what the device has."""
    return sum(Fraction(layer.memory) for layer in layers[start:end]) <= Fraction(device.memory)


def every_partition(layers: list[LayerCost], devices: list[Device], allow_idle: bool):
    """(bottleneck, total) of every partition that respects memory, by trying all cuts."""
    count = len(layers)
    for cuts in itertools.combinations_with_replacement(range(count + 1), len(devices) - 1):
        edges = (0, *cuts, count)
        spans = list(itertools.pairwise(edges))
        if not allow_idle and any(a == b for a, b in spans):
            continue
        if not all(fits(d, layers, a, b) for d, (a, b) in zip(devices, spans, strict=True)):
            continue
        times = [stage_ms(d, layers, a, b) for d, (a, b) in zip(devices, spans, strict=True)]
        yield max(times), sum(times)


def check_valid(plan: Partition, layers: list[LayerCost], devices: list[Device], allow_idle: bool) -> None:
    spans = [span for span in plan.spans if span is not None]
    assert [layer for span in spans for layer in span] == list(range(len(layers)))
    assert len(plan.spans) == len(devices)
    assert allow_idle or len(spans) == len(devices)
    for device, span, ms in zip(devices, plan.spans, plan.stage_ms, strict=True):
        start, end = (span.start, span.end) if span else (0, 0)
        assert fits(device, layers, start, end)
        assert ms == pytest.approx(stage_ms(device, layers, start, end))


def random_case(rng: random.Random) -> tuple[list[LayerCost], list[Device], bool]:
    count = rng.randint(1, 9)
    layers = [LayerCost(rng.choice([0, 1, 2, 3, 0.5]), rng.choice([0, 1, 2, 5, 7.25])) for _ in range(count)]
    roomy = rng.choice([2, 4, 8, 30])
    devices = []
    for _ in range(rng.randint(1, 4)):
        memory = rng.choice([0, 1, 2, 3, 4, 6, 9]) + rng.random() * roomy
        if rng.random() < 0.5:
            devices.append(Device(memory, flops_per_s=rng.choice([0.5, 1, 3, 10])))
        else:
            devices.append(Device(memory, layer_ms=tuple(rng.choice([0.1, 100, 300, 700.5]) for _ in range(count))))
    return layers, devices, rng.random() < 0.4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_both_methods_match_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    feasible = 0
    for _ in range(400):
        layers, devices, allow_idle = random_case(rng)
        answers = list(every_partition(layers, devices, allow_idle))
        if not answers:
            for method in ("jupiter", "hypsplit"):
                with pytest.raises(Infeasible):
                    partition(layers, devices, method, allow_idle)
            continue
        feasible += 1
        best = min(bottleneck for bottleneck, _ in answers)
        total = min(t for b, t in answers if b <= best * (1 + 1e-9))
        plans = [partition(layers, devices, method, allow_idle) for method in ("jupiter", "hypsplit")]
        assert plans[0] == plans[1]
        check_valid(plans[0], layers, devices, allow_idle)
        assert plans[0].bottleneck_ms == pytest.approx(best, rel=1e-9)
        assert sum(plans[0].stage_ms) == pytest.approx(total, rel=1e-9)
    assert feasible > 100


positive = st.floats(min_value=0, max_value=1e18, allow_subnormal=True)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.builds(LayerCost, positive, positive), min_size=1, max_size=8),
    st.lists(st.builds(Device, positive, st.floats(min_value=1e-9, max_value=1e18)), min_size=1, max_size=4),
    st.booleans(),
)
@example([LayerCost(1.1e-17, 1.0), LayerCost(1.0, 0.0)], [Device(1.0, 1.0), Device(1.0, 2.0)], True)
def test_any_finite_numbers(layers: list[LayerCost], devices: list[Device], allow_idle: bool) -> None:
    """Whatever the magnitudes: the same plan twice, the least bottleneck, or a plain refusal."""
    answers = []
    for method in ("jupiter", "hypsplit"):
        try:
            answers.append(partition(layers, devices, method, allow_idle))
        except Infeasible as error:
            answers.append(str(error))
    assert answers[0] == answers[1]
    if isinstance(answers[0], Partition):
        best = min((b for b, _ in every_partition(layers, devices, allow_idle)), default=math.inf)
        assert answers[0].bottleneck_ms <= best * (1 + 1e-9) + 1e-300  # subnormal numbers have few digits


def test_ties_are_even_then_front_loaded() -> None:
    plan = partition([LayerCost(1, 1)] * 10, [Device(10, 1)] * 3)
    assert plan.spans == (LayerSpan(0, 4), LayerSpan(4, 7), LayerSpan(7, 10))
    assert plan.bottleneck_ms == 4000


def test_the_least_total_wins_among_equal_bottlenecks() -> None:
    """A slow first layer fixes the bottleneck; the rest goes to the faster device as far as the bottleneck allows."""
    layers = [LayerCost(1, 10), *[LayerCost(1, 1)] * 4]
    plan = partition(layers, [Device(9, 1), Device(9, 1), Device(9, 2)])
    assert plan.spans == (LayerSpan(0, 1), LayerSpan(1, 2), LayerSpan(2, 5))


def test_an_idle_device_is_left_out_only_if_that_helps() -> None:
    layers = [LayerCost(1, 1)] * 6
    fast, slow = Device(9, 10), Device(9, 0.01)
    assert partition(layers, [fast, slow, fast], allow_idle=True).spans[1] is None
    assert None not in partition(layers, [fast, slow, fast]).spans
    assert None not in partition(layers, [fast, fast, fast], allow_idle=True).spans


def test_speed_takes_more_layers() -> None:
    plan = partition([LayerCost(1, 2)] * 12, [Device(99, 1), Device(99, 2), Device(99, 3)])
    assert [len(span) for span in plan.spans if span] == [2, 4, 6]


def test_a_large_model_is_quick() -> None:
    """128 layers on 64 devices, by both methods; only that it ends, and agrees."""
    rng = random.Random(1)
    layers = [LayerCost(rng.randint(1, 9), rng.random()) for _ in range(128)]
    devices = [Device(40, rng.uniform(0.5, 4)) for _ in range(64)]
    assert partition(layers, devices) == partition(layers, devices, "hypsplit")


@pytest.mark.parametrize(
    ("layers", "devices", "words"),
    [
        ([LayerCost(1, 1)], [Device(1, 1)] * 2, "1 layers cannot give each of 2 devices one"),
        ([LayerCost(5, 1)] * 2, [Device(4, 1)] * 2, "layer 0 needs 5"),
        ([LayerCost(3, 1)] * 3, [Device(4, 1), Device(4, 1)], "1 is missing"),
        ([LayerCost(1, 1)] * 3, [Device(9, 1), Device(0, 1)], "stay idle"),
        ([LayerCost(4, 1), LayerCost(4, 1), LayerCost(1, 1)], [Device(3, 1), Device(8, 1)], "first 2 of 3 layers"),
    ],
)
def test_the_binding_constraint_is_named(layers: list[LayerCost], devices: list[Device], words: str) -> None:
    for method in ("jupiter", "hypsplit"):
        with pytest.raises(Infeasible, match=words):
            partition(layers, devices, method)


@pytest.mark.parametrize(
    ("layers", "devices"),
    [
        ([], [Device(1, 1)]),
        ([LayerCost(1, 1)], []),
        ([LayerCost(math.nan, 1)], [Device(1, 1)]),
        ([LayerCost(1, -1)], [Device(1, 1)]),
        ([LayerCost(1, 1)], [Device(math.inf, 1)]),
        ([LayerCost(1, 1)], [Device(1, 0)]),
        ([LayerCost(1, 1)], [Device(1)]),
        ([LayerCost(1, 1)], [Device(1, layer_ms=(1.0, 2.0))]),
    ],
)
def test_impossible_input_is_refused(layers: list[LayerCost], devices: list[Device]) -> None:
    with pytest.raises(UsageError):
        partition(layers, devices)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(UsageError, match="jupiter or hypsplit"):
        partition([LayerCost(1, 1)], [Device(1, 1)], "magic")  # type: ignore[arg-type]
