"""Which nodes this client leaves out for now, and until when. Pure bookkeeping: clocks are handed in."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from swarm.errors import NetworkError, NodeBusy, RemoteError
from swarm.types import NodeProfile, PeerId

REFUSAL_S = 30.0  # a node that failed at the work itself
SLOW_S = 30.0  # one that another was so much quicker than
RECOVERY_GRACE_S = 3.0  # a record published so much later than the loss is a sign of life; clocks may differ by as much
NON_PENALIZED = frozenset({"log_lost", "unknown_session"})
"""A node may forget a session for good reasons; it can be asked for another at once."""


class StragglerEvicted(NetworkError):
    """A hop became so slow that a chain without it is much quicker."""

    code = "too_slow"


@dataclass(frozen=True, slots=True)
class _Block:
    until: float  # by the client's clock, seconds
    dead_since: float | None = None  # wall clock; lifted by a record published well after it
    slow: bool = False


@dataclass(slots=True)
class PeerBlocklist:
    """Shared by all generations of a client: what one found out spares the others the same."""

    _bans: dict[PeerId, _Block] = field(default_factory=dict)

    def add(self, peer: PeerId, cause: NetworkError, now: float, wall: float) -> None:
        """`cause`: why it is left out. `now`, `wall`: the time by the client's clock and by the calendar, seconds."""
        if isinstance(cause, NodeBusy):
            self._bans[peer] = _Block(now + cause.retry_after_s)
        elif isinstance(cause, RemoteError):
            if cause.remote_code not in NON_PENALIZED:
                self._bans[peer] = _Block(now + REFUSAL_S)
        elif isinstance(cause, StragglerEvicted):
            self._bans[peer] = _Block(now + SLOW_S, slow=True)
        elif (known := self._bans.get(peer)) is None or known.dead_since is None:
            self._bans[peer] = _Block(math.inf, wall)

    def of(self, nodes: Iterable[NodeProfile], now: float, *, and_slow: bool = True) -> frozenset[PeerId]:
        """Those of `nodes` to leave out now, the slow ones only if `and_slow`. Bans that are over are forgotten."""
        banned = set()
        for node in nodes:
            ban = self._bans.get(node.peer)
            if ban is None:
                continue
            reborn = ban.dead_since is not None and node.published_at > ban.dead_since + RECOVERY_GRACE_S
            if reborn or now >= ban.until:
                del self._bans[node.peer]
            elif and_slow or not ban.slow:
                banned.add(node.peer)
        return frozenset(banned)

    def lost(self, nodes: Iterable[NodeProfile], wall: float) -> list[NodeProfile]:
        """Those of `nodes` that were lost so long ago that they may be back by now."""
        bans = ((node, self._bans.get(node.peer)) for node in nodes)
        return [n for n, ban in bans if ban and ban.dead_since is not None and wall > ban.dead_since + RECOVERY_GRACE_S]

    def unblock(self, peer: PeerId) -> None:
        self._bans.pop(peer, None)
