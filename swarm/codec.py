"""Frames: the encoding of a message and its body, and the limits on their size.

    frame = u32 header length | u32 body length | header (MessagePack of one `messages.AnyMessage`) | body (raw bytes)

Decoding is typed and bounded: a hostile header is refused in microseconds, before anything is allocated for it.
Does not know sockets or the meaning of a body; a hop checks a body's length against its own shapes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import get_args

import msgspec

from swarm.errors import UNDECODABLE, ProtocolError
from swarm.messages import AnyMessage

Buffer = bytes | bytearray | memoryview

PREFIX = struct.Struct("<II")

_encoder = msgspec.msgpack.Encoder()
_MAX_HEADERS: dict[str, int] = {str(kind.__struct_config__.tag): kind.max_header for kind in get_args(AnyMessage)}
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """The largest frame a peer may send, in bytes. 8k penalty tokens take 40 kB, 1024 rows of 8192 fp32 32 MiB."""

    header: int = 2 << 20  # of any message; each kind has its own bound, `Message.max_header`
    body: int = 64 << 20


DEFAULT_LIMITS = FrameLimits()


def encode(message: AnyMessage, body: Buffer = b"") -> tuple[bytes, Buffer]:
    """-> (prefix and header, body), to be written one after the other."""
    header = _encoder.encode(message)
    return PREFIX.pack(len(header), len(body)) + header, body


def parse_prefix(prefix: Buffer, limits: FrameLimits = DEFAULT_LIMITS) -> tuple[int, int]:
    """The 8 bytes before a frame -> (header length, body length). Raises ProtocolError beyond `limits`."""
    header, body = PREFIX.unpack(prefix)
    if header > limits.header or body > limits.body:
        raise ProtocolError(f"a frame of {header} + {body} bytes is over the limit of {limits.header} + {limits.body}")
    return header, body


class UndecodableFrame(ProtocolError):
    """Not a message of this protocol; `size`: of its header, in bytes, which says what the attempt has cost."""

    def __init__(self, sentence: str, size: int) -> None:
        super().__init__(sentence)
        self.size = size


def decode(header: Buffer) -> AnyMessage:
    """A header's bytes -> the message. Raises UndecodableFrame on anything that is not exactly one known message.

    A header that is too long for its kind is not decoded.
    """
    kind = _kind(header)
    if len(header) > _MAX_HEADERS.get(kind, 0):
        raise UndecodableFrame(f"not a message of this protocol: {len(header)} bytes of kind {kind!r}", 0)
    try:
        return _decoder.decode(header)
    except UNDECODABLE as error:
        raise UndecodableFrame(f"not a message of this protocol: {error}", len(header)) from None


def _kind(header: Buffer) -> str:
    """The tag at the front: an array's head, then a short string. "" if there is none."""
    start = 1 if header[:1] and 0x90 <= header[0] <= 0x9F else 3 if header[:1] == b"\xdc" else 0
    if not start or len(header) <= start or not 0xA0 <= header[start] <= 0xBF:
        return ""
    return bytes(header[start + 1 : start + 1 + (header[start] & 0x1F)]).decode("ascii", "replace")
