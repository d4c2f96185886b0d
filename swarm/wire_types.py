"""What all wire messages share: their base class and the bounds of common fields.

Does not know any message; those of sessions are in `messages`, and each other subject has a module of its own.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

MAX_TOKENS = 1 << 20  # tokens of one session
MAX_RECORD = 2048  # bytes of a node record, signature included

SessionId = Annotated[bytes, Meta(min_length=16, max_length=16)]
Text = Annotated[str, Meta(max_length=1024)]
Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Serial = Annotated[int, Meta(ge=0, le=(1 << 53))]


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="t"):
    """Base of all messages; the first element of the array is the tag.

    `max_header`: bytes. A longer header is refused before it is decoded; a kind that needs more or much less says so.
    """

    max_header: ClassVar[int] = 256 << 10
