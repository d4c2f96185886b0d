"""Drawing tokens: the generator, transformers' filters, ties, frequencies, and what must be refused."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from reference_sampling import distribution, reference_token

from swarm.errors import InvalidRequest, ModelError
from swarm.messages import WireSampling
from swarm.types import Sampling
from swarm_kernels.sampling.kth_largest import kth_largest
from swarm_kernels.sampling.philox import philox, uniform
from swarm_kernels.sampling.sampler import RowContext, sample, sample_rows
from swarm_kernels.sampling.validate import validate_sampling

FILTERS = [
    Sampling(1.0),
    Sampling(0.7, top_k=5),
    Sampling(1.3, top_p=0.8),
    Sampling(0.5, top_p=0.95, top_k=40),
    Sampling(1.0, top_p=0.6, repetition_penalty=1.4),
    Sampling(2.0, top_k=1000, repetition_penalty=0.7),
    Sampling(1.0, top_p=1e-9),
    Sampling(0.8, min_p=0.05),
    Sampling(1.2, top_k=50, top_p=0.9, min_p=0.1, repetition_penalty=1.2),
    Sampling(1.0, frequency_penalty=1.1, presence_penalty=0.6, logit_bias=((17, 4.0), (3, -100.0))),
    Sampling(1.0, min_p=1.0, frequency_penalty=-1.5),
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


@pytest.mark.slow
@pytest.mark.parametrize("sampling", FILTERS)
def test_samples_follow_transformers_distribution(sampling: Sampling) -> None:
    """Inverting the distribution at every point of a fine grid gives each token its probability."""
    torch.manual_seed(3)
    logits = torch.randn(600) * 3
    history = [5, 17, 17, 599, int(logits.argmax())]
    expected = distribution(logits, sampling, history, prompt_tokens=1)
    points = 4000
    with pytest.MonkeyPatch.context() as patch:
        counts = Counter()
        for i in range(points):
            patch.setattr("swarm_kernels.sampling.sampler.uniform", lambda seed, position, i=i: (i + 0.5) / points)
            counts[sample(logits, sampling, 0, history, prompt_tokens=1)] += 1
    for token in range(600):
        assert abs(counts[token] - points * float(expected[token])) <= 1.01
    assert set(counts) <= set(torch.nonzero(expected).flatten().tolist())


def random_sampling(rng: random.Random) -> Sampling:
    """Any combination of all that a caller can ask for."""
    return Sampling(
        temperature=rng.choice([0.0, 0.3, 0.8, 1.5]),
        top_p=rng.choice([1.0, 0.95, 0.5]),
        top_k=rng.choice([0, 0, 1, 7, 100]),
        repetition_penalty=rng.choice([1.0, 0.8, 1.3]),
        seed=rng.randrange(1 << 62),
        min_p=rng.choice([0.0, 0.02, 0.3]),
        frequency_penalty=rng.choice([0.0, 0.7, -0.5]),
        presence_penalty=rng.choice([0.0, 1.2, -0.4]),
        logit_bias=tuple((token, rng.uniform(-5, 5)) for token in rng.sample(range(300), rng.choice([0, 0, 1, 40]))),
    )


def test_any_combination_gives_the_token_of_transformers_processors() -> None:
    rng = random.Random(11)
    torch.manual_seed(12)
    for _ in range(400):
        sampling, length = random_sampling(rng), rng.randrange(1, 60)
        logits, history = torch.randn(300) * 3, rng.choices(range(300), k=length)
        prompt_tokens = rng.randrange(length + 1)
        expected = reference_token(logits, sampling, history, prompt_tokens)
        assert sample(logits, sampling, length, history, prompt_tokens) == expected, sampling


def test_only_allowed_tokens_are_sampled_and_the_others_share_their_mass() -> None:
    rng = np.random.default_rng(5)
    torch.manual_seed(6)
    for seed in range(100):
        logits, allowed = torch.randn(300) * 3, rng.random(300) < 0.05
        allowed[rng.integers(300)] = True
        sampling = Sampling(1.0, top_k=20, min_p=0.01, seed=seed, repetition_penalty=1.2)
        expected = distribution(logits, sampling, [1, 2], 0, allowed).double()
        ends = (expected / expected.sum()).cumsum(0)
        token = sample(logits, sampling, 2, [1, 2], 0, allowed)
        assert token == int((ends > uniform(seed, 2)).nonzero()[0])
        greedy = sample(logits, Sampling(), 2, (), 0, allowed)
        assert greedy == int(logits.masked_fill(torch.from_numpy(~allowed), -math.inf).argmax())


def test_a_mask_without_tokens_is_an_error() -> None:
    with pytest.raises(ModelError, match="no token"):
        sample(torch.zeros(5), Sampling(), 0, (), 0, np.zeros(5, bool))
    impossible = torch.tensor([0.0, -math.inf])
    with pytest.raises(ModelError, match="no token"):
        sample(impossible, Sampling(1.0, logit_bias=((0, 1.0),)), 0, (), 0, np.array([False, True]))


def test_the_kth_largest_is_that_of_a_partition() -> None:
    rng = np.random.default_rng(9)
    for _ in range(300):
        size = int(rng.choice([1, 255, 256, 257, 2000, 20_001]))
        scores = (rng.standard_normal(size) * rng.choice([1.0, 3.0])).astype(np.float32)
        if rng.random() < 0.5:
            scores = np.round(scores)  # ties
        scores[rng.random(size) < rng.choice([0.0, 0.9])] = -np.inf
        count = int(min(size, rng.choice([1, 2, 20, 70, 5000])))
        assert kth_largest(scores, count) == np.partition(scores, -count)[-count]


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
    batch = sample_rows(logits, [RowContext(FILTERS[i], i, histories[i]) for i in positions])
    for i in reversed(positions):
        as_array = np.array(histories[i][::-1])
        assert sample(logits[i].clone(), FILTERS[i], i, as_array) == batch[i]


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(3, 100)
    logits[0, [7, 40]] = 5.0
    logits[2, 99] = 1e-30
    assert sample_rows(logits, [RowContext(Sampling(), i) for i in range(3)]) == [7, 0, 99]
    assert [sample(row, Sampling(), 0) for row in logits] == [7, 0, 99]
    assert sample(logits[0], Sampling(1.0, top_k=1, seed=3), 0) == 7


def test_greedy_with_a_repetition_penalty() -> None:
    logits = torch.tensor([2.0, 3.0, -1.0, 2.5])
    penalty = Sampling(repetition_penalty=1.5)
    assert sample(logits, penalty, 0, [1, 1, 1]) == 3
    assert sample(logits, penalty, 0, [1, 3]) == 0  # 2.0 ties with 3.0 / 1.5
    rows = [RowContext(penalty, 0, [1]), RowContext(Sampling(), 0, [1])]
    assert sample_rows(torch.stack([logits, logits]), rows) == [3, 1]
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
        sample_rows(torch.stack([torch.randn(500), logits]), [RowContext(sampling, i) for i in range(2)])
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
        with pytest.raises(InvalidRequest, match="outside the vocabulary"):
            sample(torch.zeros(5), Sampling(logit_bias=((history[0], 1.0),)), 0)
    assert sample(torch.zeros(5), Sampling(), 0, [5]) == 0  # without a penalty nobody reads it


GOOD = [
    Sampling(),
    Sampling(100.0, 1.0, 1 << 20, 100.0, (1 << 63) - 1),
    Sampling(0.0, 1e-6, 0, 0.01),
    Sampling(min_p=1.0, frequency_penalty=-100.0, presence_penalty=100, logprobs=0, prompt_logprobs=20),
    Sampling(logit_bias=((0, -1e4), (130, 1e4))),
]
BAD = {
    "temperature": [Sampling(t) for t in (-0.1, 100.1, math.nan, math.inf, "1", True)],
    "top_p": [Sampling(top_p=0.0), Sampling(top_p=1.01), Sampling(top_p=math.nan), Sampling(top_p=-1)],
    "top_k": [Sampling(top_k=-1), Sampling(top_k=1.5), Sampling(top_k=1 << 21)],
    "repetition_penalty": [Sampling(repetition_penalty=0.0), Sampling(repetition_penalty=math.inf)],
    "seed": [Sampling(seed=-1), Sampling(seed=1 << 63), Sampling(seed=0.5)],
    "min_p": [Sampling(min_p=-0.1), Sampling(min_p=1.1), Sampling(min_p=math.nan)],
    "frequency_penalty": [Sampling(frequency_penalty=math.nan), Sampling(frequency_penalty=101)],
    "presence_penalty": [Sampling(presence_penalty=-101), Sampling(presence_penalty=math.inf)],
    "logprobs": [Sampling(logprobs=21), Sampling(logprobs=-1), Sampling(logprobs=True)],
    "prompt_logprobs": [Sampling(prompt_logprobs=21), Sampling(prompt_logprobs=1.0)],
    "logit_bias": [
        Sampling(logit_bias=((131, 1.0),)),
        Sampling(logit_bias=((-1, 1.0),)),
        Sampling(logit_bias=((1, math.nan),)),
        Sampling(logit_bias=((1, 1e5),)),
        Sampling(logit_bias=((1, 1.0), (1, 2.0))),
        Sampling(logit_bias=tuple((i, 1.0) for i in range(2000))),
    ],
}


def test_sampling_values_in_range_pass_here_and_on_the_wire() -> None:
    for sampling in GOOD:
        assert validate_sampling(sampling, vocab_size=131) is sampling
        assert WireSampling.of(sampling).to_sampling() == sampling


@pytest.mark.parametrize("name", BAD)
def test_sampling_values_out_of_range(name: str) -> None:
    for sampling in BAD[name]:
        with pytest.raises(InvalidRequest, match=name):
            validate_sampling(sampling, vocab_size=131)
