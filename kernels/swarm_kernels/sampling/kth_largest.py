"""The k-th largest score of a long row: a selection over a vocabulary, without partitioning all of it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_BLOCK = 256


def kth_largest(scores: npt.NDArray[np.float32], count: int) -> np.float32:
    """`np.partition(scores, -count)[-count]` for `1 <= count <= len(scores)`; no NaN.

    So many blocks have a maximum of at least `floor` that the values from there on hold the answer; the row's end, less
    than a block, only adds to them.
    """
    blocks = len(scores) // _BLOCK
    if blocks >= count:
        maxima = scores[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
        floor = np.partition(maxima, -count)[-count]
        scores = scores[scores >= floor]
    return np.partition(scores, -count)[-count]  # type: ignore[no-any-return]
