"""The margin of a sampled token: 0 for the sample itself, and elsewhere the least change of the logits that makes it
one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from swarm.types import Sampling
from swarm_kernels.sampling.margin import UNBOUNDED, token_margins
from swarm_kernels.sampling.sampler import RowContext, sample, sample_rows

OPTIONS = [
    Sampling(seed=3),
    Sampling(temperature=0.8, seed=3),
    Sampling(temperature=1.3, top_p=0.9, seed=3),
    Sampling(temperature=0.7, top_k=7, seed=3),
    Sampling(temperature=1.0, top_k=20, top_p=0.9, min_p=0.05, seed=3),
]


def rows(sampling: Sampling, count: int) -> list[RowContext]:
    return [RowContext(sampling, position) for position in range(count)]


@pytest.mark.parametrize("sampling", OPTIONS, ids=str)
def test_the_sample_itself_has_none(sampling: Sampling) -> None:
    logits = torch.randn(200, 400, generator=torch.Generator().manual_seed(1)) * 3
    assert max(token_margins(logits, rows(sampling, 200), sample_rows(logits, rows(sampling, 200)))) < 1e-6


@pytest.mark.parametrize("sampling", OPTIONS, ids=str)
def test_no_smaller_change_makes_another_token_the_sample(sampling: Sampling) -> None:
    """Where logits change by at most e, the sample of the changed ones has a margin of at most e, unless the filters'
    cut moved with them."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(300, 60, generator=generator) * 2
    over = 0
    for size in (0.01, 0.1, 0.5):
        changed = logits + size * (2 * torch.rand(logits.shape, generator=generator) - 1)
        tokens = sample_rows(changed, rows(sampling, 300))
        over += sum(margin > size + 1e-6 for margin in token_margins(logits, rows(sampling, 300), tokens))
    cut = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    assert over < 20 if cut else over == 0


def test_a_change_of_the_margin_makes_it_the_sample() -> None:
    logits = torch.randn(100, 30, generator=torch.Generator().manual_seed(4))
    sampling = Sampling(temperature=0.9, seed=5)
    for position, row in enumerate(logits):
        token = (sample(row, sampling, position) + 7) % 30
        (margin,) = token_margins(row[None], [RowContext(sampling, position)], [token])
        assert margin > 0
        found = []
        for side in (1, -1):  # all tokens up to it up or down, the others the other way
            for own in (1, -1):
                moved = row.clone()
                moved[:token] += side * margin * 1.0001
                moved[token + 1 :] -= side * margin * 1.0001
                moved[token] += own * margin * 1.0001
                found.append(sample(moved, sampling, position))
        assert token in found


def test_greedy_is_half_of_what_it_lacks() -> None:
    (margin,) = token_margins(torch.tensor([[1.0, 3.0, 2.5]]), [RowContext(Sampling(), 0)], [0])
    assert margin == pytest.approx(1.0)


@pytest.mark.parametrize("token", [-1, 40, 1 << 40])
def test_hostile_tokens_and_logits_have_a_bounded_margin(token: int) -> None:
    logits = torch.zeros(1, 40)
    assert token_margins(logits, rows(OPTIONS[1], 1), [token]) == [UNBOUNDED]
    steep = torch.full((1, 40), -1e30)
    steep[0, 0] = 1e30
    for sampling in (*OPTIONS, replace(OPTIONS[1], temperature=1e-30)):
        (margin,) = token_margins(steep, rows(sampling, 1), [39])
        assert np.isfinite(margin)
        assert 100 < margin <= UNBOUNDED
