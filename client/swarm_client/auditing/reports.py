"""The reports of a session's hops as what the verdict compares, and as evidence for others.

Owns the check of a report's form and signature. Draws no conclusion.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from swarm.audit_messages import DIGEST_BYTES, MARGIN_BYTES, AuditReport, margins_from_wire, signed_part, token_digests
from swarm.errors import ProtocolError
from swarm.net.security import identity
from swarm.planner.auditing.verdict import HopReport
from swarm.types import Hop, ModelId, PeerId
from swarm_client.network.session_demux import ReceivedMessage


@dataclass(frozen=True, slots=True)
class SignedReport:
    """What one hop said, by which anybody can hold it to it."""

    peer: PeerId
    message: AuditReport
    body: bytes

    def signed_for(self, model: ModelId) -> bool:
        """Whether its peer signed it, for this model."""
        return identity.verify(self.peer, signed_part(self.message, self.body, model), self.message.signature)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Of a finding: the text, and what the hops of each chain signed about it. A third party that holds the layers
    replays `tokens` and comes to its own verdict (`planner.auditing.verdict`) on `reports`; it need not believe the
    client that collected it. What a tail sampled depends on options that the hops did not sign: only
    rows are evidence."""

    model: ModelId
    tokens: tuple[int, ...]
    chains: tuple[tuple[SignedReport, ...], ...]

    def signed(self) -> bool:
        """Whether every report has the signature of its peer."""
        return all(report.signed_for(self.model) for chain in self.chains for report in chain)

    def reports(self, chain: int, row_bytes: Callable[[int], int]) -> list[HopReport]:
        """Of all hops of one of the chains. `row_bytes`: of a row after a layer. Raises ProtocolError."""
        return [hop_report(report, row_bytes(report.message.end), self.tokens) for report in self.chains[chain]]


def signed_report(hop: Hop, reply: ReceivedMessage, positions: Collection[int]) -> SignedReport:
    """Raises ProtocolError for a report of other layers than the hop's, or of rows that nobody asked for."""
    message = reply.message
    assert isinstance(message, AuditReport)  # as `InferenceSession.audit` promises
    if (message.start, message.end) != (hop.start, hop.end):
        raise ProtocolError(f"{hop.peer} reports on layers {message.start}:{message.end}, not {hop.start}:{hop.end}")
    if not set(message.positions).issubset(positions) or len(set(message.positions)) < len(message.positions):
        raise ProtocolError(f"{hop.peer} reports other rows than were asked for")
    return SignedReport(hop.peer, message, bytes(reply.body))


def hop_report(report: SignedReport, row_bytes: int, text: Sequence[int]) -> HopReport:
    """`row_bytes`: of a row that the hop sends. `text`: the audited one; a tail that samples its next token too finds
    a margin of 0, whatever it says. Raises ProtocolError."""
    message, body = report.message, report.body
    known = (message.tokens - message.first) * DIGEST_BYTES
    rows = 2 * known + len(message.positions) * row_bytes
    margins = known // DIGEST_BYTES * MARGIN_BYTES if message.margins else 0
    if known < 0 or len(body) != rows + margins:
        raise ProtocolError(f"{report.peer} reports {message.tokens} tokens in {len(body)} bytes")
    at = range(2 * known, rows, row_bytes)
    following, outputs = token_digests(text[message.first + 1 : message.tokens + 1]), body[known : 2 * known]
    margins_of = {message.first + i: m for i, m in enumerate(margins_from_wire(body[rows:])) if m is not None}
    own = (outputs[i : i + DIGEST_BYTES] for i in range(0, known, DIGEST_BYTES))
    agreed = [message.first + i for i, pair in enumerate(zip(own, following, strict=False)) if pair[0] == pair[1]]
    margins_of |= {position: 0.0 for position in agreed if position in margins_of}
    return HopReport(
        report.peer,
        message.start,
        message.end,
        message.first,
        body[:known],
        body[known : 2 * known],
        {position: body[i : i + row_bytes] for position, i in zip(message.positions, at, strict=True)},
        message.arithmetic,
        margins_of,
    )
