"""The message that carries a signed receipt of work; what it says and when it is believed is in `receipts`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from swarm.wire_types import Message, SessionId

MAX_RECEIPT = 512  # bytes of the payload


class WorkReceipt(Message, frozen=True, tag="receipt"):
    """From the client to a hop, before it closes `session`. At most one a session; never answered."""

    session: SessionId
    payload: Annotated[bytes, Meta(min_length=1, max_length=MAX_RECEIPT)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]
