"""The wire format under random and hostile bytes: a message or a ProtocolError, quickly."""

from __future__ import annotations

import string
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm import codec
from swarm.audit_messages import MAX_AUDITED_ROWS, AuditQuery, AuditReport
from swarm.errors import ProtocolError
from swarm.messages import (
    MAX_ROWS,
    AnyMessage,
    CloseSession,
    DropInFlight,
    OpenSession,
    Ping,
    Pong,
    Reroute,
    SessionFailed,
    Step,
    StepResult,
)
from swarm.tap_messages import TapRows
from swarm.types import MAX_SLOTS

TAGS = [cls.__struct_config__.tag for cls in get_args(AnyMessage)]

session = st.binary(min_size=16, max_size=16)
serial = st.integers(0, 1 << 53)
slots = st.lists(st.integers(0, MAX_SLOTS - 1), max_size=10)
tokens = st.lists(st.integers(0, (1 << 31) - 1), max_size=10)
trace = st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), max_size=8)
text = st.text(max_size=50)

messages: st.SearchStrategy[AnyMessage] = st.one_of(
    st.builds(Ping, serial),
    st.builds(Pong, serial),
    st.builds(CloseSession, session),
    st.builds(AuditQuery, session, st.lists(st.integers(0, 1 << 20), max_size=MAX_AUDITED_ROWS)),
    st.builds(
        AuditReport, session, st.just(0), st.just(9), st.just(0), st.integers(0, 1 << 20), tokens.map(lambda _: [1])
    ),
    st.builds(DropInFlight, session, serial, slots),
    st.builds(SessionFailed, session, st.text(string.ascii_lowercase, max_size=20), text, st.floats(0, 3600)),
    st.builds(StepResult, session, serial, serial, tokens, trace),
    st.builds(TapRows, session, serial, serial, st.integers(0, 1 << 20)),
    st.builds(Reroute, session, serial, text, text, st.integers(0, 1 << 20)),
    st.builds(Step, session, serial, serial, st.integers(0, 1 << 20), st.integers(0, MAX_ROWS), st.booleans(), tokens),
    st.builds(
        OpenSession, session, text, text, st.just("bf16"), st.integers(0, 9), st.integers(10, 99), st.integers(0, 4096)
    ),
)

plain: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.floats(), st.binary(), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)


def decode_or_refuse(data: bytes) -> None:
    try:
        message = codec.decode(data)
    except ProtocolError:
        return
    assert isinstance(message, get_args(AnyMessage))


@settings(max_examples=60, deadline=None)
@given(messages, st.binary(max_size=200))
def test_frames_round_trip(message: AnyMessage, body: bytes) -> None:
    frame, sent = codec.encode(message, body)
    header_size, body_size = codec.parse_prefix(frame[: codec.PREFIX.size])
    assert header_size == len(frame) - codec.PREFIX.size
    assert body_size == len(body)
    assert sent == body
    assert codec.decode(frame[codec.PREFIX.size :]) == message


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes(data: bytes) -> None:
    decode_or_refuse(data)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(TAGS), st.lists(plain, max_size=8))
def test_a_known_tag_with_wrong_fields(tag: str, values: list[Any]) -> None:
    decode_or_refuse(msgspec.msgpack.encode([tag, *values]))


@settings(max_examples=60, deadline=None)
@given(messages, st.data())
def test_damaged_messages(message: AnyMessage, data: st.DataObject) -> None:
    good = codec.encode(message)[0][codec.PREFIX.size :]
    cut = data.draw(st.integers(0, len(good) - 1))
    with pytest.raises(ProtocolError):
        codec.decode(good[:cut])
    with pytest.raises(ProtocolError):
        codec.decode(good + data.draw(st.binary(min_size=1, max_size=20)))
    flipped = bytearray(good)
    flipped[data.draw(st.integers(0, len(good) - 1))] ^= data.draw(st.integers(1, 255))
    decode_or_refuse(bytes(flipped))


@settings(deadline=None)
@given(st.binary(min_size=8, max_size=8))
def test_frame_prefixes(prefix: bytes) -> None:
    limits = codec.FrameLimits(header=1000, body=5000)
    try:
        header, body = codec.parse_prefix(prefix, limits)
    except ProtocolError:
        return
    assert header <= 1000
    assert body <= 5000


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(b"\xdd\xff\xff\xff\xff", id="an array of four billion"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="a map of four billion"),
        pytest.param(b"\xdb\xff\xff\xff\xff", id="a text of four billion"),
        pytest.param(b"\x9a\xa4open" + b"\xdd\xff\xff\xff\xff" * 5, id="a field of four billion"),
        pytest.param(b"\x91" * 100_000, id="nested without end"),
        pytest.param(b"\x92\xa4ping" + b"\x91" * 100_000, id="a field nested without end"),
        pytest.param(
            b"\x94\xaedrop_in_flight\xc4\x10" + bytes(16) + b"\x00\xdd\x00\x10\x00\x00" + b"\x00" * (1 << 20),
            id="slots",
        ),
        pytest.param(b"\xdd\x00\x3d\x09\x00" + b"\x90" * 4_000_000, id="four million empty lists"),
        pytest.param(b"\x92\xa4ping\xcf\xff\xff\xff\xff\xff\xff\xff\xff", id="a serial out of range"),
        pytest.param(b"\x92\xa4ping\xff", id="a negative serial"),
        pytest.param(b"\x92\xa4pin\xff\x00", id="a tag that is not UTF-8"),
        pytest.param(b"\x92\xa4boom\x00", id="an unknown tag"),
        pytest.param(b"\x93\xa4ping\x00\x00", id="one field too many"),
        pytest.param(b"\x91\xa4ping", id="one field too few"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_hostile_headers(header: bytes) -> None:
    with pytest.raises(ProtocolError):
        codec.decode(header)


def test_numbers_that_are_not_finite_or_negative() -> None:
    for value in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ProtocolError):
            codec.decode(codec.encode(SessionFailed(bytes(16), "e", "d", value))[0][8:])
