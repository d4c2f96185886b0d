"""Headers of frames: any bytes are one message or a ProtocolError, and a message survives being sent on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from fuzz_values import filled

from swarm import codec
from swarm.errors import ProtocolError
from swarm.messages import AnyMessage

INSTRUMENT = ("swarm.codec", "swarm.messages", "swarm.wire_types", "swarm.types")


def run(data: bytes) -> None:
    try:
        message = codec.decode(data)
    except ProtocolError:
        return
    again = codec.decode(codec.encode(message)[0][codec.PREFIX.size :])
    assert again == message, f"{message} became {again}"


def seeds() -> Iterator[bytes]:
    for kind in get_args(AnyMessage):
        value: Any = filled(kind)
        yield codec.encode(value)[0][codec.PREFIX.size :]
