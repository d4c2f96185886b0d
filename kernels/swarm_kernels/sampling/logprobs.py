"""Log-probabilities of tokens under the model's own distribution: before bias, penalties, masks and temperature.

Each row by itself, in numpy: how many rows share a batch does not change a bit of the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from swarm.errors import ModelError
from swarm.types import TokenLogprobs
from swarm_kernels.sampling.kth_largest import kth_largest


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """For each row of `logits [m, vocab]`: ln p of `tokens[i]` and of the `top` likeliest tokens.

    Likeliest first, of equally likely ones the lower id. Raises ModelError if the logits are not finite.
    """
    rows = logits.detach().float().cpu().numpy()
    return [_of_row(row, token, top) for row, token in zip(rows, tokens, strict=True)]


def _of_row(logits: npt.NDArray[np.float32], token: int, top: int) -> TokenLogprobs:
    best = logits[logits.argmax()]  # the first NaN, if there is one
    if not np.isfinite(best):
        raise ModelError("the model's output is not finite; its weights or a node of the chain are damaged")
    shifted = logits - best
    log_sum = np.log(np.exp(shifted).sum(dtype=np.float64))
    ids = _likeliest(shifted, min(top, len(shifted)))
    return TokenLogprobs(
        token, float(shifted[token] - log_sum), tuple((int(i), float(shifted[i] - log_sum)) for i in ids)
    )


def _likeliest(scores: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """The ids of the `count` largest, largest first, of equal ones the lower id."""
    if count == 0:
        return np.empty(0, np.int64)
    candidates = np.flatnonzero(scores >= kth_largest(scores, count))
    return candidates[np.argsort(-scores[candidates], kind="stable")][:count]
