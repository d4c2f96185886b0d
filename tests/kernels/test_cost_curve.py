"""Measuring a span and checking it against the plain reference. No timing is asserted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from kernel_cases import vary
from tiny_models import ModelTensors, tiny_model

from swarm.errors import ResourceError
from swarm.types import LayerSpan
from swarm_kernels.calibration.cost_curve import StepTimer, choose_threads, measure_cost, verify_layer
from swarm_kernels.calibration.random_weights import RandomWeights
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.cpu import cpu_library
from swarm_kernels.ops.cpu.cpu_experts import PackedExperts
from swarm_kernels.runtime.llama_span import LlamaSpan
from swarm_kernels.runtime.load import load_span


@pytest.fixture(autouse=True)
def _same_threads_after() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    dispatch.set_threads(threads)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def source() -> ModelTensors:
    return ModelTensors(tiny_model("llama"))


@pytest.mark.parametrize("kind", ["llama", "olmo2"])
def test_a_cost_curve_is_positive_and_never_falls(kind: str) -> None:
    span = load_span(ModelTensors(tiny_model(kind)), LayerSpan(1, 3), torch.float32)
    curve = measure_cost(span, widths=(1, 3, 9), context=150, budget_s=0.05)
    assert curve.widths == (1, 3, 9)
    assert 0 < curve.ms[0] <= curve.ms[1] <= curve.ms[2]


def test_other_work_cannot_make_rows_free(source: ModelTensors, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row always ran beside other load, and so did every fourth batch; wider ones give an upper bound."""
    batches = itertools.count()

    def ms(_: StepTimer, width: int) -> float:
        return 9.0 if width == 1 or next(batches) % 4 == 0 else float(width)

    monkeypatch.setattr(StepTimer, "ms", ms)
    span = load_span(source, LayerSpan(0, 1), torch.float32)
    assert measure_cost(span, widths=(1, 2, 4, 16), budget_s=0.01).ms == (2.0, 2.0, 4.0, 16.0)


def test_threads_are_chosen_from_what_was_offered(source: ModelTensors) -> None:
    span = load_span(source, LayerSpan(0, 1), torch.float32)
    assert choose_threads(span, max_threads=1) == 1
    assert choose_threads(span, max_threads=3, budget_s=0.05) in (1, 2, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sound_span_passes_its_check(source: ModelTensors, dtype: torch.dtype) -> None:
    verify_layer(load_span(source, LayerSpan(2, 4), dtype), source)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_biases_and_head_norms_are_checked_too(family: str) -> None:
    source = ModelTensors(tiny_model(family))
    verify_layer(load_span(source, LayerSpan(0, 1), torch.float32), source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_machine_that_computes_wrongly_is_found(source: ModelTensors, dtype: torch.dtype) -> None:
    span = load_span(source, LayerSpan(2, 4), dtype)
    assert isinstance(span, LlamaSpan)
    sound = span.weights[0]
    for broken in (
        vary(sound, scale=sound.attention.scale * 1.5),
        vary(sound, attn_norm=sound.attn_norm * 1.1),
        vary(sound, down=dispatch.pack_linear(torch.zeros(96, 80, dtype=dtype))),
        span.weights[1],
    ):
        span.weights[0] = broken
        with pytest.raises(ResourceError, match="must not join"):
            verify_layer(span, source)


MIXTURES = {
    "mixtral": {"num_local_experts": 32, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 32, "num_experts_per_tok": 2, "head_dim": 16},
    "glm4_moe": {"n_routed_experts": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
                 "topk_group": 1, "first_k_dense_replace": 0, "head_dim": 16},
}  # fmt: skip


@pytest.mark.parametrize("weights", ["its own", "random"])
@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.filterwarnings("ignore")
def test_wide_batches_read_as_many_experts_as_unlike_rows_choose(
    kind: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measured curve of a mixture shows what a tree of n rows costs only if calibration's rows are as unlike."""
    model = ModelTensors(tiny_model(kind, **MIXTURES[kind]))
    for name in [name for name in model.names() if name.endswith(("correction_bias", "router.bias"))]:
        model.replace(name, torch.zeros(32))
    source = RandomWeights(model) if weights == "random" else model
    span = load_span(source, LayerSpan(0, 2), torch.int8)
    read: list[set[int]] = []
    run = PackedExperts.__call__

    def spy(self: PackedExperts, x: torch.Tensor, index: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        read.append(set(index.flatten().tolist()))
        return run(self, x, index, scores)

    monkeypatch.setattr(PackedExperts, "__call__", spy)
    monkeypatch.setattr(cpu_library._selection, "in_use", None)  # the reference: its layers call their experts
    timer = StepTimer(span, 16, 64)
    for rows in (1, 4, 16, 64):
        read.clear()
        for _ in range(12):
            timer.ms(rows)
        expected = 32 * (1 - (1 - 2 / 32) ** rows)
        assert 0.75 * expected <= sum(map(len, read)) / len(read) <= 1.05 * expected + 0.5
        assert rows > 4 or len(set(map(frozenset, read))) > 4  # others each time
    dispatch.select_isa("best")
