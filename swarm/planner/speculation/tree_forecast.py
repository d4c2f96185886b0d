"""How likely a level of a prediction tree holds the text, and how many guesses that takes (PipeDec §3.3.3).

Owns what the levels of a tree in flight are worth on average. Knows neither what a row costs nor how many levels are
under way (`forecast`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swarm.planner.speculation.static_tree import AcceptanceTable


@dataclass(frozen=True, slots=True)
class LevelForecast:
    """`hit`: how likely it holds the target's token, given that the level above held the one before. `rows`: its
    guesses, on average."""

    hit: float
    rows: float


def forecast_levels(
    acceptance: AcceptanceTable, width: int, depth: int, uncertain_fraction: float = 1.0
) -> Iterator[LevelForecast]:
    """The levels below a known token: each holds the `width` likeliest paths that continue the level above.

    `doubtful`: the part of all places that a drafter has doubts about and says so; it is right about the others, and
    paths branch at the doubtful ones only. `acceptance` holds for all places together. Ends with the first level that
    cannot be hit.
    """
    spans = list(_branching_levels(acceptance, width, min(depth, len(acceptance)), uncertain_fraction))
    inside = 1.0
    for level in range(1, len(spans)):
        doubts = [
            (spans[k], _binomial(level, k, uncertain_fraction))
            for k in range(level if uncertain_fraction == 1 else 0, level + 1)
        ]
        covered = math.fsum(chance * span.hit for span, chance in doubts)
        if covered <= 0:
            return
        yield LevelForecast(min(1.0, covered / inside), math.fsum(chance * span.rows for span, chance in doubts))
        inside = covered


def _branching_levels(
    acceptance: AcceptanceTable, width: int, depth: int, uncertain_fraction: float
) -> Iterator[LevelForecast]:
    """After 0, 1, ... doubtful places: how likely the text is among the paths kept, and how many these are."""
    paths, inside = [1.0], 1.0
    yield LevelForecast(inside, 1.0)
    for k in range(1, depth + 1):
        place = min(len(acceptance), round(k / uncertain_fraction))  # where the k-th doubt lies, on average
        first, *others = acceptance[place - 1] or (0.0,)
        row = (max(0.0, 1 - (1 - first) / uncertain_fraction), *(p / uncertain_fraction for p in others))
        paths = sorted((path * p for path in paths for p in row if p > 0), reverse=True)[:width]
        inside = min(inside, math.fsum(paths))
        yield LevelForecast(inside, float(len(paths)))


def _binomial(n: int, k: int, p: float) -> float:
    return math.comb(n, k) * p**k * (1 - p) ** (n - k)


@dataclass(frozen=True, slots=True)
class AcceptedRun:
    """What to expect between two misses: `hits` in a row, `steps` that were whole among them, and the `rows` of a level
    that was hit."""

    hits: float
    steps: float
    rows: float


def expected_run(ahead: Sequence[LevelForecast], levels_per_step: int = 1) -> AcceptedRun:
    """With the levels `ahead` in flight, `together` of them a step.

    Levels 1, 2, ... were guessed from further and further away, up to the levels in flight; from there on each is
    guessed from as far as the last.
    """
    hits, steps, rows, alive = 0.0, 0.0, 0.0, 1.0
    for number, level in enumerate(ahead, 1):
        alive *= level.hit
        hits, rows = hits + alive, rows + alive * level.rows
        steps += alive if number % levels_per_step == 0 else 0.0
    steady = min(ahead[-1].hit, 1 - 1e-6)  # certain guesses: a run of a million tokens
    missing = levels_per_step - len(ahead) % levels_per_step  # to the end of the next step
    steps += alive * steady**missing / (1 - steady**levels_per_step)
    beyond = alive * steady / (1 - steady)
    return AcceptedRun(hits + beyond, steps, (rows + beyond * ahead[-1].rows) / (hits + beyond))
