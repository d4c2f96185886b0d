"""Taps: the hidden states between some layers, which a session's hops send to its client for a drafter there, or along
the chain for one at the tail; and what that says.

Owns what a tap is, and the messages of both. Tap `i` is what layer `i` reads: the output of layer
`i - 1`, tap 0 the embedding, and the tap after the last layer what the final norm reads. So vLLM counts them in
`eagle_aux_hidden_state_layer_ids`, and transformers in `hidden_states` (but for the last, which it returns normed).

They go from each hop straight to the client (`TapRows`), one frame a step and tap, after the step went on: links
between hops carry nothing for them, and a client that asks for none gets none. For the tail they go from hop to hop
before the step (`CarriedTaps`), and a `TailDraft` comes before the result of the step that it follows. They are hints
like the drafts made of them: a row that does not come, or is wrong, costs speed and never a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import Meta

from swarm.errors import ProtocolError
from swarm.types import FINGERPRINT_BYTES, MAX_TAPS, OfferedDrafter
from swarm.wire_types import Count, Message, Serial, SessionId, TokenId

MAX_DRAFT_NODES = 64  # of one draft: more would not be worth their rows
MAX_DRAFT_DEPTH = 16
MAX_CENTINATS = 1 << 14  # of a log-probability
_MAX_NAME, _MAX_US = 64, 1 << 33

Fingerprint = Annotated[bytes, Meta(min_length=FINGERPRINT_BYTES, max_length=FINGERPRINT_BYTES)]
Path = tuple[int, ...]
DraftedChildren = Mapping[Path, tuple[tuple[int, float], ...]]
"""For each path of draft tokens below the text: (token, ln p after its parent), likeliest first."""


class DrafterRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`types.OfferedDrafter` in the record of a node with the last layer. `us`: what a tree takes."""

    kind: Literal["eagle", "dflash", "mtp"]
    name: Annotated[str, Meta(max_length=_MAX_NAME)]
    hash: Fingerprint
    taps: Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 12)], ...], Meta(min_length=1, max_length=MAX_TAPS)]
    us: Annotated[int, Meta(ge=0, le=_MAX_US)] = 0

    @classmethod
    def of(cls, offered: OfferedDrafter) -> DrafterRecord:
        us = min(_MAX_US, max(0, round(offered.tree_ms * 1e3)))
        return cls(offered.kind, offered.name[:_MAX_NAME], offered.fingerprint, offered.taps, us)  # type: ignore[arg-type]  # decoding checks the kind

    def to_offered(self) -> OfferedDrafter:
        return OfferedDrafter(self.kind, self.name, self.hash, self.taps, self.us / 1e3)


class WireDraft(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a tail is asked for with each result: a tree of at most so many nodes and levels, from the drafter with this
    fingerprint. A tail that holds another one says nothing."""

    drafter: Fingerprint
    nodes: Annotated[int, Meta(ge=1, le=MAX_DRAFT_NODES)]
    depth: Annotated[int, Meta(ge=1, le=MAX_DRAFT_DEPTH)]


class WireTaps(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one hop is asked for: its own taps, of the rows at positions from `first_position` on.

    `onward`: they go to the next hop, with those that came from the one before, of which this hop may have none itself.
    `draft`: of the tail, what its drafter makes of them.
    """

    layers: Annotated[list[Count], Meta(max_length=MAX_TAPS)]
    bits: Literal[8, 16]
    first_position: Count = 0
    onward: bool = False
    draft: WireDraft | None = None

    @property
    def for_tail(self) -> bool:
        """Whether they are for the tail's drafter and not for the client."""
        return self.onward or self.draft is not None


class TapRows(Message, frozen=True, tag="taps"):
    """From a hop to the client: tap `layer` of the rows of step `step` at asked-for positions, in the step's order.

    The body is row after row: bf16 numbers, or a bf16 scale for each `TAP_GROUP` of them and then the numbers as int8.
    """

    max_header: ClassVar[int] = 64

    session: SessionId
    epoch: Serial
    step: Serial
    layer: Count


class CarriedTaps(Message, frozen=True, tag="carried_taps"):
    """From hop to hop, before the step `step`: the taps that the tail's drafter reads, of all hops so far.

    The body has the rows of each of `layers`, one tap after the other: those of the step's last rows, as many of each,
    in the form of `TapRows`.
    """

    max_header: ClassVar[int] = 96

    session: SessionId
    epoch: Serial
    step: Serial
    layers: Annotated[list[Count], Meta(min_length=1, max_length=MAX_TAPS)]


class TailDraft(Message, frozen=True, tag="tail_draft"):
    """From the tail, before the result of step `step`: what may follow the first `position` tokens of the text, of
    which the last is sampled in that step.

    A node has a token, its parent (an earlier node, -1 for the text) and -100 ln of its probability after its parent.
    `took_us`: for how long the result waited for it.
    """

    max_header: ClassVar[int] = 1 << 10

    session: SessionId
    epoch: Serial
    step: Serial
    position: Count
    tokens: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_DRAFT_NODES)]
    parents: Annotated[list[Annotated[int, Meta(ge=-1, lt=MAX_DRAFT_NODES)]], Meta(max_length=MAX_DRAFT_NODES)]
    neg_logprob_centinats: Annotated[
        list[Annotated[int, Meta(ge=0, le=MAX_CENTINATS)]], Meta(max_length=MAX_DRAFT_NODES)
    ]
    took_us: Annotated[int, Meta(ge=0, le=1 << 30)] = 0


class EndDrafts(Message, frozen=True, tag="end_drafts"):
    """From its client to every hop of a session: no more drafts of the tail, and no more taps for them."""

    max_header: ClassVar[int] = 64

    session: SessionId


class ReceivedDraft(NamedTuple):
    """A `TailDraft` that was judged. `took_ms`: by its tail's own account."""

    position: int
    children: DraftedChildren
    took_ms: float


DraftMessages = CarriedTaps | TailDraft | EndDrafts


def skipped_rows(start: int, causal_rows: int, first_position: int) -> int:
    """How many of a step's causal rows, the first at position `start`, lie before what was asked for."""
    return min(causal_rows, max(0, first_position - start))


def children_of(draft: TailDraft, asked: WireDraft, vocab_size: int) -> DraftedChildren:
    """The draft as candidates by path. Raises ProtocolError for what is no tree, or no such tree as was asked for."""
    tokens, parents, costs = draft.tokens, draft.parents, draft.neg_logprob_centinats
    if not len(tokens) == len(parents) == len(costs) <= asked.nodes:
        raise ProtocolError(f"a draft of {len(tokens)} nodes, where {asked.nodes} were asked for")
    paths: list[Path] = []
    children: dict[Path, dict[int, float]] = {}
    for index, (token, parent, cost) in enumerate(zip(tokens, parents, costs, strict=True)):
        if parent >= index or token >= vocab_size:
            raise ProtocolError(f"node {index} of a draft has the token {token} and the parent {parent}")
        above = paths[parent] if parent >= 0 else ()
        siblings = children.setdefault(above, {})
        if len(above) >= asked.depth or token in siblings:
            raise ProtocolError(f"node {index} of a draft is there twice, or too deep")
        siblings[token] = -cost / 100
        paths.append((*above, token))
    return {
        path: tuple(sorted(siblings.items(), key=lambda item: (-item[1], item[0])))
        for path, siblings in children.items()
    }
