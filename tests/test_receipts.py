"""Receipts: what is signed is what is believed; everything else is refused by its reason."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm import codec
from swarm.errors import ProtocolError
from swarm.net.security.identity import Identity, verify
from swarm.receipts import Receipt, WorkReceipt, check_receipt, sign_receipt

CLIENT, NODE, OTHER = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))
RECEIPT = Receipt(NODE.peer, CLIENT.peer, b"s" * 16, 30, 8, 1e9, 2.0)


def check(message: WorkReceipt, tokens: int = 30, layers: int = 8, client: Identity = CLIENT) -> Receipt:
    return check_receipt(message, NODE.peer, client.peer, tokens, layers, verify)


def test_a_receipt_comes_back_over_the_wire() -> None:
    header, _ = codec.encode(sign_receipt(RECEIPT, CLIENT.sign))
    message = codec.decode(bytes(header)[codec.PREFIX.size :])
    assert isinstance(message, WorkReceipt)
    assert check(message) == RECEIPT
    assert RECEIPT.layer_tokens == 240


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"node": OTHER.peer}, "another session, node or client"),
        ({"client": OTHER.peer}, "another session, node or client"),
        ({"session": b"t" * 16}, "another session, node or client"),
        ({"tokens": 31}, "31 tokens"),
        ({"layers": 9}, "9 layers"),
    ],
)
def test_what_does_not_fit_the_session_is_refused(change: dict[str, object], reason: str) -> None:
    changed = sign_receipt(msgspec.structs.replace(RECEIPT, **change), CLIENT.sign)
    with pytest.raises(ProtocolError, match=reason):
        check(msgspec.structs.replace(changed, session=RECEIPT.session))


def test_only_the_client_s_own_signature_counts() -> None:
    with pytest.raises(ProtocolError, match="wrong signature"):
        check(sign_receipt(RECEIPT, OTHER.sign))
    bare = msgspec.structs.replace(
        sign_receipt(RECEIPT, CLIENT.sign), signature=CLIENT.sign(msgspec.msgpack.encode(RECEIPT))
    )
    with pytest.raises(ProtocolError, match="wrong signature"):
        check(bare)  # signed for another purpose


@given(payload=st.binary(min_size=1, max_size=200))
def test_random_payloads_are_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        check(WorkReceipt(b"s" * 16, payload, bytes(64)))
