"""Random weights stand in for a model's own where only the time of a layer is asked for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import ModelTensors, tiny_model

from swarm.types import LayerSpan
from swarm_kernels.calibration.random_weights import RandomWeights
from swarm_kernels.models.layers import tensors_of_span
from swarm_kernels.runtime.load import load_span
from swarm_node.membership import profiler
from swarm_node.membership.policy import CalibrationPolicy


class FarAway(ModelTensors):
    """A model none of whose tensors is on this machine."""

    def missing_bytes(self, names: Iterable[str]) -> int:
        return sum(map(self.nbytes, names))

    def tensor(self, hf_name: str) -> torch.Tensor:
        raise AssertionError(f"{hf_name} was read")


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_have_the_shapes_and_formats_of_the_model(kind: str, dtype: torch.dtype) -> None:
    changes: dict[str, Any] = (
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16} if kind == "qwen3_moe" else {}
    )
    model = FarAway(tiny_model(kind, **changes).to(dtype))
    random = RandomWeights(model)
    for name in model.names():
        tensor = random.tensor(name)
        assert (tuple(tensor.shape), tensor.dtype, random.nbytes(name)) == (model.shape(name), dtype, tensor.nbytes)
        assert tensor.isfinite().all()
    span = load_span(random, LayerSpan(1, 3), dtype)
    assert span.layers == LayerSpan(1, 3)


def test_a_machine_is_measured_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "POLICY", CalibrationPolicy(cost_budget_s=0.01))
    model = FarAway(tiny_model("llama"))
    found = profiler.calibrate(model, torch.float32, torch.device("cpu"), 1, tmp_path)
    assert found.cost.ms_at(1) > 0


def test_parts_of_quantized_weights_are_not_drawn() -> None:
    model = ModelTensors(tiny_model("llama"))
    names = list(tensors_of_span(model, LayerSpan(1, 2)))
    assert RandomWeights.can_stand_for(model, names)
    model.replace(names[0], torch.zeros(model.shape(names[0]), dtype=torch.uint8))
    assert not RandomWeights.can_stand_for(model, names)
