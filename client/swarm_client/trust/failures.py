"""Why a client gives up a hop, as errors, and which kind of failure each is evidence of.

Owns the causes that a client finds itself; those that a peer reports come as `RemoteError`.
"""

from __future__ import annotations

from swarm.errors import ConnectionLost, NetworkError, NodeBusy, ProtocolError, RemoteError
from swarm.planner.trust.evidence import FailureKind

NON_PENALIZED = frozenset({"log_lost", "unknown_session"})
"""Error codes of a node that forgot a session for good reasons; it can serve another at once."""


class StragglerEvicted(NetworkError):
    """A hop was evicted because it became so slow that a chain without it is much quicker."""

    code = "too_slow"


class HopStalled(StragglerEvicted):
    """Steps came to a hop that answers pings, and no further."""

    code = "stalled"


class AuditFailed(NetworkError):
    """A hop's results were not those that its layers give, or it contradicted what it had sent."""

    code = "audit_failed"


class ReportedLost(ConnectionLost):
    """Another hop says that it cannot reach this one: no evidence of our own."""


def failure_kind(cause: NetworkError) -> FailureKind | None:
    """None for what says nothing about the peer: it is busy, forgot a session for a good reason, or another accuses
    it."""
    if isinstance(cause, NodeBusy | ReportedLost):
        return None
    if isinstance(cause, RemoteError):
        return None if cause.remote_code in NON_PENALIZED else FailureKind.REFUSED
    if isinstance(cause, HopStalled):
        return FailureKind.STALLED
    if isinstance(cause, StragglerEvicted):
        return FailureKind.SLOW
    return FailureKind.WRONG if isinstance(cause, ProtocolError | AuditFailed) else FailureKind.SILENT
