"""Whether a split between two core groups still pays, found in the steps that a node computes anyway.

What it was measured against changes: other programs come, the system throttles one kind of core. Every so often some
steps alternate between the split and one pool; if the split no longer wins, it is undone. Owns that choice; results are
the same to the last bit either way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from swarm_kernels.calibration import hetero_cores
from swarm_kernels.calibration.hetero_cores import ColumnSplitPolicy, SignTest
from swarm_kernels.device.core_groups import CoreGroups

T = TypeVar("T")

logger = logging.getLogger(__name__)

_STEPS_A_TURN = 2  # the first after a change starts threads: the second counts


class SplitWatch:
    """All calls come from the thread that computes."""

    def __init__(
        self,
        groups: CoreGroups,
        threads: int,
        policy: ColumnSplitPolicy = ColumnSplitPolicy(),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`groups` are applied; `threads` of the pool that would replace them."""
        self.groups: CoreGroups | None = groups
        self._threads = threads
        self._policy = policy
        self._clock = clock
        self._next_trial = clock() + policy.recheck_s
        self._trial: SignTest | None = None
        self._steps = 0  # of this turn
        self._split_now = True
        self._times: dict[bool, float] = {}  # of this pair: by whether it was split
        self._rows = 0  # of this pair's batches

    def run(self, rows: int, compute: Callable[[], T]) -> T:
        """What `compute` gives, a batch of `rows` rows through the same layers each time."""
        if self.groups is None or (self._trial is None and self._clock() < self._next_trial):
            return compute()
        if self._trial is None:
            self._trial = SignTest(self._policy)
            self._begin_turn(split=True)
            self._times.clear()
        begun = self._clock()
        result = compute()
        self._step_took(rows, self._clock() - begun)
        return result

    def _step_took(self, rows: int, seconds: float) -> None:
        self._steps += 1
        if self._steps < _STEPS_A_TURN:
            return
        if rows != self._rows:  # of other rows than the other half of the pair: begin a new one
            self._rows = rows
            self._times.clear()
        self._times[self._split_now] = seconds
        if len(self._times) < 2:
            self._begin_turn(split=not self._split_now)
            return
        assert self._trial is not None  # there are no turns without one
        split, pool = self._times[True], self._times[False]
        self._times.clear()
        pays = self._trial.add(split / max(pool, 1e-9))
        if pays is None:
            self._steps = 0  # the next pair begins with who came last
        else:
            self._end_trial(pays)

    def _begin_turn(self, split: bool) -> None:
        self._steps = 0
        if split != self._split_now:
            self._split_now = split
            for_torch = torch.get_num_threads()
            hetero_cores.apply(self.groups if split else None, self._threads)
            torch.set_num_threads(for_torch)

    def _end_trial(self, pays: bool) -> None:
        assert self._trial is not None
        assert self.groups is not None
        logger.info("%s", self._trial.describe(self.groups))
        self._trial = None
        self._next_trial = self._clock() + self._policy.recheck_s
        if pays:
            self._begin_turn(split=True)
        else:
            self._begin_turn(split=False)
            self.groups = None
