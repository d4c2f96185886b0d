"""Frames: the encoding of a message and its body, and the limits on their size.

    frame = u32 header length | u32 body length | header (MessagePack of one `messages.AnyMessage`) | body (raw bytes)

Decoding is typed and bounded: a hostile header is refused in microseconds, before anything is allocated for it.
Does not know sockets or the meaning of a body; a hop checks a body's length against its own shapes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgspec

from swarm.errors import ProtocolError
from swarm.messages import AnyMessage

Buffer = bytes | bytearray | memoryview

PREFIX = struct.Struct("<II")

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """The largest frame a peer may send, in bytes. 8k penalty tokens take 40 kB, 1024 rows of 8192 fp32 32 MiB."""

    header: int = 4 << 20
    body: int = 64 << 20


DEFAULT_LIMITS = FrameLimits()

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""All that msgspec raises on hostile bytes; for text that is not UTF-8 it has no error of its own."""


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


def decode(header: Buffer) -> AnyMessage:
    """A header's bytes -> the message. Raises ProtocolError on anything that is not exactly one known message."""
    try:
        return _decoder.decode(header)
    except UNDECODABLE as error:
        raise ProtocolError(f"not a message of this protocol: {error}") from None
