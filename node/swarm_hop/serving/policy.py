"""The numbers that tune how sessions are served: what each trades off, and its default."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionPolicy:
    detached_ttl_s: float = 5.0
    """A detached session's KV cache waits so long for a transfer: longer spares more replays, and holds memory."""
    max_unread_replies: int = 32
    """Replies per peer that wait for it to read; more are dropped."""
    opens_per_s: float = 10.0
    """Sessions that one share may open: short requests in a row against a flood of opens."""
    opens_burst: float = 64.0
    """... at once: an outline, or a gateway whose queue is released."""
    opens_debt_s: float = 10.0
    """A share so far above its rate breaks the protocol, since it does not heed refusals."""
    wrong_open_cost: float = 4.0
    """Further opens that one counts as which names another model or layers that are not here."""
    min_retry_after_s: float = 0.5
    """Clients that are refused come back no sooner than this ..."""
    max_retry_after_s: float = 30.0
    """... and no later, however rarely sessions end here."""
    session_end_decay: float = 0.8
    """EWMA weight of past intervals between the ends of sessions, which `retry_after_s` follows."""
    kv_chunk_bytes: int = 1 << 20
    """Keys and values in one reply of a KV transfer: larger has fewer round trips, and delays other frames longer."""
    kv_requests_in_flight: int = 4
    """Requests of one KV transfer that hide the round trip."""
    kv_transfer_timeout_s: float = 5.0
    """A KV transfer that takes longer is given up, and the tokens are replayed."""


@dataclass(frozen=True, slots=True)
class PrefixCachePolicy:
    retained_fraction: float = 0.25
    """Of the KV cache, at most, for ended sessions: more prefix hits against room for new sessions."""
    max_retained_per_peer: int = 16
    """Ended sessions of one client."""


@dataclass(frozen=True, slots=True)
class DrainPolicy:
    grace_s: float = 2.0
    """Short sessions may end by themselves for so long before they are sent to other nodes."""
    poll_s: float = 0.5
    """Between two looks at who else serves the layers: each reads the directory."""
