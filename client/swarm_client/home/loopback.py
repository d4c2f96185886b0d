"""A link to a hop in this process: a session sends its messages on it as on any other, and nothing leaves the machine.

Owns the two ends of such a link, and what a hop at home has instead of a connection pool. Knows neither layers nor
sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarm.codec import Buffer
from swarm.config import Limits
from swarm.errors import PeerUnreachable
from swarm.messages import AnyMessage
from swarm.net.pool.violations import ProtocolViolations
from swarm.types import PeerId
from swarm_client.network.session_demux import SessionDemux

if TYPE_CHECKING:  # a client without layers at home serves no session
    from swarm_hop.serving.session import PeerChannel
    from swarm_hop.serving.session_server import SessionServer


@dataclass(frozen=True, slots=True, eq=False)
class HomeLink:
    """The client's end; what it sends is handed to the hop at once. `peer`: the hop's name in chains."""

    peer: PeerId
    _server: SessionServer
    _client: PeerChannel

    async def send(self, message: AnyMessage, body: Buffer = b"") -> None:
        """Raises ProtocolError for a message that a hop does not expect, which would be a bug."""
        await self._server.on_frame(self._client, message, body)


@dataclass(frozen=True, slots=True, eq=False)
class HomeChannel:
    """The hop's end. `peer`: the client, which receives from `hop` what is sent here."""

    peer: PeerId
    hop: PeerId
    _demux: SessionDemux
    remote: str = ""

    async def send(self, message: AnyMessage, body: Buffer = b"") -> None:
        self._demux.receive(self.hop, message, bytes(body))  # a copy: the next batch may reuse its memory


class NoLinks:
    """The links of a hop at home: the client forwards what it sends, so it dials nobody. See `serving.links.Links`."""

    def __init__(self, limits: Limits) -> None:
        self.violations = ProtocolViolations(limits.max_protocol_errors)

    def unasked(self, peer: PeerId, what: str) -> None:
        """Frames of one's own client are races and no flood."""

    def has_dialled(self, peer: PeerId) -> bool:
        return False

    async def get(self, peer: PeerId, addresses: Sequence[str] = (), timeout_s: float | None = None) -> PeerChannel:
        raise PeerUnreachable("a hop at home leaves its edges to the client")
