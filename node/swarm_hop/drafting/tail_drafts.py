"""The drafter of a tail, and what it keeps of each session that asks for its drafts.

Owns the limits of both, and that a drafter which fails costs its own drafts alone. The drafter's keys and values live
as long as the session and follow its text: where the text goes another way than what was read of it, as after a repair,
it begins anew with the rows that come then. Knows neither peers nor the device it runs on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

from swarm.errors import OutOfMemory
from swarm.messages import Step
from swarm.tap_messages import MAX_CENTINATS, TailDraft, WireDraft, WireTaps
from swarm.types import OfferedDrafter
from swarm_hop.drafting.carried_taps import rows_of
from swarm_hop.drafting.tail_text import KnownText, TailText
from swarm_kernels.draft.tail import OpenDrafter
from swarm_kernels.draft.tapped import TappedSession
from swarm_kernels.draft.tree import DraftedTree, TreeBounds, grow
from swarm_kernels.runtime.taps import StepTaps

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TailDraftPolicy:
    """What sessions may use of a tail's drafter."""

    max_sessions: int = 32  # at a time: more take memory for keys and values of their own
    max_tokens: int = 8192  # of one text: beyond it nothing is drafted
    beam: int = 4  # paths that go on at a level of a tree: more take longer and miss less
    width: int = 4  # candidates of each


class TailDrafts:
    """Of one loaded drafter."""

    def __init__(self, opened: OpenDrafter, policy: TailDraftPolicy = TailDraftPolicy()) -> None:
        self._opened = opened
        self._policy = policy
        self._texts: WeakSet[DraftedText] = WeakSet()

    @property
    def offered(self) -> OfferedDrafter:
        return self._opened.offered

    def open(self, taps: WireTaps, max_tokens: int) -> DraftedText | None:
        """What a new session's text needs; None if it asks for another drafter, or there is no room."""
        asked, reads = taps.draft, self._opened.draft.taps
        if asked is None or asked.drafter != self.offered.fingerprint or taps.bits != reads.bits:
            return None
        if len(self._texts) >= self._policy.max_sessions:
            logger.info("no drafts for one more session: %d have some", len(self._texts))
            return None
        shape = TreeBounds(asked.nodes, asked.depth, self._policy.beam, self._policy.width)
        try:
            session = self._opened.draft.new_session(min(max_tokens, self._policy.max_tokens), shape.cache)
        except OutOfMemory as error:
            logger.info("no drafts for a session: %s", error)
            return None
        text = DraftedText(session, shape, reads.layers, reads.row_bytes)
        self._texts.add(text)
        return text


class DraftedText:
    """`follow` every step once it has run; where `due` then says so, `grow` on the device."""

    def __init__(self, session: TappedSession, shape: TreeBounds, layers: Sequence[int], row_bytes: int) -> None:
        self._session, self._shape = session, shape
        self._layers, self._row_bytes = tuple(layers), row_bytes
        self._text = TailText()
        self._read: list[int] = []  # what the drafter has been given of the text
        self._due: KnownText | None = None
        self._failed = False

    def follow(self, step: Step, samples: Sequence[int], taps: StepTaps) -> None:
        """`taps`: the step's, of all hops."""
        self._text.follow(step, samples, rows_of(taps, self._layers, self._row_bytes, step.rows))

    def due(self) -> bool:
        """Whether the text has gone on."""
        known = None if self._failed else self._text.take()
        if known is None:
            return False
        rows = {**self._due.rows, **known.rows} if self._due is not None else known.rows
        self._due = KnownText(known.tokens, rows)
        return known.tokens != self._read

    @property
    def position(self) -> int:
        """Of the text that was drafted for last, its tokens."""
        return len(self._read)

    def grow(self) -> DraftedTree:
        """The tree below the text, without nodes where there is nothing to say. Runs in the compute thread."""
        due, self._due = self._due, None
        assert due is not None  # `due` said so
        try:
            self._give(due)
            return grow(self._session, self._shape)
        except Exception as error:  # noqa: BLE001  # anybody's drafter, whose failure costs its drafts alone
            self._failed = True
            logger.warning("a session goes on without the drafter of this node: %s", error)
            return DraftedTree((), (), ())

    def _give(self, known: KnownText) -> None:
        read = len(self._read)
        if known.tokens[:read] == self._read:
            self._session.extend(known.tokens[read:])
        else:
            self._session.reset(known.tokens)
        self._session.add(known.rows)
        self._read = known.tokens


def draft_message(asked: WireDraft, step: Step, position: int, tree: DraftedTree, took_ms: float) -> TailDraft | None:
    """None where nothing is drafted."""
    if not tree.tokens:
        return None
    count = min(asked.nodes, len(tree.tokens))
    return TailDraft(
        step.session,
        step.epoch,
        step.step,
        position,
        list(tree.tokens[:count]),
        list(tree.parents[:count]),
        [min(MAX_CENTINATS, round(-100 * logprob)) for logprob in tree.logprobs[:count]],
        round(took_ms * 1e3),
    )
