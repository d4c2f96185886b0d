"""Two groups of cores: the split changes no bit, the choice follows the measurement, and kinds of cores are found."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Part, make_plan, random_blocks, random_tree
from tiny_models import ModelTensors, tiny_model

from swarm.errors import KernelError
from swarm.types import LayerSpan
from swarm_kernels.calibration import hetero_cores
from swarm_kernels.calibration.hetero_cores import (
    ColumnSplit,
    ColumnSplitPolicy,
    choose_division,
    confirm_division,
    decide,
    find_split,
    wins_needed,
)
from swarm_kernels.device.core_groups import CoreGroups, find_core_groups
from swarm_kernels.device.device import INT4
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.cpu import cpu_library
from swarm_kernels.runtime.load import load_span
from swarm_kernels.runtime.span import Span


@pytest.fixture(autouse=True)
def _one_pool_after() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    dispatch.set_threads(threads)


SPLITS = [
    CoreGroups((0,), (1,), 500),
    CoreGroups((0, 1), (0,), 130),
    CoreGroups((0,), (1, 0), 990),
    CoreGroups((0, 1), (0, 1), 0),
]


@pytest.mark.parametrize("groups", SPLITS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, INT4], ids=str)
def test_a_split_span_computes_the_same_bits(groups: CoreGroups, dtype: torch.dtype) -> None:
    span = load_span(ModelTensors(tiny_model("llama")), LayerSpan(0, 6), dtype)
    dispatch.set_threads(1)
    whole = run(span)
    cpu_library.split_columns(groups)
    assert all(torch.equal(a, b) for a, b in zip(run(span), whole, strict=True))


def run(span: Span) -> list[torch.Tensor]:
    """A prompt, a token, a tree, and another on what is left of it; the layers' outputs and the logits."""
    cache = span.new_cache(400)
    cache.open(b"s", 400)
    generator = torch.Generator().manual_seed(0)
    tree = tuple(range(40))
    parents = random_tree(40, generator)
    steps = (
        StepRequest(b"s", 0, 300),
        StepRequest(b"s", 300, 1),
        StepRequest(b"s", 301, 0, parents, tree),
        StepRequest(b"s", 301, 0, (-1,), (40,), commit_slots=(0,)),
    )
    outputs = []
    for step in steps:
        hidden = torch.randn(step.rows, span.config.hidden_size, generator=generator)
        out = span.forward(hidden, cache.schedule([step]), cache)
        outputs += [out, span.logits(out)]
    return outputs


@settings(max_examples=40)
@given(st.integers(0, 1000), st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(0, 300))
def test_any_share_of_linears_and_attention(permille: int, fast: int, slow: int, rows: int, committed: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    linear, x = dispatch.quantize_linear(torch.randn(200, 96, generator=generator)), torch.randn(rows, 96)
    parts = [Part(committed, tree=random_tree(rows, generator)), Part(70, line=1)]
    metadata, num_blocks = make_plan(parts, generator)
    k_blocks, v_blocks = random_blocks(num_blocks, 2, 32, torch.float32, generator)
    q, k, v = (torch.randn(metadata.rows, heads, 32, generator=generator) for heads in (6, 2, 2))
    dispatch.set_threads(1)
    expected = linear(x), dispatch.attend(q, k, v, k_blocks, v_blocks, metadata, 0.2)
    cpu_library.split_columns(CoreGroups((0,) * fast, (0,) * slow, permille))
    assert torch.equal(linear(x), expected[0])
    assert torch.equal(dispatch.attend(q, k, v, k_blocks, v_blocks, metadata, 0.2), expected[1])


GROUPS = CoreGroups((0, 1, 2, 3), (4, 5), 250)
POLICY = ColumnSplitPolicy()


def test_the_wins_of_a_fair_coin_are_rare() -> None:
    assert wins_needed(16, 0.01) == 14  # 13 heads of 16 come with 1.06%
    assert wins_needed(16, 0.0) == 17
    assert wins_needed(16, 1.0) == 0
    assert [wins_needed(pairs, 0.5) for pairs in (1, 2, 3)] == [1, 2, 2]


@given(st.lists(st.booleans(), min_size=16, max_size=16))
def test_a_split_needs_all_but_two_of_sixteen_pairs(wins: list[bool]) -> None:
    asked: list[bool] = []

    def ratios() -> Iterator[float]:
        for won in wins:
            asked.append(won)
            yield 0.9 if won else 0.98

    split = decide(GROUPS, ratios(), POLICY)
    assert (split.groups == GROUPS) == (sum(wins) >= 14)
    assert len(asked) == 16 or asked.count(False) == 3  # nothing is measured that changes nothing
    assert split.reason.startswith("cores 0,1,2,3 and 4,5 with 25.0% of the columns on the latter took 0.9")
    assert split.reason.endswith("divided")
    assert f"in {asked.count(True)} of {len(asked)} pairs" in split.reason


RECORDED = json.loads((Path(__file__).parent / "data" / "core_split_timings.json").read_text())
"""Milliseconds of 1 and 16 rows in one pool and split in halves, in turns, on two equal cores beside other programs."""


def replayed(start: int, split: float, noise_power: float = 1.0) -> Callable[[int], list[float]]:
    """A machine on which any split takes `split` of the pool's time, but for the noise, which is the recorded one from
    `start` on, its logarithms times `noise_power`."""
    noise = iter(range(start, 1 << 62))

    def timed(permille: int) -> list[float]:
        times = [ms**noise_power for ms in RECORDED["pool"][next(noise) % len(RECORDED["pool"])]]
        return [ms * split for ms in times] if permille else times

    return timed


def test_noise_does_not_win() -> None:
    starts = range(len(RECORDED["pool"]))
    splits = [find_split(GROUPS, replayed(start, 1.0), POLICY, POLICY.slow_permilles) for start in starts]
    assert not [split.reason for split in splits if split.groups]


def test_the_recorded_noise_has_fooled_a_mere_comparison() -> None:
    """The best of three of each candidate, in turns, against the best of three of the pool."""
    fooled = 0
    for start in range(len(RECORDED["pool"])):
        timed = replayed(start, 1.0)
        best = {permille: [math.inf, math.inf] for permille in (0, *POLICY.slow_permilles)}
        for _ in range(3):
            for permille, times in best.items():
                times[:] = map(min, times, timed(permille))
        fooled += min(math.prod(best[p]) for p in POLICY.slow_permilles) <= 0.97**2 * math.prod(best[0])
    assert fooled > len(RECORDED["pool"]) / 20


def test_a_split_that_is_faster_wins_unless_noise_drowns_it() -> None:
    """The recorded noise, of tens of times, leaves one pool; a tenth of it does not."""
    starts = range(len(RECORDED["pool"]))
    loud = [find_split(GROUPS, replayed(start, 0.6), POLICY, (125, 250)).groups for start in starts]
    mild = [find_split(GROUPS, replayed(start, 0.6, 0.1), POLICY, (125, 250)).groups for start in starts]
    assert sum(groups is not None for groups in loud) < 0.2 * len(loud)
    assert sum(groups is not None for groups in mild) > 0.8 * len(mild)


def test_recorded_splits_of_equal_cores_are_not_applied() -> None:
    def recorded(start: int) -> Callable[[int], list[float]]:
        at = {0: start, 500: start}

        def timed(permille: int) -> list[float]:
            times = RECORDED["split" if permille else "pool"]
            at[permille] += 1
            return times[(at[permille] - 1) % len(times)]

        return timed

    assert not any(find_split(GROUPS, recorded(start), POLICY, (500,)).groups for start in range(len(RECORDED["pool"])))


def test_screening_finds_the_better_of_two_splits() -> None:
    times = {0: [10.0, 30.0], 125: [9.0, 27.0], 250: [7.0, 21.0], 375: [8.0, 24.0], 500: [12.0, 40.0]}
    split = find_split(GROUPS, lambda permille: times[permille], POLICY, POLICY.slow_permilles)
    assert split.groups == GROUPS
    assert "took 0.70 of the time" in split.reason


def test_measuring_leaves_what_it_chose_set(monkeypatch: pytest.MonkeyPatch) -> None:
    span = load_span(ModelTensors(tiny_model("llama")), LayerSpan(1, 3), torch.float32)
    assert isinstance(choose_division(span, 2), ColumnSplit)
    applied: list[CoreGroups | None] = []
    monkeypatch.setattr(hetero_cores, "find_core_groups", lambda: CoreGroups((0,), (0,)))
    monkeypatch.setattr(hetero_cores, "apply", lambda groups, threads: applied.append(groups))
    split = choose_division(span, 2)
    assert applied[-1] == split.groups
    assert {groups.slow_permille for groups in applied if groups} == set(POLICY.slow_permilles)
    applied.clear()
    split = confirm_division(span, 2, 250)
    assert applied[-1] == split.groups
    assert {groups.slow_permille for groups in applied if groups} == {250}


def test_without_a_possible_split_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    span = load_span(ModelTensors(tiny_model("llama")), LayerSpan(1, 2), torch.float32)
    monkeypatch.setattr(hetero_cores, "find_core_groups", lambda: None)
    assert choose_division(span, 1) == ColumnSplit(None, "there is only one core")
    dispatch.select_isa("reference")
    try:
        assert "compiled" in choose_division(span, 1).reason
        with pytest.raises(KernelError, match="core groups"):
            cpu_library.split_columns(GROUPS)
    finally:
        dispatch.select_isa("best")


def machine(folder: Path, **files: list[str]) -> Path:
    """A fake /sys: what each core reports under each name (`__` for a slash)."""
    for name, texts in files.items():
        for core, text in enumerate(texts):
            path = folder / f"cpu{core}" / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
    return folder


def test_fast_and_slow_cores_are_distinguished(tmp_path: Path) -> None:
    arm = machine(tmp_path / "arm", cpu_capacity=["446", "446", "1024", "1024", "871"])
    assert find_core_groups(range(5), arm) == CoreGroups((2, 3), (0, 1, 4))
    hybrid = machine(tmp_path / "x86", cpufreq__cpuinfo_max_freq=["5000000", "5000000", "3800000"])
    assert find_core_groups(range(3), hybrid) == CoreGroups((0, 1), (2,))
    assert find_core_groups([0, 1], hybrid) == CoreGroups((0,), (1,))


def test_like_cores_are_distinguished_by_their_cache_or_halved(tmp_path: Path) -> None:
    caches = machine(tmp_path, cache__index3__shared_cpu_list=["0-1", "0-1", "2-3", "2-3"])
    assert find_core_groups([0, 1, 2, 3], caches) == CoreGroups((0, 1), (2, 3))
    assert find_core_groups([0, 1, 2], tmp_path / "empty") == CoreGroups((0, 1), (2,))
    assert find_core_groups([7], tmp_path) is None
    nonsense = machine(tmp_path / "odd", cpu_capacity=["many", ""])
    assert find_core_groups([0, 1], nonsense) == CoreGroups((0,), (1,))
