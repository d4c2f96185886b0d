"""The wire messages of audits: what a hop says that went in and out of it, by digests of rows.

Owns these messages, what a report's signature covers, and the hash of a row: two peers that hold the same bytes, or
token ids, get the same digests. Whoever sends a row has bound itself to its sixteen bytes, since finding two useful
rows with one digest takes 2^64 tries. What follows from reports is decided by `swarm.planner.auditing`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from swarm.types import ModelId
from swarm.wire_types import Count, Message, SessionId

MAX_AUDITED_ROWS = 64  # of which a report has all bytes
MAX_CLAIMED = 4096  # tokens of an answer whose margins a tail computes
MARGIN_BYTES = 2  # little-endian, thousandths of a logit
MAX_MARGIN = (1 << 16) - 2
UNKNOWN_MARGIN = (1 << 16) - 1

DIGEST_BYTES = 16
UNKNOWN = bytes(DIGEST_BYTES)
"""The digest of a row that its holder did not see, such as one from a prefix cache."""

Positions = Annotated[list[Count], Meta(max_length=MAX_AUDITED_ROWS)]


class AuditQuery(Message, frozen=True, tag="audit_query"):
    """From a session's client: report on all committed rows. `positions`: of the output rows to send in full.

    The client draws them when the rows have long been sent: the next hop, which is asked too, knows their digests.
    """

    max_header: ClassVar[int] = 512

    session: SessionId
    positions: Positions = []


class AuditReport(Message, frozen=True, tag="audit_report"):
    """What the sender committed of this session at positions [`first`, `tokens`), in layers [`start`, `end`).

    The body has a `digest` of each input row (of its token id, on the first hop), then of each output row (on the
    tail: of the token sampled after it), then the output rows at `positions`, which are those of the query that the
    sender still holds. `UNKNOWN` stands for what it did not see or did not sample. `arithmetic`: names what
    computes here; two machines of the same one get the same bits, "" promises nothing. `signature`: of `signed_part`.

    `margins`: the body ends with two bytes for each row (`margins_to_wire`): by how much the logits after it would have
    to be others for the token of `OpenSession.claimed` to be the sample.
    """

    max_header: ClassVar[int] = 1024

    session: SessionId
    start: Count
    end: Count
    first: Count
    tokens: Count
    positions: Positions = []
    arithmetic: Annotated[str, Meta(max_length=64)] = ""
    signature: Annotated[bytes, Meta(max_length=64)] = b""
    margins: bool = False


def margins_to_wire(margins: Iterable[float | None]) -> bytes:
    """In logits; None for one that is not known."""
    return b"".join(
        (UNKNOWN_MARGIN if m is None else min(MAX_MARGIN, round(m * 1000))).to_bytes(MARGIN_BYTES, "little")
        for m in margins
    )


def margins_from_wire(body: bytes) -> list[float | None]:
    found = (int.from_bytes(body[at : at + MARGIN_BYTES], "little") for at in range(0, len(body), MARGIN_BYTES))
    return [None if margin == UNKNOWN_MARGIN else margin / 1000 for margin in found]


def signed_part(report: AuditReport, body: bytes | bytearray | memoryview, model: ModelId) -> bytes:
    """What the reporting peer signs: all of the report, its body, and the model."""
    unsigned = msgspec.structs.replace(report, signature=b"")
    content = (unsigned, hashlib.sha256(body).digest(), model.model, model.weight_hash, model.dtype)
    return b"swarm audit report\0" + msgspec.msgpack.encode(content)


def digest(row: bytes | memoryview) -> bytes:
    return hashlib.blake2b(row, digest_size=DIGEST_BYTES).digest()


def row_digests(body: bytes | bytearray | memoryview, rows: int) -> list[bytes]:
    """One digest for each of the equally long rows of a step's body."""
    view = memoryview(body)
    size = len(view) // rows
    return [digest(view[at : at + size]) for at in range(0, rows * size, size)]


def token_digests(tokens: Iterable[int]) -> list[bytes]:
    """A token id counts as a row of four bytes, little-endian."""
    return [digest(token.to_bytes(4, "little")) for token in tokens]
