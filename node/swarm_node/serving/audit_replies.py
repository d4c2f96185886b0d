"""Answers audits: what went in and out of this hop in one session, as digests, and some of the rows in full.

Owns the making and signing of reports, and how many a session may ask for. Keeps nothing itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from swarm.audit_messages import AuditQuery, AuditReport, signed_part
from swarm.codec import Buffer
from swarm.errors import ProtocolError
from swarm.messages import Step
from swarm.row_digest import UNKNOWN, row_digests, token_digests
from swarm.types import ModelId
from swarm_node.serving.activation_log import ActivationLog
from swarm_node.serving.audit_log import AuditLog
from swarm_node.serving.executor import StepOutput
from swarm_node.serving.session import HopSession

MAX_QUERIES = 4  # of one session

Sign = Callable[[bytes], bytes]


@dataclass(slots=True)
class AuditReplies:
    """One per node. `sign`: with the node's key; without one reports have no signature. `arithmetic`: see
    `AuditReport`."""

    rows: ActivationLog
    arithmetic: str = ""
    sign: Sign | None = None
    digests: AuditLog = field(default_factory=AuditLog)
    _queries: Counter[int] = field(default_factory=Counter)

    def record(self, session: HopSession, step: Step, body: Buffer, output: StepOutput) -> None:
        """What `step`, as this hop ran it, brought and became."""
        inputs = token_digests(step.tokens) if session.first else row_digests(body, step.rows)
        if session.tail:
            outputs = [UNKNOWN] * (step.rows - len(output.tokens)) + token_digests(output.tokens)
        else:
            outputs = row_digests(output.body, step.rows)
        self.digests.append(session.key, step, inputs, outputs)

    def close(self, key: int) -> None:
        """Idempotent."""
        self.digests.close(key)
        self._queries.pop(key, None)

    def report(self, session: HopSession, query: AuditQuery, model: ModelId) -> tuple[AuditReport, Buffer]:
        """-> a report and its body. Raises ProtocolError for a session that has asked too often."""
        self._queries[session.key] += 1
        if self._queries[session.key] > MAX_QUERIES:
            raise ProtocolError(f"a session may be audited {MAX_QUERIES} times")
        log = self.digests.get(session.key)
        rows = self.rows.rows(session.key, query.positions)
        message = AuditReport(
            session.id, session.span.start, session.span.end, log.first, log.tokens, list(rows), self.arithmetic
        )
        body = b"".join((log.inputs, log.outputs, *rows.values()))
        if self.sign is not None:
            message = msgspec.structs.replace(message, signature=self.sign(signed_part(message, body, model)))
        return message, body
