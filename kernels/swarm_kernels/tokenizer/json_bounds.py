"""What a `tokenizer.json` may ask of the `tokenizers` library, checked before the library sees it.

The library trusts such a file: steps that rewrite text can make gigabytes of one word, and memory that runs out in its
Rust code ends the process. Owns those bounds; what a step means is the library's.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from swarm.errors import CorruptModel
from swarm_kernels.tokenizer.parts import MAX_TOKEN, MAX_TOKENS

MAX_FILE = 1 << 26  # bytes; the largest known have 33 MB
MAX_STEPS = 1 << 15  # bytes of JSON that describe the steps of one kind, but for a character map
MAX_CHARACTER_MAP = 1 << 22  # the library's own, of SentencePiece models: base64 of 300 KB
MAX_GROWTH = 64.0  # characters that all rewriting steps together may make of one
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_Token = Annotated[str, Meta(max_length=MAX_TOKEN)]
_Id = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Words = Annotated[dict[_Token, _Id], Meta(max_length=MAX_TOKENS)]
_Scored = Annotated[list[tuple[_Token, float]], Meta(max_length=MAX_TOKENS)]


class _AddedToken(msgspec.Struct):
    content: _Token
    id: _Id


class _Model(msgspec.Struct):
    vocab: _Words | _Scored


class _TokenizerFile(msgspec.Struct):
    """The parts that are bounded; the rest is skipped, not built."""

    model: _Model
    added_tokens: Annotated[list[_AddedToken], Meta(max_length=1 << 16)] = []
    normalizer: msgspec.Raw = msgspec.Raw(b"null")
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")
    post_processor: msgspec.Raw = msgspec.Raw(b"null")
    decoder: msgspec.Raw = msgspec.Raw(b"null")


_decode = msgspec.json.Decoder(_TokenizerFile).decode


def check_tokenizer_json(data: bytes, where: str) -> None:
    """Raises CorruptModel."""
    try:
        if len(data) > MAX_FILE:
            raise ValueError(f"it has {len(data)} bytes")
        file = _decode(data)
        for raw in (file.normalizer, file.pre_tokenizer, file.decoder):
            _check_growth(_steps(raw))
        _check_templates(_steps(file.post_processor))
    except (*_UNREADABLE, ValueError) as error:
        raise CorruptModel(f"{where} is malformed ({error!s:.300}); fetch the model again") from None


def _steps(raw: msgspec.Raw) -> list[Mapping[str, Any]]:
    """Every object in a part of the file. Raises ValueError."""
    data = bytes(raw)
    if len(data) > MAX_STEPS + MAX_CHARACTER_MAP:
        raise ValueError(f"{len(data)} bytes describe its steps")
    found = list(_objects(msgspec.json.decode(data)))
    maps = sum(len(value) for step in found if isinstance(value := step.get("precompiled_charsmap"), str))
    if len(data) - maps > MAX_STEPS:
        raise ValueError(f"{len(data) - maps} bytes describe its steps")
    for step in found:
        _check_character_map(step.get("precompiled_charsmap"))
    return found


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            yield item
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item


def _check_character_map(value: object) -> None:
    """The library reserves what the first four bytes say."""
    if value is None:
        return
    try:
        blob = base64.b64decode(value if isinstance(value, str) else "!", validate=True)
    except binascii.Error:
        raise ValueError("a character map that is not base64") from None
    if not 4 <= int.from_bytes(blob[:4], "little") <= len(blob) - 4:
        raise ValueError("a character map that is cut short")


def _check_growth(steps: list[Mapping[str, Any]]) -> None:
    growth = 1.0
    for step in steps:
        for key in ("content", "prepend", "replacement", "prefix", "suffix"):
            text, pattern = step.get(key), step.get("pattern")
            if isinstance(text, str):
                literal = pattern.get("String") if isinstance(pattern, dict) else None
                growth *= max(1.0, len(text) / len(literal) if literal else 1.0 + len(text))
    if growth > MAX_GROWTH:
        raise ValueError(f"its steps make {growth:.0f} characters of one")


def _check_templates(steps: list[Mapping[str, Any]]) -> None:
    """What is added around a text: the text itself may come once, in each of few processors."""
    for step in steps:
        single = step.get("single")
        if isinstance(single, list) and sum("Sequence" in piece for piece in single if isinstance(piece, dict)) > 1:
            raise ValueError("it repeats a text")
