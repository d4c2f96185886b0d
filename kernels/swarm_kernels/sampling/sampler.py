"""Sampling of the next token. The tail samples from the target's logits; draft tokens are only compared with the
result.

Owns the order of the filters and how they break ties. A sample depends on the logits, the sampling parameters, the
position and the tokens before it, and on nothing else: not on batching, chain, machine or earlier samples. So
speculative decoding changes the speed and never the text.

After `processors` the filters come in transformers' order: temperature, top-k, top-p, min-p. The kept tokens stay in
the order of their ids when the cumulative distribution is inverted, so that a rounding error moves a boundary by its
own size instead of swapping two neighbors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from swarm.errors import ModelError
from swarm.types import Sampling
from swarm_kernels.sampling.kth_largest import kth_largest
from swarm_kernels.sampling.philox import uniform
from swarm_kernels.sampling.processors import Scores, TokenIds, changes_logits, process

_BLOCK = 256


@dataclass(frozen=True, slots=True, eq=False)
class RowContext:
    """What the sample of one row depends on besides its logits.

    `position`: of the token to sample. `history`: the tokens before it, of which the first `prompt_tokens` are the
    prompt; read only by penalties. `allowed [vocab]`: the tokens that may be sampled, None for all.
    """

    sampling: Sampling
    position: int
    history: Sequence[int] | TokenIds = ()
    prompt_tokens: int = 0
    allowed: npt.NDArray[np.bool_] | None = None


def sample(
    logits: torch.Tensor,
    sampling: Sampling,
    position: int,
    history: Sequence[int] | TokenIds = (),
    prompt_tokens: int = 0,
    allowed: npt.NDArray[np.bool_] | None = None,
) -> int:
    """The token at `position`, sampled from `logits [vocab]` fp32. Greedy takes the lowest id of the largest logit.

    Raises ModelError if the logits are not finite or no token is allowed, InvalidRequest if `history` or the bias has
    ids outside the vocabulary.
    """
    return sample_rows(logits[None], [RowContext(sampling, position, history, prompt_tokens, allowed)])[0]


def sample_rows(logits: torch.Tensor, rows: Iterable[RowContext]) -> list[int]:
    """`sample` for each row of `logits [m, vocab]`."""
    scores = logits.detach().float().cpu().numpy()
    tokens = scores.argmax(axis=1)  # of each row the first NaN, if there is one
    if not np.isfinite(scores[np.arange(len(scores)), tokens]).all():
        raise ModelError("the model's output is not finite; its weights or a node of the chain are damaged")
    return [_sample(scores[i], int(tokens[i]), row) for i, row in enumerate(rows)]


def _sample(scores: Scores, best: int, row: RowContext) -> int:
    """`best`: the lowest id of the largest of `scores [vocab]`."""
    sampling = row.sampling
    if row.allowed is not None or changes_logits(sampling):
        scores = process(scores, sampling, row.history, row.prompt_tokens, row.allowed)
        best = int(scores.argmax())
        if not np.isfinite(scores[best]):
            raise ModelError("the model's output is not finite after the penalties; they are too extreme for it")
    if sampling.temperature == 0 or sampling.top_k == 1:
        return best
    kept, weights = filtered(scores, sampling, scores[best])
    index = _invert(weights, uniform(sampling.seed, row.position))
    return index if kept is None else int(kept[index])


def filtered(scores: Scores, sampling: Sampling, best: np.float32) -> tuple[npt.NDArray[np.int64] | None, Scores]:
    """The ids, ascending, that top-k, top-p and min-p leave (None: all), and their weights: of the likeliest token 1.

    `best`: the largest of `scores [vocab]`."""
    kept: npt.NDArray[np.int64] | None = None
    if 0 < sampling.top_k < len(scores):
        kept = np.flatnonzero(
            scores >= kth_largest(scores, sampling.top_k)
        )  # ties at the threshold are kept, as in transformers
        scores = scores[kept]
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature: exp(-inf) is the right 0
        weights = np.exp((scores - best) / np.float32(max(sampling.temperature, 1e-30)))
    if sampling.top_p < 1:
        nucleus = _nucleus(weights, sampling.top_p)
        kept = nucleus if kept is None else kept[nucleus]
        weights = weights[nucleus]
    if sampling.min_p > 0:
        likely = np.flatnonzero(weights >= np.float32(sampling.min_p))  # of the likeliest token's weight, which is 1
        kept = likely if kept is None else kept[likely]
        weights = weights[likely]
    return kept, weights


def _nucleus(weights: Scores, top_p: float) -> npt.NDArray[np.int64]:
    """Ids, ascending, of the smallest set of likeliest tokens with mass `top_p`; of equally likely ones the lower
    ids."""
    goal = top_p * float(weights.sum(dtype=np.float64))
    for floor in (0.1, 1e-3, 1e-5, -1.0):  # times the largest weight, 1: sorting a whole vocabulary is slow
        heavy = np.flatnonzero(weights > floor)
        order = heavy[np.argsort(-weights[heavy], kind="stable")]
        mass = np.cumsum(weights[order], dtype=np.float64)
        if mass[-1] >= goal:
            break
    inside = 1 + int(np.searchsorted(mass[:-1], goal, side="left"))
    return np.sort(order[:inside])


def _invert(weights: Scores, point: float) -> int:
    """The first index whose cumulative weight exceeds `point` of the total. By blocks: one long sum is slow."""
    whole = len(weights) // _BLOCK * _BLOCK
    blocks = weights[:whole].reshape(-1, _BLOCK).sum(axis=1, dtype=np.float64)
    ends = np.cumsum(np.append(blocks, weights[whole:].sum(dtype=np.float64)))
    target = point * ends[-1]
    block = int(np.searchsorted(ends[:-1], target, side="right"))
    before = ends[block - 1] if block else 0.0
    part = weights[block * _BLOCK : (block + 1) * _BLOCK]
    index = int(np.searchsorted(np.cumsum(part, dtype=np.float64), target - before, side="right"))
    if index < len(part):
        return block * _BLOCK + index
    return int(np.flatnonzero(weights[: block * _BLOCK + len(part)])[-1])  # rounding error went past the last one
