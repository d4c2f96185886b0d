"""Whether a session is admitted: the right model, a span that is loaded, a rate that is kept, room that is there.

Owns the order of these checks, cheapest first, and how room is made when there is none. What a session does once it is
admitted, and how it ends, is the session server's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from swarm.config import Limits
from swarm.errors import NodeBusy, ProtocolError, SwarmError, WrongModel
from swarm.messages import OpenSession
from swarm.planner.scheduling.fair_shares import Share
from swarm.types import ModelId, PeerId
from swarm_hop.serving.quotas import Quotas
from swarm_hop.serving.served_spans import ServedSpan, ServedSpans
from swarm_hop.serving.session import HopSession, PeerChannel
from swarm_hop.sharing.reclaim import Holding, Reclaimed, newcomer_tokens, reclaim_slot, reclaim_tokens
from swarm_hop.sharing.shares import SharePlaces


class AdmissionControl:
    """One per node. `open_sessions()`: those that are not detached; `end(session, why)`: ends one for others' sake.
    `clock`: seconds, as of `HopSession.active_s`."""

    def __init__(
        self,
        served: ModelId,
        spans: ServedSpans,
        quotas: Quotas,
        places: SharePlaces,
        limits: Limits,
        open_sessions: Callable[[], Iterable[HopSession]],
        end: Callable[[HopSession, SwarmError], None],
        clock: Callable[[], float],
    ) -> None:
        self.refusal: Callable[[], SwarmError] | None = None  # of all new sessions; None: they are admitted
        self._served = served
        self._spans = spans
        self._quotas = quotas
        self._places = places
        self._limits = limits
        self._open_sessions = open_sessions
        self._end = end
        self._clock = clock

    def admit(self, client: PeerChannel, message: OpenSession, key: int) -> tuple[HopSession, ServedSpan, int]:
        """Reserve what a session needs. -> it, its span, and the session whose first tokens it shares, -1 if none.

        Raises SwarmError: NodeBusy above the rate of its share, ProtocolError far above it.
        """
        share = self._places.of(client.peer, client.remote)
        self._quotas.take_open(share)
        try:
            served_span = self._find(message, client.peer)
        except SwarmError:
            self._quotas.take_wrong_open(share)
            raise
        session = HopSession.of(message, client, key, served_span.engine.rows, share)
        session.active_s = self._clock()
        if self._quotas.sessions >= self._limits.max_sessions:
            self._free_slot(share, list(self._open_sessions()), self._limits.max_sessions)
        held, most = self._held(served_span), served_span.engine.session_capacity
        if len(held) >= most:
            self._free_slot(share, held, most)
        self._quotas.take_session(client.peer)
        try:
            parent = served_span.admit(
                session,
                message.block_hashes,
                self._quotas.retry_after_s,
                lambda: self.make_room(served_span, share, message.max_tokens),
            )
        except SwarmError:
            self._quotas.give_session(client.peer)
            raise
        session.reserved = message.max_tokens
        return session, served_span, parent

    def make_room(self, served_span: ServedSpan, share: Share, tokens: int) -> bool:
        """Take back what others hold beyond their part, for `tokens` more of `share`. Whether that was enough."""
        held = self._held(served_span)
        found = reclaim_tokens(_holdings(held, self._clock()), share, tokens, served_span.engine.capacity_tokens)
        if found is None:
            return False
        self._apply(found, served_span, held)
        return True

    def newcomer_tokens(self, served_span: ServedSpan, free: int) -> int:
        """What our record should say is free, so that a node whose memory one client holds is not passed over."""
        held = _holdings(self._held(served_span), self._clock())
        return newcomer_tokens(held, free, served_span.engine.capacity_tokens)

    def _find(self, message: OpenSession, client: PeerId) -> ServedSpan:
        """The loaded span that can serve the request of `client`, who may hold what follows the last layer itself.

        Raises SwarmError."""
        served = self._served
        if message.model != served.model:
            raise WrongModel(f"this node serves {served.model}, not {message.model}")
        if message.weight_hash != served.weight_hash:
            raise WrongModel(f"this node's weights of {served.model} hash to {served.weight_hash}")
        if message.dtype != served.dtype:
            raise WrongModel(f"this node computes in {served.dtype}, not in {message.dtype}")
        if self.refusal is not None:
            raise self.refusal()
        served_span = self._spans.find(message.start, message.end)
        at_end, after = message.end == served_span.engine.rows.num_layers, message.downstream
        if (not after and not at_end) or (after and at_end and after != client):
            raise ProtocolError("a hop has a next one unless it holds the last layer")
        return served_span

    def _free_slot(self, share: Share, sessions: Sequence[HopSession], most: int) -> None:
        """Make room for one more where `most` are the most, if `share` holds less than an equal part."""
        key = reclaim_slot(_holdings(sessions, self._clock()), share, most)
        for session in sessions:
            if session.key == key:
                self._end(session, _others_need_it("sessions"))

    def _held(self, served_span: ServedSpan) -> list[HopSession]:
        return [session for session in self._open_sessions() if session.key in served_span.keys]

    def _apply(self, found: Reclaimed, served_span: ServedSpan, held: Sequence[HopSession]) -> None:
        for session in held:
            if session.key in found.shrink:
                session.reserved = found.shrink[session.key]
                served_span.engine.shrink(session.key, session.reserved)
            elif session.key in found.end:
                self._end(session, _others_need_it("KV memory"))


def _holdings(sessions: Iterable[HopSession], now: float) -> list[Holding]:
    return [Holding(s.key, s.share, now - s.active_s, max(s.reserved, s.committed), s.committed) for s in sessions]


def _others_need_it(what: str) -> NodeBusy:
    return NodeBusy(f"others wait for {what} here, of which you hold more than an equal part; go on elsewhere")
