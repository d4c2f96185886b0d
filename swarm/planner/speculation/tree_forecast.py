"""The expected hit rate and number of rows of each level of a draft tree (PipeDec §3.3.3).

Owns the expected value of the levels in flight. Does not know what a row costs or how many levels are in flight
(`forecast`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swarm.planner.speculation.static_tree import AcceptanceTable


@dataclass(frozen=True, slots=True)
class LevelForecast:
    """`hit`: probability that it has the target's token, given that the level above has the one before. `rows`: its
    mean number of nodes."""

    hit: float
    rows: float


def forecast_levels(
    acceptance: AcceptanceTable, width: int, depth: int, uncertain_fraction: float = 1.0
) -> Iterator[LevelForecast]:
    """The levels below a known token: each has the `width` likeliest paths that continue the level above.

    `uncertain_fraction`: the part of all positions for which a drafter reports low confidence; it is right about the
    others, and paths branch at the uncertain ones only. `acceptance` is the mean over all positions. Ends before the
    first level that cannot be hit.
    """
    spans = list(_branching_levels(acceptance, width, min(depth, len(acceptance)), uncertain_fraction))
    inside = 1.0
    for level in range(1, len(spans)):
        fewest = level if uncertain_fraction == 1 else 0  # uncertain positions among the first `level`
        cases = [(spans[k], _binomial(level, k, uncertain_fraction)) for k in range(fewest, level + 1)]
        covered = math.fsum(chance * span.hit for span, chance in cases)
        if covered <= 0:
            return
        yield LevelForecast(min(1.0, covered / inside), math.fsum(chance * span.rows for span, chance in cases))
        inside = covered


def _branching_levels(
    acceptance: AcceptanceTable, width: int, depth: int, uncertain_fraction: float
) -> Iterator[LevelForecast]:
    """After 0, 1, ... uncertain positions: the probability that a kept path is right, and the number of paths."""
    paths, inside = [1.0], 1.0
    yield LevelForecast(inside, 1.0)
    for k in range(1, depth + 1):
        depth_of_kth = min(len(acceptance), round(k / uncertain_fraction))  # mean position of the k-th uncertain one
        first, *others = acceptance[depth_of_kth - 1] or (0.0,)
        row = (max(0.0, 1 - (1 - first) / uncertain_fraction), *(p / uncertain_fraction for p in others))
        paths = sorted((path * p for path in paths for p in row if p > 0), reverse=True)[:width]
        inside = min(inside, math.fsum(paths))
        yield LevelForecast(inside, float(len(paths)))


def _binomial(n: int, k: int, p: float) -> float:
    return math.comb(n, k) * p**k * (1 - p) ** (n - k)


@dataclass(frozen=True, slots=True)
class AcceptedRun:
    """Expected values between two misses: `hits` in a row, completed `steps` among them, `rows` of a level hit."""

    hits: float
    steps: float
    rows: float


def expected_run(ahead: Sequence[LevelForecast], levels_per_step: int = 1) -> AcceptedRun:
    """The run with the levels `ahead` in flight, `levels_per_step` of them a step.

    Levels 1, 2, ... were drafted from further and further away, up to the levels in flight; each later one is drafted
    from as far as the last.
    """
    hits, steps, rows, alive = 0.0, 0.0, 0.0, 1.0
    for number, level in enumerate(ahead, 1):
        alive *= level.hit
        hits, rows = hits + alive, rows + alive * level.rows
        steps += alive if number % levels_per_step == 0 else 0.0
    steady = min(ahead[-1].hit, 1 - 1e-6)  # bounds a run of certain drafts to a million tokens
    missing = levels_per_step - len(ahead) % levels_per_step  # to the end of the next step
    steps += alive * steady**missing / (1 - steady**levels_per_step)
    beyond = alive * steady / (1 - steady)
    return AcceptedRun(hits + beyond, steps, (rows + beyond * ahead[-1].rows) / (hits + beyond))
