"""A node names its arithmetic only where the same bits are to be expected: what plain torch computes has no name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import ModelTensors, tiny_model

from swarm.types import LayerSpan
from swarm_kernels.audit.arithmetic import arithmetic
from swarm_kernels.device.device import INT4
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base.torch_reference import REFERENCE
from swarm_kernels.runtime.llama_span import LlamaSpan
from swarm_kernels.runtime.load import load_span

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, INT4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("hidden", "inner"), [(96, 80), (96, 40), (48, 80), (48, 40)])
def test_layers_that_torch_computes_have_no_name(dtype: torch.dtype, hidden: int, inner: int) -> None:
    source = ModelTensors(tiny_model("llama", hidden_size=hidden, intermediate_size=inner))
    span = load_span(source, LayerSpan(0, 1), dtype)
    assert isinstance(span, LlamaSpan)
    cache = span.new_cache(32)
    rows = torch.zeros(1, hidden, dtype=torch.float32)
    backend = dispatch._backend(rows, source.config.head_dim)
    compiled = backend is not REFERENCE and backend.layer_stack(
        span.weights, list(zip(cache.k, cache.v, strict=True)), torch.float32
    )
    assert bool(arithmetic(source.config, dtype, CPU)) == bool(compiled)


def test_other_devices_and_transformers_layers_have_no_name() -> None:
    config = ModelTensors(tiny_model("llama")).config
    assert arithmetic(config, torch.bfloat16, torch.device("cuda")) == ""
    assert arithmetic(replace(config, decoder=None), torch.bfloat16, CPU) == ""
