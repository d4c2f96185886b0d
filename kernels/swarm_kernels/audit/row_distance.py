"""How far apart two machines' results for the same row are.

Owns the distance, chosen because honest machines of unlike arithmetic keep it small. What is too far is decided in
`swarm.planner.auditing`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from swarm_kernels.audit.wire_rows import row_bytes, rows_from_wire

OUTLIERS = 0.02
"""Of a row's elements, the largest do not count: a few channels of massive activations (Sun et al., arXiv 2402.17762)
hold nearly all of a row's norm and would hide the others."""


def row_distance(ours: npt.NDArray[np.float32], theirs: npt.NDArray[np.float32]) -> float:
    """`[hidden]` twice -> |a - b| over the smaller of their norms, over all elements but those that are largest in
    either. Symmetric. Infinite for rows that are not finite or of unlike length."""
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.inf
    size = np.maximum(np.abs(a), np.abs(b))
    kept = size <= np.quantile(size, 1 - OUTLIERS)
    difference, norm = float(np.linalg.norm((a - b)[kept])), min(np.linalg.norm(a[kept]), np.linalg.norm(b[kept]))
    return difference / float(norm) if norm > 0 else (math.inf if difference > 0 else 0.0)


def wire_distance(ours: bytes, theirs: bytes, dtype: str, parts: Sequence[int]) -> float:
    """`row_distance` of two rows as they cross the wire, of nodes that compute in `dtype`: the largest of any of their
    parts, of so many numbers each. What is only handed on would hide a difference in the rest."""
    if len(ours) != len(theirs) or len(ours) != sum(parts) * row_bytes(1, dtype):
        return math.inf
    ends = list(itertools.accumulate(parts))[:-1]
    a, b = (np.split(rows_from_wire(row, 1, sum(parts), dtype)[0], ends) for row in (ours, theirs))
    return max(row_distance(one, other) for one, other in zip(a, b, strict=True))
