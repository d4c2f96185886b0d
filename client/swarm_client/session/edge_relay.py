"""The edges of a session's chain that the client forwards itself: between hops that cannot dial each other, and beside
the hops at home.

Owns which edges these are, how the peers beside a hop are named to it, and what becomes of a step on the way. Sends
nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swarm.errors import ProtocolError
from swarm.messages import Step
from swarm.types import PeerId
from swarm_client.home.ends import HomeEnds
from swarm_client.home.home_edges import HomeEdges
from swarm_client.home.local_layers import FIRST, LAST, is_home
from swarm_client.home.loopback import HomeLink
from swarm_client.network.session_demux import ReceivedMessage


@dataclass(slots=True)
class EdgeRelay:
    """Of one session. `home`: the hops at home, if there are any."""

    home: HomeEnds | None
    _edges: HomeEdges | None = field(init=False)
    _relayed: set[PeerId] = field(default_factory=set)  # hops whose output the client forwards

    def __post_init__(self) -> None:
        home = self.home
        self._edges = HomeEdges(home.hidden_size, home.state_dtype) if home is not None else None

    @property
    def links(self) -> Mapping[PeerId, HomeLink]:
        """To the hops at home."""
        return self.home.links if self.home is not None else {}

    def opened(self, peer: PeerId, *, relays: bool) -> None:
        """A hop is ready, and leaves its next edge to the client or not."""
        (self._relayed.add if relays else self._relayed.discard)(peer)

    def sent(self, step: Step) -> None:
        """The client has sent a step to the first hop."""
        if self._edges is not None:
            self._edges.sent(step)

    def beside(self, peers: Sequence[PeerId], index: int) -> tuple[PeerId, PeerId]:
        """How the peers before and after a hop are named to it: "" is the client, who gives ids and gets tokens. To
        the hops of others a hop at home is this peer, and to a hop at home every other one is: it forwards for it."""
        named = ("", *peers, "")
        before, after = named[index], named[index + 2]
        home = self.home
        if home is None:
            return before, after
        at_home = is_home(peers[index])
        before, after = (home.client if peer and (at_home or is_home(peer)) else peer for peer in (before, after))
        return before, after

    def onward(self, peers: Sequence[PeerId], incoming: ReceivedMessage, step: Step) -> tuple[PeerId, Step] | None:
        """To whom a step goes that came here to be forwarded along the chain `peers`, and what it becomes; None:
        nobody waits for it. Raises ProtocolError."""
        at = peers.index(incoming.peer) + 1
        if incoming.peer not in self._relayed or at == len(peers):
            raise ProtocolError(f"node {incoming.peer} answered out of turn")
        after, onward = peers[at], step
        if self._edges is not None and incoming.peer == FIRST:
            onward = self._edges.leaving(step)
        elif self._edges is not None and after == LAST:
            own = self._edges.returning(step, incoming.body)
            if own is None:
                return None
            onward = own
        return after, onward
