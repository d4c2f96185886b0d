"""Answers audits: what went in and out of this hop in one session, as digests, and some of the rows in full.

Owns the making and signing of reports, and how many a session may ask for. Keeps nothing itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from swarm.audit_messages import UNKNOWN, AuditQuery, AuditReport, row_digests, signed_part, token_digests
from swarm.codec import Buffer
from swarm.errors import ProtocolError
from swarm.messages import Step
from swarm.types import LayerSpan, ModelId
from swarm_hop.auditing.audit_log import AuditLog

MAX_QUERIES = 4  # of one session

Sign = Callable[[bytes], bytes]


class HeldRows(Protocol):
    """Output rows that are kept, as they went over the wire."""

    def rows(self, key: int, positions: Iterable[int]) -> dict[int, bytes]:
        """Those that are held, by position in ascending order."""
        ...


class AuditedSession(Protocol):
    """What a report needs of a session."""

    @property
    def id(self) -> bytes: ...
    @property
    def key(self) -> int: ...
    @property
    def span(self) -> LayerSpan: ...
    @property
    def first(self) -> bool: ...
    @property
    def tail(self) -> bool: ...


@dataclass(slots=True)
class AuditReplies:
    """One per node. `sign`: with the node's key; without one reports have no signature. `arithmetic`: see
    `AuditReport`."""

    rows: HeldRows
    arithmetic: str = ""
    sign: Sign | None = None
    digests: AuditLog = field(default_factory=AuditLog)
    _queries: Counter[int] = field(default_factory=Counter)

    def record(
        self,
        session: AuditedSession,
        step: Step,
        body: Buffer,
        output: Buffer,
        tokens: Sequence[int],
        margins: Sequence[float | None] = (),
    ) -> None:
        """What `step`, as this hop ran it, brought, and became: `output`, or on the tail the sampled `tokens`, and the
        `margins` of those that were claimed."""
        inputs = token_digests(step.tokens) if session.first else row_digests(body, step.rows)
        if session.tail:
            outputs = [UNKNOWN] * (step.rows - len(tokens)) + token_digests(tokens)
        else:
            outputs = row_digests(output, step.rows)
        self.digests.append(session.key, step, inputs, outputs, margins)

    def close(self, key: int) -> None:
        """Idempotent."""
        self.digests.close(key)
        self._queries.pop(key, None)

    def report(self, session: AuditedSession, query: AuditQuery, model: ModelId) -> tuple[AuditReport, Buffer]:
        """-> a report and its body. Raises ProtocolError for a session that has asked too often."""
        self._queries[session.key] += 1
        if self._queries[session.key] > MAX_QUERIES:
            raise ProtocolError(f"a session may be audited {MAX_QUERIES} times")
        log = self.digests.get(session.key)
        rows = self.rows.rows(session.key, query.positions)
        message = AuditReport(
            session.id,
            session.span.start,
            session.span.end,
            log.first,
            log.tokens,
            list(rows),
            self.arithmetic,
            margins=bool(log.margins),
        )
        body = b"".join((log.inputs, log.outputs, *rows.values(), log.margins))
        if self.sign is not None:
            message = msgspec.structs.replace(message, signature=self.sign(signed_part(message, body, model)))
        return message, body
