"""Signed receipts of work: what a client says that a node did for it, sent when their session ends.

    WorkReceipt = payload (MessagePack array of one `Receipt`), signature by the client's identity key

Owns the schema, its bounds, and every reason not to believe one. A receipt is thanks, not money: it buys nothing, and
says no more than that this client said so. Does not know keys (`sign` and `verify` are passed in) or what was done.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from swarm.errors import UNDECODABLE, ProtocolError
from swarm.records import MAX_LAYERS, PeerText, Sign, Verify
from swarm.types import PeerId
from swarm.wire_types import Count, Message, SessionId

MAX_SECONDS = 30 * 86400.0  # of one session
MAX_RECEIPT = 512  # bytes of the payload
_CONTEXT = b"swarm work receipt 1\0"  # domain separation: the signature is valid for nothing else


class WorkReceipt(Message, frozen=True, tag="receipt"):
    """From the client to a hop, before it closes `session`. At most one a session; never answered."""

    session: SessionId
    payload: Annotated[bytes, Meta(min_length=1, max_length=MAX_RECEIPT)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


class Receipt(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`tokens`: committed in the session, prompt included, each through `layers` layers of `node`. `seconds`: from its
    opening to `ended`, which is since the epoch, by the client's clock."""

    node: PeerText
    client: PeerText
    session: SessionId
    tokens: Count
    layers: Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
    ended: Annotated[float, Meta(ge=0.0, le=1e12)]
    seconds: Annotated[float, Meta(ge=0.0, le=MAX_SECONDS)] = 0.0

    @property
    def layer_tokens(self) -> int:
        return self.tokens * self.layers


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Receipt).decode


def sign_receipt(receipt: Receipt, sign: Sign) -> WorkReceipt:
    payload = _encode(receipt)
    return WorkReceipt(receipt.session, payload, sign(_CONTEXT + payload))


def check_receipt(
    message: WorkReceipt, node: PeerId, client: PeerId, tokens: int, layers: int, verify: Verify
) -> Receipt:
    """The receipt, if `client` signed it for this session of at most `tokens` tokens in `layers` layers at `node`.

    Cheap checks come before the signature. Raises ProtocolError.
    """
    try:
        receipt = _decode(message.payload)
    except UNDECODABLE as error:
        raise ProtocolError(f"a malformed receipt: {error}") from None
    if (receipt.node, receipt.client, receipt.session) != (node, client, message.session):
        raise ProtocolError("a receipt for another session, node or client")
    if receipt.tokens > tokens or receipt.layers != layers:
        raise ProtocolError(f"a receipt for {receipt.tokens} tokens in {receipt.layers} layers of {tokens} in {layers}")
    if not verify(client, _CONTEXT + message.payload, message.signature):
        raise ProtocolError("a receipt with a wrong signature")
    return receipt
