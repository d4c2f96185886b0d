"""Mixers with a recurrent state, all rows in one call: the same bits however a text is cut, and which mixers run so."""

from __future__ import annotations

import random

import pytest
import torch
from test_span_states import mixers, stateful
from tiny_models import ModelTensors
from zoo.shrink import tiny_config
from zoo.weights import random_model

from swarm.types import LayerSpan
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.runtime.hf_span import HfSpan
from swarm_kernels.runtime.load import load_span


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("kind", ["qwen3_next", "olmo_hybrid", "lfm2", "bamba", "nemotron_h"])
@torch.inference_mode()
def test_a_text_in_pieces_gives_the_same_bits(kind: str, dtype: torch.dtype) -> None:
    """Of the mixer of a layer, whatever the pieces and what is beside them; the rows of a tree likewise.

    With 32 heads: torch's sigmoid of as many numbers as do not fill its vectors rounds one by its place among them."""
    heads = {"linear_num_value_heads": 32} if kind in ("qwen3_next", "olmo_hybrid") else {}
    span = load_span(ModelTensors(random_model(tiny_config(kind, **heads))), LayerSpan(0, 1), dtype)
    assert isinstance(span, HfSpan)
    outputs: list[torch.Tensor] = []
    span.attention_module(0).register_forward_hook(lambda _module, _args, output: outputs.append(output[0]))
    cache, rng, generator = stateful(span, 4), random.Random(7), torch.Generator().manual_seed(7)
    text, other = torch.randn(2, 100, span.config.hidden_size, generator=generator).to(span.dtype).unbind()
    for name in (b"whole", b"pieces", b"other", b"tree"):
        cache.open(name, 200)

    def run(hidden: torch.Tensor, *requests: StepRequest) -> torch.Tensor:
        span.forward(hidden, cache.schedule(requests), cache)
        return outputs.pop()

    whole, pieces, beside = run(text, StepRequest(b"whole", 0, 100)), [], 0
    while (done := sum(map(len, pieces))) < 100:
        rows, more = min(rng.choice((1, 1, 2, 3, 9, 17, 40)), 100 - done), rng.choice((1, 4))
        hidden = torch.cat((other[beside : beside + more], text[done : done + rows]))
        requests = StepRequest(b"other", beside, more), StepRequest(b"pieces", done, rows)
        pieces.append(run(hidden, *requests)[more:])
        beside += more
    assert torch.equal(torch.cat(pieces), whole)
    run(text[:80], StepRequest(b"tree", 0, 80))
    drafts = torch.stack([row for pair in zip(text[80:90], other[80:90], strict=True) for row in pair])
    parents = [-1 if slot < 2 else slot // 2 * 2 - 2 for slot in range(20)]  # at each token, the text's and another
    assert torch.equal(run(drafts, StepRequest(b"tree", 80, 0, parents, range(20)))[::2], whole[80:90])


def test_an_activation_that_is_not_compiled_runs_in_transformers_module() -> None:
    changes = {"qwen3_next": "hidden_act", "nemotron_h": "mamba_hidden_act"}
    for kind, name in changes.items():
        source = ModelTensors(random_model(tiny_config(kind, **{name: "gelu"})))
        span = load_span(source, LayerSpan(0, 1), torch.float32)  # which compares it with transformers
        assert isinstance(span, HfSpan)
        assert [mixer.one_call for mixer in mixers(span)] == [None]
