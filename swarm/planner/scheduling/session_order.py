"""The order of one session's steps at a node: the next is queued for a batch only after the last has run.

A node has a task a session for this; a simulation, which has no tasks, uses this instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

from swarm.planner.scheduling.batch_scheduler import Schedulable


class OrderedStep(Schedulable, Protocol):
    @property
    def stale(self) -> bool:
        """It is skipped in its turn."""
        ...


S = TypeVar("S", bound=OrderedStep)


class SessionOrder(Generic[S]):
    """What `arrive` and `ran` return goes to the node's `BatchScheduler`."""

    def __init__(self) -> None:
        self._first: dict[Hashable, S] = {}  # of each session, the step that is queued or runs
        self._behind: dict[Hashable, deque[S]] = {}

    def arrive(self, step: S) -> S | None:
        """-> `step`, unless it has to wait for another of its session."""
        first = self._first.get(step.session_key)
        if first is None or first.dropped:
            self._first[step.session_key] = step
            return step
        self._behind.setdefault(step.session_key, deque()).append(step)
        return None

    def ran(self, step: S) -> S | None:
        """`step` has run -> the session's next step."""
        key = step.session_key
        if self._first.get(key) is not step:
            return None  # it was dropped, and another has arrived since
        del self._first[key]
        behind = self._behind.get(key)
        while behind:
            following = behind.popleft()
            if not following.stale:
                self._first[key] = following
                return following
        if behind is not None:
            del self._behind[key]
        return None

    def forget(self, session_key: Hashable) -> None:
        """This session is closed."""
        self._first.pop(session_key, None)
        self._behind.pop(session_key, None)
