"""Drawing tokens: the generator, transformers' filters, ties, frequencies, and what must be refused."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from swarm.errors import InvalidRequest, ModelError
from swarm.messages import WireSampling
from swarm.types import Sampling
from swarm_kernels.runtime.sampling import philox, sample, sample_rows, uniform, validate_sampling

FILTERS = [
    Sampling(1.0),
    Sampling(0.7, top_k=5),
    Sampling(1.3, top_p=0.8),
    Sampling(0.5, top_p=0.95, top_k=40),
    Sampling(1.0, top_p=0.6, repetition_penalty=1.4),
    Sampling(2.0, top_k=1000, repetition_penalty=0.7),
    Sampling(1.0, top_p=1e-9),
]


def test_the_generator_gives_the_published_numbers() -> None:
    """Known answers of the Random123 library for philox4x32-10."""
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    counter, key = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert philox(counter, key) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_uniform_numbers_fill_the_interval_and_depend_on_seed_and_position() -> None:
    numbers = [uniform(seed, position) for seed in range(50) for position in range(100)]
    assert len(set(numbers)) == 5000
    assert all(0 <= number < 1 for number in numbers)
    counts = Counter(int(10 * number) for number in numbers)
    assert all(abs(count - 500) < 5 * math.sqrt(450) for count in counts.values())
    assert uniform((1 << 63) - 1, 1 << 20) != uniform(1, 1 << 20)


def transformers_distribution(logits: torch.Tensor, sampling: Sampling, history: list[int]) -> torch.Tensor:
    """What transformers would sample from, `[vocab]` probabilities."""
    steps = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    steps.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    return torch.softmax(steps(torch.tensor([history]), logits[None].clone()), -1)[0]


@pytest.mark.slow
@pytest.mark.parametrize("sampling", FILTERS)
def test_samples_follow_transformers_distribution(sampling: Sampling) -> None:
    """Inverting the distribution at every point of a fine grid gives each token its probability."""
    torch.manual_seed(3)
    logits = torch.randn(600) * 3
    history = [5, 17, 17, 599, int(logits.argmax())]
    expected = transformers_distribution(logits, sampling, history)
    points = 4000
    with pytest.MonkeyPatch.context() as patch:
        counts = Counter()
        for i in range(points):
            patch.setattr("swarm_kernels.runtime.sampling.uniform", lambda seed, position, i=i: (i + 0.5) / points)
            counts[sample(logits, sampling, 0, history)] += 1
    for token in range(600):
        assert abs(counts[token] - points * float(expected[token])) <= 1.01
    assert set(counts) <= set(torch.nonzero(expected).flatten().tolist())


def test_long_vocabularies_take_the_blocked_path() -> None:
    rng = np.random.default_rng(0)
    for size in (255, 256, 257, 5000, 49152):
        logits = torch.from_numpy(rng.standard_normal(size, dtype=np.float32) * 2)
        weights = np.exp(logits.numpy().astype(np.float64))
        ends = np.cumsum(weights) / weights.sum()
        for seed in range(20):
            token = sample(logits, Sampling(1.0, seed=seed), 7)
            point = uniform(seed, 7)
            assert ends[token] > point - 1e-6
            assert token == 0 or ends[token - 1] <= point + 1e-6


def test_the_same_sample_alone_and_in_a_batch_and_again() -> None:
    logits = torch.randn(len(FILTERS), 3000)
    histories = [random.Random(i).sample(range(3000), 20) for i in range(len(FILTERS))]
    positions = list(range(len(FILTERS)))
    batch = sample_rows(logits, FILTERS, positions, histories)
    for i in reversed(positions):
        as_array = np.array(histories[i][::-1])
        assert sample(logits[i].clone(), FILTERS[i], i, as_array) == batch[i]


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(3, 100)
    logits[0, [7, 40]] = 5.0
    logits[2, 99] = 1e-30
    assert sample_rows(logits, [Sampling()] * 3, [0, 1, 2], [()] * 3) == [7, 0, 99]
    assert [sample(row, Sampling(), 0) for row in logits] == [7, 0, 99]
    assert sample(logits[0], Sampling(1.0, top_k=1, seed=3), 0) == 7


def test_greedy_with_a_repetition_penalty() -> None:
    logits = torch.tensor([2.0, 3.0, -1.0, 2.5])
    penalty = Sampling(repetition_penalty=1.5)
    assert sample(logits, penalty, 0, [1, 1, 1]) == 3
    assert sample(logits, penalty, 0, [1, 3]) == 0  # 2.0 ties with 3.0 / 1.5
    assert sample_rows(torch.stack([logits, logits]), [penalty, Sampling()], [0, 0], [[1], [1]]) == [3, 1]
    negative = torch.tensor([-1.0, -1.2])
    assert sample(negative, penalty, 0, [0]) == 1
    assert torch.equal(logits, torch.tensor([2.0, 3.0, -1.0, 2.5]))  # the caller's logits stay as they were


@pytest.mark.parametrize("sampling", [Sampling(), *FILTERS])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite(sampling: Sampling, bad: float) -> None:
    logits = torch.randn(500)
    logits[123] = bad
    with pytest.raises(ModelError, match="not finite"):
        sample(logits, sampling, 0, [1, 2])
    with pytest.raises(ModelError, match="not finite"):
        sample_rows(torch.stack([torch.randn(500), logits]), [sampling] * 2, [0, 1], [[], []])
    with pytest.raises(ModelError, match="not finite"):
        sample(torch.full((500,), -math.inf), sampling, 0)


def test_masked_tokens_are_never_sampled() -> None:
    logits = torch.full((1000,), -math.inf)
    logits[[3, 700]] = 0.0
    for filters in (Sampling(1.0), Sampling(1.0, top_p=0.99), Sampling(100.0, top_k=50)):
        sampled = {sample(logits, replace(filters, seed=seed), 0) for seed in range(40)}
        assert sampled == {3, 700}


def test_extreme_values() -> None:
    logits = torch.tensor([1e38, -1e38, 0.0, 3e38])
    for temperature in (1e-30, 1e-3, 100.0):
        assert sample(logits, Sampling(temperature), 0) == 3
    flat = torch.zeros(1000)
    assert len({sample(flat, Sampling(1.0, seed=seed), 0) for seed in range(100)}) > 80
    assert sample(torch.tensor([0.5]), Sampling(1.0, top_k=10, top_p=0.5), 0) == 0


def test_a_history_from_elsewhere_is_refused() -> None:
    for history in ([5], [-1], [1 << 40]):
        with pytest.raises(InvalidRequest, match="outside the vocabulary"):
            sample(torch.zeros(5), Sampling(repetition_penalty=2.0), 0, history)
    assert sample(torch.zeros(5), Sampling(), 0, [5]) == 0  # without a penalty nobody reads it


GOOD = [Sampling(), Sampling(100.0, 1.0, 1 << 20, 100.0, (1 << 63) - 1), Sampling(0.0, 1e-6, 0, 0.01)]
BAD = {
    "temperature": [Sampling(t) for t in (-0.1, 100.1, math.nan, math.inf, "1", True)],
    "top_p": [Sampling(top_p=0.0), Sampling(top_p=1.01), Sampling(top_p=math.nan), Sampling(top_p=-1)],
    "top_k": [Sampling(top_k=-1), Sampling(top_k=1.5), Sampling(top_k=1 << 21)],
    "repetition_penalty": [Sampling(repetition_penalty=0.0), Sampling(repetition_penalty=math.inf)],
    "seed": [Sampling(seed=-1), Sampling(seed=1 << 63), Sampling(seed=0.5)],
}


def test_sampling_values_in_range_pass_here_and_on_the_wire() -> None:
    for sampling in GOOD:
        assert validate_sampling(sampling) is sampling
        assert WireSampling.of(sampling).to_sampling() == sampling


@pytest.mark.parametrize("name", BAD)
def test_sampling_values_out_of_range(name: str) -> None:
    for sampling in BAD[name]:
        with pytest.raises(InvalidRequest, match=name):
            validate_sampling(sampling)
