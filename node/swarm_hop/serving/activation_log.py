"""The outputs of a hop, kept so that they can be replayed to a replacement of the next hop.

Owns the rows and the memory they take, under one cap for all sessions of the node. Uses neither peers nor tensors: a
row is the raw bytes that went over the wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from swarm.codec import Buffer
from swarm.errors import ActivationLogEvicted
from swarm.messages import Step

REPLAY_ROWS = 256  # rows of one replayed step


@dataclass(slots=True)
class _Log:
    """`rows`: one item a committed token. `tree`: slot -> row, for tree rows that may yet be committed."""

    rows: list[bytes] = field(default_factory=list)
    tree: dict[int, bytes] = field(default_factory=dict)
    size: int = 0


class ActivationLog:
    """One per node. Over the cap the longest log is evicted, so that a long session does not cost the others theirs."""

    def __init__(self, cap_bytes: int) -> None:
        self._cap = cap_bytes
        self._logs: dict[int, _Log] = {}
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes held."""
        return self._size

    def open(self, key: int) -> None:
        self._logs[key] = _Log()

    def fork(self, parent: int, key: int, length: int) -> None:
        """Start `key` with the rows of the first `length` tokens of `parent`; without them if the parent's are gone."""
        source = self._logs.get(parent)
        if source is None or len(source.rows) < length:
            return
        rows = source.rows[:length]
        self._logs[key] = _Log(rows, size=sum(map(len, rows)))
        self._size += self._logs[key].size
        self._drop_longest()

    def close(self, key: int) -> None:
        """Idempotent."""
        log = self._logs.pop(key, None)
        if log is not None:
            self._size -= log.size

    def append(self, key: int, step: Step, body: Buffer) -> None:
        """Record that `step`, as this hop ran it, became `body`. A log that was evicted stays so."""
        log = self._logs.get(key)
        if log is None:
            return
        view = memoryview(body)
        row_bytes = len(view) // step.rows
        rows = [bytes(view[at : at + row_bytes]) for at in range(0, len(view), row_bytes)]
        before = log.size
        log.rows.extend(log.tree.pop(slot) for slot in step.commit_slots)
        if step.causal_rows:  # causal rows end every branch that is not committed by now
            self._drop_tree(log)
        log.rows.extend(rows[: step.causal_rows])
        log.size += len(view)
        for slot, row in zip(step.slots, rows[step.causal_rows :], strict=True):
            log.size -= len(log.tree.pop(slot, b""))
            log.tree[slot] = row
        self._size += log.size - before
        self._drop_longest()

    def rollback(self, key: int, length: int) -> None:
        """Drop the rows of the committed tokens from `length` on, and those of the tree."""
        log = self._logs.get(key)
        if log is not None:
            before = log.size
            self._drop_tree(log)
            log.size -= sum(map(len, log.rows[length:]))
            del log.rows[length:]
            self._size += log.size - before

    def replay(self, key: int, count: int) -> Iterator[tuple[int, int, bytes]]:
        """The rows of the first `count` committed tokens as (first position, rows, body).

        Complete even if the log is evicted meanwhile. Raises ActivationLogEvicted at once.
        """
        log = self._logs.get(key)
        if log is None or len(log.rows) < count:
            raise ActivationLogEvicted("the activation log of this session was evicted for lack of memory")
        return _chunks(log.rows[:count])

    def rows(self, key: int, positions: Iterable[int]) -> dict[int, bytes]:
        """The rows of those committed tokens that are held, by position in ascending order."""
        log = self._logs.get(key)
        held = log.rows if log is not None else []
        return {position: held[position] for position in sorted(set(positions)) if position < len(held)}

    def _drop_longest(self) -> None:
        while self._size > self._cap:
            self.close(max(self._logs, key=lambda k: self._logs[k].size))

    @staticmethod
    def _drop_tree(log: _Log) -> None:
        log.size -= sum(map(len, log.tree.values()))
        log.tree.clear()


def _chunks(rows: list[bytes]) -> Iterator[tuple[int, int, bytes]]:
    for start in range(0, len(rows), REPLAY_ROWS):
        part = rows[start : start + REPLAY_ROWS]
        yield start, len(part), b"".join(part)
