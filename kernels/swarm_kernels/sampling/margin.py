"""By how much the logits would have to be other ones for a token to be the sample: 0 for the token that is.

Honest machines of unlike arithmetic now and then sample another token, and then only just: by margins of the size of
their numerical error. A token of another temperature, or one that was not sampled at all, misses by more. As in
Token-DiFR ("DiFR: Inference Verification Despite Nondeterminism", 2025), which takes the margin of a Gumbel-max
sampler; ours inverts the cumulative distribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from swarm_kernels.sampling.philox import uniform
from swarm_kernels.sampling.processors import Scores
from swarm_kernels.sampling.sampler import RowContext, filtered

UNBOUNDED = 1e4
"""Of a token that no small change would bring: its weight is 0, or it is outside the vocabulary."""


def token_margins(logits: torch.Tensor, rows: Iterable[RowContext], tokens: Sequence[int]) -> list[float]:
    """For each row of `logits [m, vocab]`, whose context has no penalties, bias or mask: the margin of `tokens[i]`."""
    scores = logits.detach().float().cpu().numpy()
    return [_margin(scores[i], row, token) for i, (row, token) in enumerate(zip(rows, tokens, strict=True))]


def _margin(scores: Scores, row: RowContext, token: int) -> float:
    """The least e such that changes of at most e a logit make `token` the sample, if the filters' cut stayed.

    The cumulative weight up to the token can be moved past the number drawn by lifting all logits on one side of it and
    lowering the others. A token that was filtered out must also reach the least likely one that was not.
    """
    sampling = row.sampling
    if not 0 <= token < len(scores):
        return UNBOUNDED
    best = scores[int(scores.argmax())]
    if sampling.temperature == 0 or sampling.top_k == 1:
        return min(float(best - scores[token]) / 2, UNBOUNDED)
    kept, _ = filtered(scores, sampling, best)
    weights = (scores if kept is None else scores[kept]).astype(np.float64)  # logarithms, times the temperature
    at = token if kept is None else int(np.searchsorted(kept, token))
    inside = kept is None or (at < len(kept) and int(kept[at]) == token)
    short = 0.0 if inside else float(weights.min() - scores[token]) / 2
    temperature = max(sampling.temperature, 1e-30)
    before, after = (_log_sum(part, temperature) for part in (weights[:at], weights[at + 1 if inside else at :]))
    moved = _moved(before, float(scores[token]) / temperature, after, uniform(sampling.seed, row.position))
    return min(max(short, moved * temperature), UNBOUNDED)


def _log_sum(scores: npt.NDArray[np.float64], temperature: float) -> float:
    if not len(scores):
        return -math.inf
    scaled = scores / temperature
    best = float(scaled.max())
    return best + math.log(float(np.exp(scaled - best).sum()))


def _moved(before: float, weight: float, after: float, point: float) -> float:
    """By how much log-weights on the two sides of a boundary must move for `point` to fall upon `weight`."""
    point = max(point, 2.0**-54)
    drawn = math.log(point) - math.log1p(-point)
    low, high = before - np.logaddexp(weight, after), np.logaddexp(before, weight) - after
    return max(0.0, float(low - drawn) / 2, float(drawn - high) / 2)
