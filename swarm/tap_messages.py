"""Taps: the hidden states between some layers, which a session's hops send to its client for a drafter there, or along
the chain for one at the tail.

Owns what a tap is, and its messages. Tap `i` is what layer `i` reads: the output of layer
`i - 1`, tap 0 the embedding, and the tap after the last layer what the final norm reads. So vLLM counts them in
`eagle_aux_hidden_state_layer_ids`, and transformers in `hidden_states` (but for the last, which it returns normed).

They go from each hop straight to the client, one frame a step and tap, after the step went on: links between hops carry
nothing for them, and a client that asks for none gets none. For the tail they go from hop to hop before the step
(`draft_messages.CarriedTaps`). They are hints like the drafts made of them: a row that does not come, or is wrong,
costs speed and never a token.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from swarm.draft_messages import WireDraft
from swarm.types import MAX_TAPS
from swarm.wire_types import Count, Message, Serial, SessionId


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


def skipped_rows(start: int, causal_rows: int, first_position: int) -> int:
    """How many of a step's causal rows, the first at position `start`, lie before what was asked for."""
    return min(causal_rows, max(0, first_position - start))
