"""Exponentially weighted means against their recurrences written out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.ewma import DecayedRatio, Ewma

SAMPLES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)
DECAYS = st.floats(0.0, 1.0)


@given(DECAYS, st.floats(-1e6, 1e6), SAMPLES)
def test_the_initial_value_counts_as_a_sample(decay: float, initial: float, samples: list[float]) -> None:
    mean, expected = Ewma(decay, initial), initial
    for sample in samples:
        expected = decay * expected + (1 - decay) * sample
        assert mean.update(sample) == mean.value == expected


@given(DECAYS, SAMPLES)
def test_without_an_initial_value_the_first_sample_is_the_value(decay: float, samples: list[float]) -> None:
    mean, expected = Ewma(decay), samples[0]
    assert (mean.samples, mean.value) == (0, 0.0)
    assert mean.update(samples[0]) == expected
    for sample in samples[1:]:
        expected = decay * expected + (1 - decay) * sample
        assert mean.update(sample) == expected
    assert mean.samples == len(samples)


@given(DECAYS, SAMPLES)
def test_bias_correction_gives_no_sample_less_than_in_a_plain_mean(decay: float, samples: list[float]) -> None:
    mean, expected = Ewma(decay, bias_correction=True), 0.0
    for count, sample in enumerate(samples, 1):
        expected += max(1 - decay, 1 / count) * (sample - expected)
        assert mean.update(sample) == expected
    plain = Ewma(1.0, bias_correction=True)
    for sample in samples:
        plain.update(sample)
    assert plain.value == pytest.approx(sum(samples) / len(samples), abs=1e-6)


def test_a_mean_may_decay_between_samples() -> None:
    mean = Ewma(0.5, 1.0)
    mean.value = 3.0
    assert mean.update(5.0) == 4.0


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.1, 100), DECAYS), min_size=1, max_size=40))
def test_a_ratio_is_of_two_decayed_sums(added: list[tuple[float, float, float]]) -> None:
    ratio, hits, trials = DecayedRatio(1.0, 2.0), 1.0, 2.0
    assert ratio.value == 0.5
    for numerator, denominator, decay in added:
        ratio.add(numerator, denominator, decay)
        hits, trials = hits * decay + numerator, trials * decay + denominator
        assert ratio.value == hits / trials
    with pytest.raises(ZeroDivisionError):
        _ = DecayedRatio().value
