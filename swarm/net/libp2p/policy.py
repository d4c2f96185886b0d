"""Numbers that tune the libp2p hosts. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostPolicy:
    """What both hosts have in common: how they start and restart."""

    start_timeout_s: float = 30.0  # joining a swarm whose first peers do not answer takes long
    stop_timeout_s: float = 5.0  # for a clean end, before the process is killed or the thread left alone
    restart_backoff_s: tuple[float, ...] = (0.0, 0.5, 2.0)  # before each try to restart a dead host


@dataclass(frozen=True, slots=True)
class GoDaemonPolicy(HostPolicy):
    """The Go daemon: health checks, crash loops and what a relay lends to others."""

    stop_timeout_s: float = 2.0
    restart_timeout_s: float = 5.0  # for one try
    health_interval_s: float = 0.4  # between health checks: fast detection of a frozen daemon against load
    health_timeout_s: float = 0.75  # two in a row mean that the daemon is frozen: false alarms against fast detection
    max_crashes: int = 5  # within `crash_window_s`: a crash loop that restarting does not cure
    crash_window_s: float = 60.0
    # hivemind's daemon starts two relays, one with these limits and one with libp2p's own (128 kB, 2 minutes); the
    # later of them answers. On several threads that is often the wrong one, on one thread the right one.
    relay_data_limit: int = 1 << 30  # bytes each way of one relayed connection
    relay_time_limit: str = "30m"  # of one relayed connection
    relay_max_circuits: int = 16  # relayed connections of one peer
    relay_max_reservations: int = 64  # peers that the relay serves


@dataclass(frozen=True, slots=True)
class PyHostPolicy(HostPolicy):
    """py-libp2p in a thread."""

    max_restarts: int = 8  # in all: more is a crash loop that restarting does not cure
    dial_timeout_s: float = 10.0  # for a DHT lookup, a connection or a stream
    half_close_timeout_s: float = 5.0  # for the other direction of a stream, when one has ended
    disconnect_timeout_s: float = 3.0  # for all connections at the end; each takes 0.2 s
    copy_buffer: int = 64 << 10  # bytes copied at once between a stream and its socket
    max_concurrent_calls: int = 64  # remote calls answered at once: memory against a burst of DHT requests
    call_timeout_s: float = 10.0  # for a request to arrive whole, and for its reply to be read
