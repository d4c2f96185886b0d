"""Invites: round trips, and every damage is detected and named."""

from __future__ import annotations

import base58
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.config import ClientConfig, NodeConfig, load
from swarm.errors import UsageError
from swarm.net.discovery.invite import MAX_PEERS, PREFIX, Invite, parse

PEER = "12D3KooWCWWNvXQTfegbM1UbbmC6bXmXcGbBzvnbA2Cg6Uf1uAV5"
ADDRESSES = (
    f"/ip4/203.0.113.7/tcp/4001/p2p/{PEER}",
    f"/ip6/2001:db8::7/udp/4001/quic/p2p/{PEER}",
    f"/dns4/example.org/tcp/443/p2p/{PEER}",
    f"/ip4/203.0.113.7/tcp/4001/p2p/{PEER}/p2p-circuit/p2p/{PEER}",
)
INVITE = Invite(ADDRESSES, "smollm2-135m", "friends", "a secret of our own")


def test_round_trip() -> None:
    token = INVITE.token()
    assert parse(token) == INVITE
    assert parse(f"  {token[:40]}\n{token[40:]}\n") == INVITE, "pasting may add line breaks"
    assert len(Invite(ADDRESSES[:1], "m").token()) < 120
    assert len(parse(Invite(ADDRESSES[:1] * 20, "m").token()).peers) == MAX_PEERS


def test_settings() -> None:
    assert load(NodeConfig, INVITE.settings()).secret == INVITE.secret
    config = load(ClientConfig, Invite(ADDRESSES[:1], "m").settings())
    assert (config.peers, config.model, config.secret) == (ADDRESSES[:1], "m", "")
    assert INVITE.secret not in repr(load(NodeConfig, INVITE.settings())), "secrets stay out of logs"


@given(st.integers(0, 10_000), st.characters(min_codepoint=33, max_codepoint=126))
def test_a_wrong_character_is_detected(place: int, other: str) -> None:
    token = INVITE.token()
    place %= len(token)
    if token[place] != other:
        with pytest.raises(UsageError, match="invitation"):
            parse(token[:place] + other + token[place + 1 :])


@given(st.integers(0, 10_000))
def test_a_truncated_token_is_detected(length: int) -> None:
    token = INVITE.token()
    with pytest.raises(UsageError, match="invitation"):
        parse(token[: length % len(token)])


def _token(payload: bytes) -> str:
    return PREFIX + base58.b58encode_check(payload).decode()


@given(st.binary(max_size=300))
def test_hostile_content_is_refused(data: bytes) -> None:
    with pytest.raises(UsageError, match="invitation"):
        parse(_token(b"\x01" + data + b"\xc1"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ([[b"\xff\xff"], "m"], "no sense"),
        ([[], "m"], "no sense"),
        ([[b"\x04\x7f\x00\x00\x01\x06\x0f\xa1"], "m"], "which peer"),
        ([["text"], "m"], "no sense"),
        ([[b""] * 9, "m"], "no sense"),
        ({"peers": []}, "no sense"),
    ],
)
def test_malformed_fields(fields: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse(_token(b"\x01" + msgspec.msgpack.encode(fields)))


def test_unprintable_names_are_refused() -> None:
    for invite in (Invite(ADDRESSES, ""), Invite(ADDRESSES, "\x1b[2J"), Invite(ADDRESSES, "m", "a\nb")):
        with pytest.raises(UsageError, match="not text"):
            parse(invite.token())


def test_other_versions_and_other_texts_are_refused() -> None:
    with pytest.raises(UsageError, match="version"):
        parse(_token(b"\x02whatever"))
    for text in ("", "hello", ADDRESSES[0], PREFIX, PREFIX + "1" * 5000):
        with pytest.raises(UsageError, match="invitation"):
            parse(text)
    for peer in ("rubbish", "/ip4/203.0.113.7/tcp/4001"):
        with pytest.raises(UsageError):
            Invite((peer,), "m").token()
