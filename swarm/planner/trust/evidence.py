"""What one client has seen of one peer itself: work done, times measured, failures, audits.

Owns the record of the facts and how each event changes it. Draws no conclusion (`belief`), and knows neither clocks nor
files: times are handed in, as seconds since the epoch, for the evidence outlives a process.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from swarm.planner.trust.policy import POLICY, TrustPolicy

Count = Annotated[int, Meta(ge=0, le=1 << 40)]
Quantity = Annotated[float, Meta(ge=0.0, le=1e12)]
Moment = Annotated[float, Meta(ge=0.0, le=1e12)]


class FailureKind(enum.StrEnum):
    """How a peer failed a session. A busy node, or one that forgot a session for a good reason, has not failed."""

    SILENT = "silent"  # the connection ended, or pings were not answered
    STALLED = "stalled"  # it answered pings and computed nothing
    SLOW = "slow"  # it was replaced because others were much quicker
    REFUSED = "refused"  # it answered with an error
    WRONG = "wrong"  # it broke the protocol


class PeerEvidence(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`block`: the block of public addresses that its record named, "" for none. `strikes`: failures since the last
    session that ended well. `ratio`: measured over advertised time of a layer, 0 if never measured; `quickest_ms`: the
    least time of a layer ever measured, 0 likewise. `layer_rows`: `rows`, each times the layers it went through."""

    block: Annotated[str, Meta(max_length=64)] = ""
    first_at: Moment = 0.0
    last_at: Moment = 0.0
    sessions: Count = 0
    rows: Quantity = 0.0
    ratio: Quantity = 0.0
    quickest_ms: Quantity = 0.0
    strikes: Count = 0
    failures: Count = 0
    failed_at: Moment = 0.0
    failure: FailureKind | None = None
    audits_passed: Count = 0
    audits_failed: Count = 0
    layer_rows: Quantity = 0.0


UNKNOWN = PeerEvidence()
MAX_PEERS = 4096  # of one file


class PeerFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a client keeps of all peers across its runs; its bounds are those of memory, too."""

    version: Annotated[int, Meta(ge=1, le=1)]
    peers: Annotated[dict[Annotated[str, Meta(min_length=1, max_length=128)], PeerEvidence], Meta(max_length=MAX_PEERS)]


MAX_FILE = 2 << 20  # bytes of one, in MessagePack


def met(evidence: PeerEvidence, now: float, block: str = "") -> PeerEvidence:
    """Something was seen of the peer at `now`."""
    first = evidence.first_at if evidence.last_at else now
    return msgspec.structs.replace(evidence, first_at=first, last_at=now, block=block or evidence.block)


def measured(
    evidence: PeerEvidence, advertised_ms: float, measured_ms: float, policy: TrustPolicy = POLICY
) -> PeerEvidence:
    """One step's time of a layer as it was measured, against what the record claimed for such a step."""
    if not advertised_ms > 0.0 or not measured_ms > 0.0:
        return evidence
    ratio = min(measured_ms / advertised_ms, policy.max_ratio)
    smoothed = policy.ratio_decay * evidence.ratio + (1.0 - policy.ratio_decay) * ratio if evidence.ratio else ratio
    quickest = min(evidence.quickest_ms or measured_ms, measured_ms)
    return msgspec.structs.replace(evidence, ratio=smoothed, quickest_ms=min(quickest, 1e12))


def finished(evidence: PeerEvidence, rows: float, layers: int = 1) -> PeerEvidence:
    """A session at the peer ended well, after so many rows, each through `layers` layers."""
    return msgspec.structs.replace(
        evidence,
        sessions=evidence.sessions + 1,
        rows=min(evidence.rows + rows, 1e12),
        layer_rows=min(evidence.layer_rows + rows * layers, 1e12),
        strikes=0,
    )


def failed(evidence: PeerEvidence, kind: FailureKind, now: float) -> PeerEvidence:
    return msgspec.structs.replace(
        evidence, strikes=evidence.strikes + 1, failures=evidence.failures + 1, failed_at=now, failure=kind
    )


def audited(evidence: PeerEvidence, passed: bool, now: float) -> PeerEvidence:
    """The result of an audit that this client has checked itself."""
    if passed:
        return msgspec.structs.replace(evidence, audits_passed=evidence.audits_passed + 1)
    return msgspec.structs.replace(evidence, audits_failed=evidence.audits_failed + 1, failed_at=now)
