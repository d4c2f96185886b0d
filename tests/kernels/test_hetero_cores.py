"""Two groups of cores: the split changes no bit, the choice follows the measurement, and kinds of cores are found."""

from __future__ import annotations

from collections.abc import Iterator
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
from swarm_kernels.calibration.hetero_cores import ColumnSplit, ColumnSplitPolicy, choose, choose_division
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


GROUPS = CoreGroups((0, 1, 2, 3), (4, 5))
POLICY = ColumnSplitPolicy()


def test_the_fastest_split_is_chosen_if_it_beats_one_pool() -> None:
    won = choose(GROUPS, {0: (10.0, 20.0), 125: (9.0, 19.0), 250: (8.0, 18.0), 375: (8.5, 18.0)}, 0.97)
    assert won.groups == CoreGroups(GROUPS.fast, GROUPS.slow, 250)
    assert won.reason == (
        "cores 0,1,2,3 and 4,5 with 25.0% of the columns on the latter take 0.85 of the time of one pool of threads: "
        "divided"
    )
    lost = choose(GROUPS, {0: (10.0, 20.0), 125: (11.0, 19.0), 250: (9.9, 19.9)}, 0.97)
    assert lost.groups is None
    assert lost.reason.endswith("the best split, take 0.99 of the time of one pool of threads: not divided")


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.1, 100)), min_size=5, max_size=5))
def test_nothing_tried_is_faster_than_what_is_chosen(times: list[tuple[float, float]]) -> None:
    named = dict(zip((0, *POLICY.slow_permilles), times, strict=True))
    chosen = choose(GROUPS, named, POLICY.max_time_ratio).groups
    cost = {share: (a * b) ** 0.5 / (times[0][0] * times[0][1]) ** 0.5 for share, (a, b) in named.items()}
    if chosen is None:
        assert min(cost.values()) > POLICY.max_time_ratio - 1e-9
    else:
        assert cost[chosen.slow_permille] <= min(POLICY.max_time_ratio, *cost.values()) + 1e-9


def test_measuring_leaves_what_it_chose_set(monkeypatch: pytest.MonkeyPatch) -> None:
    span = load_span(ModelTensors(tiny_model("llama")), LayerSpan(1, 3), torch.float32)
    assert isinstance(choose_division(span, 2, budget_s=0.01), ColumnSplit)
    applied: list[CoreGroups | None] = []
    monkeypatch.setattr(hetero_cores, "find_core_groups", lambda: CoreGroups((0,), (0,)))
    monkeypatch.setattr(hetero_cores, "apply", lambda groups, threads: applied.append(groups))
    split = choose_division(span, 2, budget_s=0.01)
    assert applied[-1] == split.groups
    assert {groups.slow_permille for groups in applied[:5] if groups} == set(POLICY.slow_permilles)


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
