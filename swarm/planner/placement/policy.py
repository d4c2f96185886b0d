"""The numbers that tune phase 1: how much work its searches do, and what a unit of that work is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AllocationPolicy:
    """Limits of the search for the fewest nodes of k replicas: more proves more pools optimal, and takes longer."""

    min_steps: int = 10_000  # default work budget, in steps of about a microsecond
    steps_per_node: int = 40  # ... of larger pools
    share_for_other_k: float = 0.1  # of the budget left once the best k is proven
    extend_tries: int = 2  # re-splits, in each of two passes, to make room for one more replica before starting over
    repair_tries: int = 20  # the same for each bin that falls short in a fresh start
    max_dual_denominators: int = 128  # d = 2, 3, ... L for real models; an even choice of them beyond that many layers
    max_dual_numerators: int = 2  # of multipliers m/d; larger ones tightened 16 of 8,064 random bounds for 10x the rows
    waste_duals: int = 8  # duals by which the dynamic program measures waste: more cut more, and cost more a state
    cached_patterns: int = 512  # columns kept for the next relaxation
    patterns_per_pricing: int = 12  # columns that one pricing adds
    max_pivots_per_row: int = 100  # in case degenerate pivots should ever cycle


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What an operation counts for in a `WorkBudget`, measured in microseconds of Python."""

    split: int = 5
    dp_state: int = 10
    pivot: int = 50


POLICY = AllocationPolicy()
COSTS = StepCosts()
