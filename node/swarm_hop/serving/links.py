"""What serving needs of this node's connections, as `net.pool` keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from swarm.net.pool.violations import ProtocolViolations
from swarm.types import PeerId
from swarm_hop.serving.session import PeerChannel


class LinkSource(Protocol):
    """Links to other peers."""

    def has_dialled(self, peer: PeerId) -> bool:
        """Whether `get` returns at once."""
        ...

    async def get(self, peer: PeerId, addresses: Sequence[str] = (), timeout_s: float | None = None) -> PeerChannel:
        """Raises PeerUnreachable, after `timeout_s` at the latest."""
        ...


class Links(LinkSource, Protocol):
    """... and the books on what peers do."""

    violations: ProtocolViolations

    def unasked(self, peer: PeerId, what: str) -> None:
        """Charge a peer for a frame that nobody asked for. Raises ProtocolError once no race explains it any more."""
        ...
