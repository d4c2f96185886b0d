"""What the hops of one session are asked for drafting, and what they send: taps for a drafter here, or drafts of the
tail's own.

Owns which hop is asked for what, and which drafts of the tail are taken: those that follow the text as it is known
here. What was not asked for is a protocol violation. Knows neither drafters nor the draft tree.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.codec import Buffer
from swarm.errors import ProtocolError
from swarm.planner.generation.state_machine import SendStep
from swarm.tap_messages import MAX_DRAFT_DEPTH, ReceivedDraft, TailDraft, TapRows, WireDraft, WireTaps, children_of
from swarm.types import Chain, Hop, NodeProfile, OfferedDrafter, Taps
from swarm_client.session.tap_buffer import TapBuffer

DRAFT_NODES, DRAFT_DEPTH = 32, 6  # asked of a tail: as many rows as a wide step has, and its passes bound the depth


@dataclass(frozen=True, slots=True)
class TailAsk:
    """A tail's drafter that a session uses. `vocab_size`: of the model."""

    drafter: OfferedDrafter
    hidden_size: int
    vocab_size: int
    nodes: int = DRAFT_NODES
    depth: int = min(DRAFT_DEPTH, MAX_DRAFT_DEPTH)

    @property
    def taps(self) -> Taps:
        return Taps(self.drafter.taps, self.hidden_size)

    @property
    def wire(self) -> WireDraft:
        return WireDraft(self.drafter.fingerprint, self.nodes, self.depth)

    def asked_of(self, hop: Hop, first_position: int, *, tail: bool) -> WireTaps | None:
        """Hops before the first tap carry nothing."""
        taps = self.taps
        own = list(taps.of_hop(hop.start, hop.end, tail=tail))
        if tail:
            return WireTaps(own, taps.bits, first_position, draft=self.wire)
        carries = taps.layers[0] < hop.end
        return WireTaps(own, taps.bits, first_position, onward=True) if carries else None


class SessionDrafts:
    """`begin`, then `sent` with every step, `add` with every frame, `finished` with every result. `tail`: None also
    once its drafts have ended."""

    def __init__(self, taps: Taps | None, tail: TailAsk | None = None) -> None:
        self.taps = TapBuffer(taps)
        self.tail = tail
        self._asked = tail is not None
        self._first = 0  # position from which on rows are asked for
        self._sent = 0  # the step sent last, plus 1
        self._came = 0  # the step of the last draft, plus 1
        self._draft: ReceivedDraft | None = None

    def begin(self, tokens: int, committed: int = 0) -> None:
        """See `TapBuffer.begin`."""
        self.taps.begin(tokens, committed)
        window = self.tail.taps.window if self.tail is not None else 0
        self._first, self._draft = max(committed, tokens - window, 0), None

    def asked_of(self, hop: Hop, *, tail: bool) -> WireTaps | None:
        if self.tail is not None:
            return self.tail.asked_of(hop, self._first, tail=tail)
        return self.taps.asked_of(hop, tail=tail)

    def left_by(self, node: NodeProfile | None) -> bool:
        """Whether drafts end because a new tail lacks the drafter that is in use."""
        offered = node.drafter if node is not None else None
        if self.tail is None or (offered is not None and offered.fingerprint == self.tail.drafter.fingerprint):
            return False
        self.tail = None
        return True

    def sent(self, step: SendStep) -> None:
        self.taps.sent(step)
        self._sent = step.step + 1

    def add(self, chain: Chain, peer: str, message: TapRows | TailDraft, body: Buffer) -> None:
        """Raises ProtocolError for what was not asked of the hop `peer`."""
        if isinstance(message, TapRows):
            self.taps.add(chain, peer, message, body)
            return
        if not self._asked or peer != chain.peers[-1] or len(memoryview(body)):
            raise ProtocolError(f"node {peer} sent a draft that nobody asked for")
        if not self._came <= message.step < self._sent:
            raise ProtocolError(f"node {peer} sent a draft for step {message.step} out of turn")
        self._came = message.step + 1
        if self.tail is not None:
            children = children_of(message, self.tail.wire, self.tail.vocab_size)
            self._draft = ReceivedDraft(message.position, children, message.took_us / 1e3)

    def take_draft(self, known: int) -> ReceivedDraft | None:
        """The draft that came since this was last called; without candidates if it is not for a text of `known`
        tokens."""
        draft, self._draft = self._draft, None
        return draft if draft is None or draft.position == known else draft._replace(children={})

    def finished(self, step: int) -> None:
        self.taps.finished(step)
