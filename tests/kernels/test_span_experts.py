"""Spans that hold some experts of their layers, and spans of experts alone: together, bit for bit a span of all."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from test_ops_experts import COUNT, GATINGS, HIDDEN, packed_by, random_experts, random_rows
from tiny_models import ModelTensors, on_transformers_layers, tiny_model

from swarm.errors import InvalidRequest, KernelError, ResourceError, UsageError
from swarm.types import LayerSpan
from swarm_kernels.calibration.cost_curve import verify_experts, verify_layer
from swarm_kernels.device.device import INT4
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base.split_experts import Ask, ExpertsElsewhere, HeldExperts, Wait, outputs_of, zeros
from swarm_kernels.ops.cpu.cpu_descriptors import runs
from swarm_kernels.runtime.load import load_experts, load_span
from swarm_kernels.runtime.mixture_reader import ExpertSpan, rows_dtype
from swarm_kernels.runtime.span import Span

MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 3},
    "glm4_moe": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 1,
                 "topk_group": 1, "first_k_dense_replace": 1},
}  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16, torch.int8, INT4]
LAYERS, EXPERTS = LayerSpan(0, 4), 8


@cache
def source(kind: str) -> ModelTensors:
    return ModelTensors(tiny_model(kind, num_hidden_layers=len(LAYERS), head_dim=16, **MODELS[kind]))


def asking(*others: ExpertSpan) -> Ask:
    """By those who hold them; rows travel as they do between machines."""

    def ask(layer: int, x: torch.Tensor, rows: torch.Tensor, experts: torch.Tensor) -> Wait:
        x = x.to(rows_dtype(others[0].weight_dtype))

        def wait() -> torch.Tensor:
            out = torch.full((len(rows), x.shape[1]), float("nan"))
            for other in others:
                mine = (experts >= other.experts.start) & (experts < other.experts.stop)
                out[mine] = other.outputs(layer, x, rows[mine], experts[mine])
            return out

        return wait

    return ask


def states(span: Span) -> list[torch.Tensor]:
    """Of a prompt, a tree, and a token after it."""
    cache = span.new_cache(128)
    cache.open(b"a", 100)
    steps = (
        StepRequest(b"a", 0, 37),
        StepRequest(b"a", 37, 0, (-1, 0, 0, 2), (0, 1, 2, 5)),
        StepRequest(b"a", 37, 1, commit_slots=(0, 2)),
    )
    return [span.forward(span.embed(range(7, 7 + step.rows)), cache.schedule([step]), cache) for step in steps]


@pytest.mark.parametrize("held", [range(0), range(2, 5), range(8)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_a_split_span_is_a_whole_one_bit_for_bit(kind: str, dtype: torch.dtype, held: range) -> None:
    mine = HeldExperts(held)
    split = load_span(source(kind), LAYERS, dtype, held=mine)
    verify_layer(split, source(kind))
    rest = [part for part in (range(held.start), range(held.stop, EXPERTS)) if part]
    others = [load_experts(source(kind), LAYERS, part, dtype) for part in rest]
    for other in others:
        verify_experts(other, source(kind))
    if others:
        mine.elsewhere.ask = asking(*others)
    whole = load_span(source(kind), LAYERS, dtype)
    assert all(map(torch.equal, states(split), states(whole)))
    assert split.layer_bytes <= whole.layer_bytes


@pytest.mark.parametrize("cut", [range(0), range(5), range(3, 9), range(12)], ids=str)
@pytest.mark.parametrize("gating", GATINGS.values(), ids=GATINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_op_adds_up_as_one_machine_does(isa: str, dtype: torch.dtype, gating: Any, cut: range) -> None:
    first, second = random_experts(dtype, gating)
    whole = dispatch.pack_experts(first, second, gating)
    own = dispatch.pack_experts(first[cut.start : cut.stop], second[cut.start : cut.stop], gating) if cut else None
    elsewhere = ExpertsElsewhere(lambda layer, x, rows, experts: lambda: outputs_of(whole, x[rows], experts))
    split = dispatch.split_experts(own, cut, COUNT, HIDDEN, 0, elsewhere)
    for rows in (1, 5, 70):
        assert torch.equal(split(*random_rows(rows)), whole(*random_rows(rows)))


def test_what_is_not_held_is_not_read() -> None:
    kept, kind = HeldExperts(range(2, 4)), "qwen3_moe"
    apart = source(kind)
    names = [name for name in apart.names() if ".experts." in name]
    apart.read.clear()
    load_span(apart, LAYERS, torch.bfloat16, held=kept)
    read = {name for name in apart.read if ".experts." in name}
    numbers = {name.split(".experts.")[1].split(".")[0] for name in names}
    if len(numbers) > 1 and "0" in numbers:  # an expert a tensor
        assert {name.split(".experts.")[1].split(".")[0] for name in read} == {"2", "3"}
    alone = load_experts(apart, LayerSpan(1, 2), range(2, 4), torch.bfloat16)
    whole = load_span(apart, LayerSpan(1, 2), torch.bfloat16)
    assert alone.nbytes < whole.layer_bytes / 3


def test_until_somebody_computes_them_others_are_zero() -> None:
    first, second = random_experts(torch.float32)
    x, index, scores = random_rows(6)
    own = dispatch.pack_experts(first[:5], second[:5], GATINGS["silu"])
    split = dispatch.split_experts(own, range(5), COUNT, HIDDEN, 0, ExpertsElsewhere())
    whole = dispatch.pack_experts(first, second, GATINGS["silu"])
    assert torch.equal(split(x, index, scores), whole(x, index, torch.where(index < 5, scores, 0.0)))
    assert zeros(0, x, torch.arange(3), torch.zeros(3))().shape == (3, HIDDEN)
    with pytest.raises(KernelError, match="none of the 12"):
        split(x, index + 7, scores)


def test_what_is_asked_for_must_be_here() -> None:
    span = load_experts(source("glm4_moe"), LAYERS, range(2, 4), torch.float32)
    x, row = torch.zeros(2, span.hidden), torch.tensor([0])
    assert span.outputs(1, x, row, torch.tensor([3])).shape == (1, span.hidden)
    for layer, rows, experts in ((0, 0, 2), (4, 0, 2), (1, 2, 2), (1, -1, 2), (1, 0, 1), (1, 0, 4)):
        with pytest.raises(InvalidRequest):
            span.outputs(layer, x, torch.tensor([rows]), torch.tensor([experts]))


def test_a_machine_that_computes_experts_wrong_does_not_join() -> None:
    span = load_experts(source("qwen3_moe"), LAYERS, range(3), torch.float32)
    first, second = (
        [packed_by(torch.float32, torch.randn(*shape), None) for _ in range(3)]
        for shape in ((96, span.hidden), (span.hidden, 48))
    )
    wrong = {layer: dispatch.pack_experts(first, second, GATINGS["silu"]) for layer in span.by_layer}
    with pytest.raises(ResourceError, match="must not join"):
        verify_experts(ExpertSpan(span.layers, span.experts, span.hidden, torch.float32, wrong), source("qwen3_moe"))


def test_models_that_cannot_be_split_are_refused_in_a_sentence() -> None:
    dense = ModelTensors(tiny_model("llama"))
    other = on_transformers_layers(ModelTensors(tiny_model("qwen3_moe", head_dim=16, **MODELS["qwen3_moe"])))
    for model in (dense, other):
        with pytest.raises(UsageError, match="serve whole layers of it"):
            load_span(model, LayerSpan(0, 1), torch.float32, held=HeldExperts(range(2)))
        with pytest.raises(UsageError, match="serve whole layers of it"):
            load_experts(model, LayerSpan(0, 1), range(2), torch.float32)


def test_layers_that_are_not_split_run_in_one_call() -> None:
    assert runs([False, False, True, True, False]) == [range(2), range(2, 3), range(3, 4), range(4, 5)]
    assert runs([False] * 3) == [range(3)]
    assert runs([True]) == [range(1)]
