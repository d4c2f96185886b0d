"""Proofs that k replicas need at least so many nodes: dual functions of the covering problem behind Parallax phase 1.

A replica is a set of capacities that reaches L layers. Give each capacity c a weight w(c) such that every such set
weighs at least `total`; then a pool holds at most floor(sum of its weights / total) replicas. Every bound here is
whole-number arithmetic on such weights, so none of them depends on rounding or on the machine it runs on.

Works on capacities only, sorted from the largest down; nodes, regions and scores belong to `allocation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from swarm.planner.placement.policy import POLICY

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Dual:
    """`weights[c]` for each capacity c in 0..L; any capacities that sum to L or more weigh at least `total`."""

    weights: tuple[int, ...]
    total: int

    def replicas(self, capacities: Sequence[int]) -> int:
        """An upper bound on the replicas that `capacities` can form."""
        weights = self.weights
        return sum([weights[c] for c in capacities]) // self.total


def at_most(capacities: Sequence[int], num_layers: int) -> Ints:
    """Upper bounds on the replicas of the first s nodes, `[len(capacities)]`, for capacities sorted downwards."""
    caps = np.asarray(capacities, dtype=np.int64)
    fewest = fewest_stages_dual(int(caps[0]), num_layers)
    weights, totals = _float_duals(num_layers)
    # Exact: sums stay below 2^53, and there a quotient that is no whole number cannot round up to one.
    replicas = weights.take(caps, axis=1).cumsum(axis=1)  # [duals, nodes]
    replicas /= totals
    tightest: Ints = replicas.min(axis=0).astype(np.int64)
    np.minimum(tightest, np.array(fewest.weights)[caps].cumsum() // fewest.total, out=tightest)
    return tightest


def least_stages(capacities: Sequence[int], num_layers: int) -> list[int]:
    """Entry k-1: a lower bound on s*(k), for every k that is not ruled out; capacities sorted downwards, at most L."""
    if not capacities:
        return []
    bounds = at_most(capacities, num_layers)
    replicas = np.arange(1, int(bounds[-1]) + 1)
    return [int(s) + 1 for s in np.searchsorted(bounds, replicas)]


def fewest_stages_dual(largest: int, num_layers: int) -> Dual:
    """w(c) = 1/m(c), where m(c) is the fewest nodes in a replica with c: each of a replica's p members has m <= p.

    Sharper than the rounding duals where small capacities cannot sit in a short pipeline even beside the largest one.
    Only p = ceil(L / largest) and p + 1 occur as m(c). Valid for pools without a capacity above `largest`.
    """
    fewest = -(-num_layers // largest)
    enough = num_layers - (fewest - 1) * largest
    weights = [fewest + 1 if c >= enough else fewest for c in range(num_layers + 1)]
    return Dual(tuple(weights), fewest * (fewest + 1))


def rounding_dual_rows(capacities: Sequence[int], num_layers: int, replicas: int, most: int) -> list[Dual]:
    """The `most` rounding duals that leave the least slack for `replicas` of them to be formed, tightest first."""
    weights, totals = _rounding_duals(num_layers)
    counts = np.bincount(np.asarray(capacities, dtype=np.int64), minlength=num_layers + 1)
    slack = (weights * counts).sum(axis=1) / totals - replicas
    rows = np.argsort(slack, kind="stable")[:most]
    return [Dual(tuple(weights[row].tolist()), int(totals[row])) for row in rows]


@lru_cache(maxsize=8)
def _float_duals(num_layers: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """`_rounding_duals` for `at_most`: weights `[duals, L + 1]`, totals `[duals, 1]`."""
    weights, totals = _rounding_duals(num_layers)
    return weights.astype(np.float64), totals.astype(np.float64)[:, None]


@lru_cache(maxsize=8)
def _rounding_duals(num_layers: int) -> tuple[Ints, Ints]:
    """-> weights `[duals, L + 1]`, totals `[duals]`: mixed-integer rounding of `sum of c >= L` times m/d.

    For a multiplier t = m/d, F(c) = floor(tc) + min(1, frac(tc) / frac(tL)) is subadditive and F(L) = ceil(tL), so any
    capacities that sum to L weigh at least ceil(tL) (Nemhauser and Wolsey 1988). t = 1 is the plain sum of
    layers; t = 1/d sees that capacity d fills no more than L/d of a replica, rounded down.
    """
    capacity = np.arange(num_layers + 1, dtype=np.int64)
    rows: dict[tuple[int, ...], int] = {tuple(capacity.tolist()): num_layers}
    for d in range(2, num_layers + 1, -(-num_layers // POLICY.max_dual_denominators)):
        for m in range(1, min(POLICY.max_dual_numerators, d - 1) + 1):
            part = m * num_layers % d  # frac(tL), in units of 1/d
            if part:
                row = capacity * m // d * part + np.minimum(part, capacity * m % d)
                rows.setdefault(tuple(row.tolist()), -(-m * num_layers // d) * part)
    return np.array(list(rows), dtype=np.int64), np.array(list(rows.values()), dtype=np.int64)
