"""Blocklist: which nodes this client routes around for now, and until when. Pure: clocks are handed in."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from swarm.errors import NetworkError, NodeBusy, RemoteError
from swarm.types import NodeProfile, PeerId
from swarm_client.trust.failures import NON_PENALIZED, AuditFailed, StragglerEvicted


@dataclass(frozen=True, slots=True)
class BlocklistPolicy:
    """Longer blocks avoid more failures; shorter ones use more of the swarm."""

    refusal_s: float = 30.0  # a node that failed at the work itself
    slow_s: float = 30.0  # a straggler that was evicted
    cheat_s: float = 24 * 3600.0  # a hop that failed an audit
    recovery_grace_s: float = 3.0  # a record published so much after the loss proves recovery; bounds clock skew


@dataclass(frozen=True, slots=True)
class _Block:
    until: float  # by the client's clock, seconds
    dead_since: float | None = None  # wall clock; lifted by a record published well after it
    slow: bool = False


@dataclass(slots=True)
class PeerBlocklist:
    """Shared by all generations of a client: each profits from the failures that the others met."""

    policy: BlocklistPolicy = BlocklistPolicy()
    _blocks: dict[PeerId, _Block] = field(default_factory=dict)

    def add(self, peer: PeerId, cause: NetworkError, now: float, wall: float) -> None:
        """`cause`: why it is blocked. `now`, `wall`: the time by the client's clock and by the calendar, seconds."""
        if isinstance(cause, NodeBusy):
            self._blocks[peer] = _Block(now + cause.retry_after_s)
        elif isinstance(cause, RemoteError):
            if cause.remote_code not in NON_PENALIZED:
                self._blocks[peer] = _Block(now + self.policy.refusal_s)
        elif isinstance(cause, StragglerEvicted):
            self._blocks[peer] = _Block(now + self.policy.slow_s, slow=True)
        elif isinstance(cause, AuditFailed):
            self._blocks[peer] = _Block(now + self.policy.cheat_s)
        elif (known := self._blocks.get(peer)) is None or known.dead_since is None:
            self._blocks[peer] = _Block(math.inf, wall)

    def of(self, nodes: Iterable[NodeProfile], now: float, *, and_slow: bool = True) -> frozenset[PeerId]:
        """Those of `nodes` that are blocked now, stragglers only if `and_slow`. Expired blocks are dropped."""
        blocked = set()
        grace_s = self.policy.recovery_grace_s
        for node in nodes:
            block = self._blocks.get(node.peer)
            if block is None:
                continue
            recovered = block.dead_since is not None and node.published_at > block.dead_since + grace_s
            if recovered or now >= block.until:
                del self._blocks[node.peer]
            elif and_slow or not block.slow:
                blocked.add(node.peer)
        return frozenset(blocked)

    def lost(self, nodes: Iterable[NodeProfile], wall: float) -> list[NodeProfile]:
        """Those of `nodes` that were lost so long ago that they may be back by now."""
        grace_s = self.policy.recovery_grace_s
        blocks = ((node, self._blocks.get(node.peer)) for node in nodes)
        return [n for n, b in blocks if b and b.dead_since is not None and wall > b.dead_since + grace_s]

    def unblock(self, peer: PeerId) -> None:
        self._blocks.pop(peer, None)
