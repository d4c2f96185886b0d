"""Digests of every row that went in and out of this hop, kept as long as the session's keys and values.

Owns the digests, 32 bytes a token. The rows themselves are the activation log's; reports are made by `audit_replies`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from swarm.audit_messages import DIGEST_BYTES, MARGIN_BYTES, UNKNOWN, margins_to_wire
from swarm.messages import Step


@dataclass(slots=True)
class RowDigests:
    """Of the committed rows from position `first` on. `tree`: slot -> (input, output) of a row that may yet be.

    `margins`: of the claimed tokens after these rows, on the tail of a replay (`audit_messages.AuditReport`)."""

    first: int = 0
    inputs: bytearray = field(default_factory=bytearray)
    outputs: bytearray = field(default_factory=bytearray)
    tree: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    margins: bytearray = field(default_factory=bytearray)

    @property
    def tokens(self) -> int:
        """Where the committed rows end."""
        return self.first + len(self.inputs) // DIGEST_BYTES

    def cut(self, length: int) -> None:
        """Drop the committed rows from position `length` on, and the tree."""
        self.tree.clear()
        kept = max(0, length - self.first) * DIGEST_BYTES
        del self.inputs[kept:], self.outputs[kept:], self.margins[kept // DIGEST_BYTES * MARGIN_BYTES :]
        self.first = min(self.first, length)


class AuditLog:
    """One per node."""

    def __init__(self) -> None:
        self._sessions: dict[int, RowDigests] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, key: int, first: int = 0) -> None:
        """Start `key`, which holds keys and values of `first` tokens that were not computed for it."""
        self._sessions[key] = RowDigests(first)

    def fork(self, parent: int, key: int, length: int) -> None:
        """Start `key` with what is known of the first `length` tokens of `parent`."""
        source = self._sessions.get(parent)
        if source is None or source.tokens < length:
            self.open(key, length)
            return
        kept = max(0, length - source.first) * DIGEST_BYTES
        first = min(source.first, length)
        self._sessions[key] = RowDigests(first, source.inputs[:kept], source.outputs[:kept])

    def close(self, key: int) -> None:
        """Idempotent."""
        self._sessions.pop(key, None)

    def append(
        self,
        key: int,
        step: Step,
        inputs: Sequence[bytes],
        outputs: Sequence[bytes],
        margins: Sequence[float | None] = (),
    ) -> None:
        """Record the digests of the rows of `step`, as this hop ran it; `margins`: after its last rows."""
        log = self._sessions.get(key)
        if log is None:
            return
        for slot in step.commit_slots:
            before, after = log.tree.pop(slot, (UNKNOWN, UNKNOWN))
            log.inputs += before
            log.outputs += after
        if step.causal_rows:  # causal rows end every branch that is not committed by now
            log.tree.clear()
        if margins or log.margins:  # drafts have none
            unknown: list[float | None] = [None] * (len(log.outputs) // DIGEST_BYTES - len(log.margins) // MARGIN_BYTES)
            of_rows = [*[None] * (step.rows - len(margins)), *margins]
            log.margins += margins_to_wire([*unknown, *of_rows[: step.causal_rows]])
        log.inputs += b"".join(inputs[: step.causal_rows])
        log.outputs += b"".join(outputs[: step.causal_rows])
        rows = zip(inputs[step.causal_rows :], outputs[step.causal_rows :], strict=True)
        log.tree.update(zip(step.slots, rows, strict=True))

    def rollback(self, key: int, length: int) -> None:
        """Drop what is known of the committed tokens from `length` on, and of the tree."""
        log = self._sessions.get(key)
        if log is not None:
            log.cut(length)

    def get(self, key: int) -> RowDigests:
        """Empty for a session that is not known."""
        return self._sessions.get(key) or RowDigests()
