"""The edges of a session's chain that the client forwards itself: between hops that cannot dial each other, and beside
the ends that are at home or with trusted nodes.

Owns which edges these are, how the peers beside a hop are named to it, and what becomes of a step on the way. Sends
nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swarm.errors import ProtocolError
from swarm.messages import Step
from swarm.tap_messages import CarriedTaps
from swarm.types import PeerId
from swarm_client.home.ends import HomeEnds
from swarm_client.home.home_edges import HomeEdges
from swarm_client.home.loopback import HomeLink
from swarm_client.home.trusted_ends import TrustedEnds
from swarm_client.network.session_demux import ReceivedMessage


@dataclass(slots=True)
class EdgeRelay:
    """Of one session. `ends`: the hops at home or the trusted nodes, if there are any. `dtype`: that the nodes compute
    in."""

    ends: HomeEnds | TrustedEnds | None
    dtype: str
    _edges: HomeEdges | None = field(init=False)
    _relayed: set[PeerId] = field(default_factory=set)  # hops whose output the client forwards

    def __post_init__(self) -> None:
        ends = self.ends
        self._edges = HomeEdges(ends.hidden_size, self.dtype) if ends is not None else None

    @property
    def links(self) -> Mapping[PeerId, HomeLink]:
        """To the hops at home."""
        return self.ends.links if self.ends is not None else {}

    def opened(self, peer: PeerId, *, relays: bool) -> None:
        """A hop is ready, and leaves its next edge to the client or not."""
        (self._relayed.add if relays else self._relayed.discard)(peer)

    def sent(self, peers: Sequence[PeerId], step: Step) -> None:
        """The client has sent a step to the first hop of the chain `peers`."""
        if self._edges is not None and self._held(peers):
            self._edges.sent(step)

    def repaired(self, replayed: int) -> None:
        """The chain was repaired; a new last hop is sent so many tokens' rows again."""
        if self._edges is not None:
            self._edges.replayed = replayed

    def _held(self, peers: Sequence[PeerId]) -> bool:
        return self.ends is not None and self.ends.hold(peers)

    def beside(self, peers: Sequence[PeerId], index: int) -> tuple[PeerId, PeerId]:
        """How the peers before and after a hop are named to it: "" is the client, who gives ids and gets tokens. To
        strangers a hop at home, or a trusted one at the end, is this peer, and to those every other one is: it forwards
        for it."""
        named = ("", *peers, "")
        before, after = named[index], named[index + 2]
        if self.ends is None or not self._held(peers):
            return before, after
        ends, client = (peers[0], peers[-1]), self.ends.client
        own = peers[index] in ends
        return client if before and (own or before in ends) else before, client if after and (
            own or after in ends
        ) else after

    def onward(
        self, peers: Sequence[PeerId], incoming: ReceivedMessage, step: Step | CarriedTaps
    ) -> tuple[PeerId, Step | CarriedTaps] | None:
        """To whom a step, or what it carries, goes that came here to be forwarded along the chain `peers`, and what it
        becomes; None: nobody waits for it. Raises ProtocolError."""
        at = peers.index(incoming.peer) + 1
        if incoming.peer not in self._relayed or at == len(peers):
            raise ProtocolError(f"node {incoming.peer} answered out of turn")
        after, onward = peers[at], step
        if self._edges is None or not self._held(peers):
            return after, onward
        if isinstance(step, CarriedTaps):
            raise ProtocolError(f"node {incoming.peer} sent hidden states that nobody asked for")
        if incoming.peer == peers[0]:
            onward = self._edges.leaving(step)
        elif after == peers[-1]:
            own = self._edges.returning(step, incoming.body)
            if own is None:
                return None
            onward = own
        return after, onward
