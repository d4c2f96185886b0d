"""Taps: hidden states between layers as bytes, and where a batch stops for them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import ModelTensors, tiny_model

from swarm.errors import ProtocolError
from swarm.types import TAP_GROUP, LayerSpan, tapped_row_bytes
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.runtime.load import load_span
from swarm_kernels.runtime.taps import BatchTaps, TappedPart, decode, encode


@pytest.mark.parametrize("width", [1, TAP_GROUP - 1, TAP_GROUP, 96, 4096])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_what_comes_back_is_near_and_as_long_as_said(rows: int, width: int) -> None:
    hidden = torch.randn(rows, width) * torch.logspace(-4, 4, max(1, rows))[:rows, None]
    if width > TAP_GROUP:
        hidden[:, 3] *= 1000  # as some channels of real models are
    for bits, tolerance in ((16, 2.0**-8), (8, 1.1 / 127)):
        body = encode(hidden, bits)
        assert len(body) == rows * tapped_row_bytes(width, bits)
        back = decode(memoryview(body), width, bits)
        assert back.shape == hidden.shape
        for start in range(0, width, TAP_GROUP):  # an error is small beside its own group
            part, found = hidden[:, start : start + TAP_GROUP], back[:, start : start + TAP_GROUP]
            assert ((part - found).abs().amax(-1) <= tolerance * part.abs().amax(-1)).all()


def test_rows_are_encoded_one_by_one() -> None:
    hidden = torch.randn(5, 96).to(torch.bfloat16)
    for bits in (8, 16):
        assert encode(hidden, bits) == b"".join(encode(hidden[i : i + 1], bits) for i in range(5))


def test_what_is_not_finite_stays_so_and_zero_is_zero() -> None:
    hidden = torch.zeros(3, 96)
    hidden[0, 2], hidden[1, 90] = torch.nan, torch.inf
    for bits in (8, 16):
        back = decode(encode(hidden, bits), 96, bits)
        assert torch.isfinite(back).all(-1).tolist() == [False, False, True]
        assert not back[2].any()


@given(st.binary(max_size=600), st.integers(1, 130), st.sampled_from([8, 16]))
def test_any_bytes_are_rows_or_refused(body: bytes, width: int, bits: int) -> None:
    if len(body) % tapped_row_bytes(width, bits):
        with pytest.raises(ProtocolError):
            decode(body, width, bits)
    else:
        assert decode(body, width, bits).shape == (len(body) // tapped_row_bytes(width, bits), width)


def test_bytes_that_are_no_rows_are_refused() -> None:
    for bits in (8, 16):
        with pytest.raises(ProtocolError, match="no rows"):
            decode(b"x" * (tapped_row_bytes(96, bits) + 1), 96, bits)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "stablelm"])
def test_a_tap_is_what_its_layer_reads(kind: str) -> None:
    """By transformers' own states, whose last is normed, so that it is left out here; `test_last_tap` has it."""
    model = tiny_model(kind)
    span = load_span(ModelTensors(model), LayerSpan(0, 6), torch.float32)
    tokens = [5, 9, 77, 3, 60, 8, 2]
    with torch.inference_mode():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    cache = span.new_cache(64)
    cache.open(b"a", 32)
    plan = cache.schedule([StepRequest(b"a", 0, len(tokens))])
    taps = BatchTaps([TappedPart(2, 7, (0, 2, 5), 16), None, TappedPart(0, 1, (2, 6), 16), TappedPart(3, 3, (2,), 8)])
    stops, hidden, layer = [], span.embed(tokens), 0
    while layer < 6:
        taps.collect(layer, hidden)
        stop = taps.next_stop(layer, 6)
        stops.append(stop)
        hidden, layer = span.forward(hidden, plan, cache, layer, stop), stop
    taps.collect(6, hidden)
    assert stops == [2, 5, 6]
    assert taps.of(1) == taps.of(3) == ()
    for step, first, last in ((0, 2, 7), (2, 0, 1)):
        for tap, body in taps.of(step):
            expected = hidden[first:last] if tap == 6 else states[tap][0, first:last]
            torch.testing.assert_close(decode(body, 96, 16), expected, rtol=1e-2, atol=1e-2)
    assert [tap for tap, _ in taps.of(0)] == [0, 2, 5]
    assert [tap for tap, _ in taps.of(2)] == [2, 6]


def test_last_tap_is_what_the_final_norm_reads() -> None:
    model = tiny_model("llama")
    read = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].detach()))
    with torch.inference_mode():
        model(torch.tensor([[1, 2, 3]]))
    span = load_span(ModelTensors(model), LayerSpan(0, 6), torch.float32)
    cache = span.new_cache(64)
    cache.open(b"a", 32)
    hidden = span.forward(span.embed([1, 2, 3]), cache.schedule([StepRequest(b"a", 0, 3)]), cache)
    torch.testing.assert_close(hidden, read[0][0], rtol=1e-4, atol=1e-4)
