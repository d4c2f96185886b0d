"""The tuning constants of speculative decoding. What is decided with them at run time is a `SpeculationPolicy`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SearchPolicy:
    """The settings that `forecast` and `marginal_policy` choose among: more take longer to search."""

    widths: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)  # rows; powers of two suit vector units (Ghidorah §III-C 2)
    levels_per_step: tuple[int, ...] = (2, 4, 8, 16)  # of a pipelined tree
    max_in_flight: int = 32  # steps; each holds tree slots at every hop


@dataclass(frozen=True, slots=True)
class MarginalPolicy:
    """`marginal_policy.choose_policy`: the size of a step, and how far measurements are trusted."""

    row_limits: tuple[int, ...] = (32, 24, 16, 12)  # the first that respects max_compute_ratio bounds a step's rows
    min_rows: int = 8  # ... or else this: wide steps accept more tokens, but delay the steps behind them
    max_compute_ratio: float = 2.0  # compute time of such a step over that of one row
    max_depth: int = 16  # levels of the tree a step, and draft-model calls before one
    probe_rows: int = 9  # a row's cost is the slope of the cost curve up to here: a typical tree
    min_calibration: float = 0.2  # a drafter that overestimates more is not made to wait for ever
    max_calibration: float = 1.5
    min_hit_rate: float = 0.05  # of the draft model; keeps a bad start from disabling it for good


@dataclass(frozen=True, slots=True)
class ControllerPolicy:
    """`controller.SpeculationController`: how fast it follows measurements, and how readily it changes strategy."""

    bias_decay: float = 0.92  # a token; lower forgets faster how fast a strategy really was
    bias_recovery: float = 0.3  # part of a forecast's bias undone with every choice of another strategy: when to retry
    calibration_decay: float = 0.99  # a result; lower follows the drafter's accuracy faster, with more noise
    calibration_prior_tokens: float = 4.0  # expected tokens that the prior calibration of 1 weighs as much as
    step_rows_decay: float = 0.8  # a result; how fast the price of a step follows the size of those sent
    min_calibration: float = 0.05  # bounds the node probability that a forecast's policy demands
    throughput_iterations: float = 4.0  # time constant of the throughput, in iterations of the chain
    first_review_tokens: int = 12  # until the strategy is chosen again; doubled each time that it stays the same,
    max_review_tokens: int = 48  # up to here
    min_gain: float = 0.08  # another strategy must be faster by this fraction: hysteresis against noise
    widths: tuple[int, ...] = (1, 2, 4, 8, 16, 32)  # rows of the forecasts; fewer than SearchPolicy's, for speed
    typical_depth: int = 12  # levels of acceptance that forecasts use where no more fit into the chain
    tree_rows_margin: float = 3.0  # times the mean tree: room for steps whose drafts are better than average


@dataclass(frozen=True, slots=True)
class DrafterChoicePolicy:
    """`drafter_choice.rank_drafters`: what `auto` may spend on a drafter that nobody has asked for by name."""

    max_fetch_bytes: int = 256 << 20  # from a hub, before the first answer
    max_memory_bytes: int = 4 << 30  # of the client, for as long as it runs


@dataclass(frozen=True, slots=True)
class TailValuePolicy:
    """`tail_value.TailDraftValue`: how long drafts of the tail are tried before they may end."""

    trial_drafts: int = 16  # fewer end bad ones sooner, and good ones by chance
    max_unused_drafts: int = 64  # until they end, while plain decoding is the better choice
    decay: float = 0.95  # a draft; lower follows the text faster


@dataclass(frozen=True, slots=True)
class PlacePolicy:
    """`drafter_place.choose_place`: what a link is taken to carry while nobody has measured it."""

    link_bytes_per_ms: float = 1250.0  # 10 Mbit/s, the upload of a home: less makes bytes count more
    step_rows: int = 8  # rows of a usual step


SEARCH = SearchPolicy()
TAIL_VALUE = TailValuePolicy()
PLACE = PlacePolicy()
MARGINAL = MarginalPolicy()
