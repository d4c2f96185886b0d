"""Drafts of a tail, and taps on their way to it: any bytes are a bounded tree and whole rows, or a ProtocolError."""

from __future__ import annotations

from collections.abc import Iterator

from swarm import codec
from swarm.errors import ProtocolError
from swarm.tap_messages import MAX_DRAFT_DEPTH, CarriedTaps, TailDraft, WireDraft, children_of
from swarm.types import FINGERPRINT_BYTES, MAX_TAPS, LayerSpan
from swarm_hop.drafting.carried_taps import joined, rows_of, taken_apart

INSTRUMENT = ("swarm.tap_messages", "swarm.codec", "swarm_hop.drafting.carried_taps")
VOCAB, ROW_BYTES, NODES, DEPTH = 100, 3, 12, 4
SPAN = LayerSpan(6, 9)


def run(data: bytes) -> None:
    header, body = data[1 : 1 + data[0]] if data else b"", data[1 + data[0] :] if data else b""
    try:
        message = codec.decode(header)
        if isinstance(message, TailDraft):
            _check_tree(message)
        elif isinstance(message, CarriedTaps):
            _check_taps(message, body)
    except ProtocolError:
        return


def _check_tree(message: TailDraft) -> None:
    children = children_of(message, WireDraft(bytes(FINGERPRINT_BYTES), NODES, DEPTH), VOCAB)
    nodes = [(path, token, logprob) for path, below in children.items() for token, logprob in below]
    assert len(nodes) == len(message.tokens) <= NODES
    assert all(len(path) < DEPTH <= MAX_DRAFT_DEPTH and 0 <= token < VOCAB for path, token, _ in nodes)
    assert all(logprob <= 0.0 for _, _, logprob in nodes)
    known = {(*path, token) for path, token, _ in nodes}
    assert len(known) == len(nodes)
    assert all(path in known or not path for path in children)


def _check_taps(message: CarriedTaps, body: bytes) -> None:
    taps = taken_apart(message.layers, body, ROW_BYTES, SPAN)
    assert b"".join(rows for _, rows in taps) == body
    onward = joined(taps, ((7, body[: 2 * ROW_BYTES]),), ROW_BYTES)
    assert len(onward) <= MAX_TAPS
    assert len({len(rows) for _, rows in onward}) <= 1
    rows = rows_of(taps, message.layers, ROW_BYTES, 4)
    assert len(rows) == 4
    assert all(row is None or [len(part) for part in row] == [ROW_BYTES] * len(taps) for row in rows)


def seeds() -> Iterator[bytes]:
    session = bytes(16)
    tree = TailDraft(session, 1, 2, 30, [5, 6, 7, 5], [-1, -1, 0, 2], [10, 20, 0, 300], 900)
    for message, body in (
        (tree, b""),
        (CarriedTaps(session, 1, 2, [1, 4]), b"aaabbbcccddd"),
        (CarriedTaps(session, 1, 2, [0]), b"aaabbb"),
    ):
        header = codec.encode(message)[0][codec.PREFIX.size :]
        yield bytes([len(header)]) + header + body
