"""Which waiting steps make the next batch.

Decoding goes before prefill, first come first served within each; a batch takes steps of one part `[start, end)` of the
span until its token budget is full. A prefill that was passed over too often goes first, so a busy node starves nobody.
Pure bookkeeping: knows neither tensors nor threads.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from swarm.types import LayerSpan

PATIENCE = 4  # batches that may pass over the oldest prefill


class Schedulable(Protocol):
    @property
    def rows(self) -> int: ...

    @property
    def span(self) -> LayerSpan: ...

    @property
    def prefill(self) -> bool: ...

    @property
    def dropped(self) -> bool:
        """Nobody waits for it any more."""
        ...


W = TypeVar("W", bound=Schedulable)


class StepQueue(Generic[W]):
    """At most one step of a session waits here at a time: a session sends its next one after the last came back."""

    def __init__(self, batch_tokens: int) -> None:
        self._budget = batch_tokens
        self._decode: deque[W] = deque()
        self._prefill: deque[W] = deque()
        self._passed_over = 0

    def __len__(self) -> int:
        return len(self._decode) + len(self._prefill)

    def __iter__(self) -> Iterator[W]:
        """What waits, decoding first."""
        return itertools.chain(self._decode, self._prefill)

    @property
    def rows(self) -> int:
        """Rows that wait."""
        return sum(w.rows for w in (*self._decode, *self._prefill))

    def push(self, work: W) -> None:
        (self._prefill if work.prefill else self._decode).append(work)

    def take(self) -> list[W]:
        """Remove and return the next batch; empty when nothing waits.

        The first step is taken whatever its size, for a step is never split.
        """
        self._forget_dropped()
        if self._prefill and self._passed_over >= PATIENCE:
            order: tuple[deque[W], deque[W]] = (self._prefill, self._decode)
        else:
            order = (self._decode, self._prefill)
        batch: list[W] = []
        left = self._budget
        for queue in order:
            left = _fill(batch, queue, left)
        waits = bool(self._prefill) and not any(w.prefill for w in batch)
        self._passed_over = self._passed_over + 1 if waits else 0
        return batch

    def _forget_dropped(self) -> None:
        for queue in (self._decode, self._prefill):
            if any(w.dropped for w in queue):
                _replace(queue, [w for w in queue if not w.dropped])


def _fill(batch: list[W], queue: deque[W], left: int) -> int:
    """Move steps from `queue` into `batch` in order until one does not fit; steps of other spans are left behind."""
    kept: list[W] = []
    while queue:
        work = queue[0]
        if batch and work.span != batch[0].span:
            kept.append(queue.popleft())
        elif not batch or work.rows <= left:
            batch.append(queue.popleft())
            left -= work.rows
        else:
            break
    queue.extendleft(reversed(kept))
    return left


def _replace(queue: deque[W], items: Iterable[W]) -> None:
    items = list(items)
    queue.clear()
    queue.extend(items)
