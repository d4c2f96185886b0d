"""How far apart two machines' results for the same row are.

Owns the distance, chosen because honest machines of unlike arithmetic keep it small. What is too far is decided in
`swarm.planner.auditing`.
"""

from __future__ import annotations

import math

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


def wire_distance(ours: bytes, theirs: bytes, dtype: str) -> float:
    """`row_distance` of two rows as they cross the wire, of nodes that compute in `dtype`."""
    if len(ours) != len(theirs):
        return math.inf
    a, b = (rows_from_wire(row, 1, len(row) // row_bytes(1, dtype), dtype)[0] for row in (ours, theirs))
    return row_distance(a, b)
