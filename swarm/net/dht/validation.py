"""Validation of hivemind's DHT entries against untrusted peers: signed subkeys, capped lifetimes, bounded decoding.

Owns the rules by which our DHT nodes store and return entries. By default, the DHT lets anyone overwrite any subkey,
for years, and one malformed entry invalidates all that a replica returns. Does not know the contents of the records
(`swarm.records`).
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Awaitable, Callable, Collection
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from swarm.codec import UNDECODABLE
from swarm.errors import ProtocolError
from swarm.net.libp2p._hivemind import DHTNode, DHTRecord, DictionaryDHTValue, MSGPackSerializer, RecordValidatorBase
from swarm.net.security.identity import Identity, verify
from swarm.records import MAX_CLOCK_SKEW_S, MAX_LIFETIME_S, MAX_RECORD

MAX_ENTRIES = 4096  # under one key
MAX_VALUE = MAX_RECORD + 128  # a packed record and its signature
SIGNATURE = 64
_CONTEXT = b"swarm dht entry 1\0"
_DICTIONARY_CODE = 0x50  # hivemind's MessagePack extension for a key with subkeys

_Subkey = Annotated[str, Meta(max_length=64)]
_Value = Annotated[bytes, Meta(max_length=MAX_VALUE)]
_Entries = Annotated[list[tuple[_Subkey, _Value, float]], Meta(max_length=MAX_ENTRIES)]
_decode_bytes = msgspec.msgpack.Decoder(_Value).decode
_decode_ext = msgspec.msgpack.Decoder(msgspec.msgpack.Ext).decode
_decode_dictionary = msgspec.msgpack.Decoder(tuple[float | int | None, float, _Entries]).decode
_decode_subkey = msgspec.msgpack.Decoder(_Subkey).decode


class SignedSubkeyValidator(RecordValidatorBase):  # type: ignore[misc]  # hivemind is untyped
    """Every entry lies under a subkey that is a peer id, is signed by that peer and lives MAX_LIFETIME_S at most.

    The signature covers key, subkey, expiry and value, so that nobody can extend the life of another peer's entry.
    """

    def __init__(self, identity: Identity, clock: Callable[[], float]) -> None:
        self._identity = identity
        self._clock = clock

    def validate(self, record: DHTRecord) -> bool:
        if len(record.value) > MAX_VALUE:
            return False
        if not self.within_ttl(record.expiration_time):
            return False
        value, signature = record.value[:-SIGNATURE], record.value[-SIGNATURE:]
        try:
            peer = _decode_subkey(record.subkey)
            _decode_bytes(value)
        except UNDECODABLE:
            return False
        return verify(peer, _signed(record, value), signature)

    def within_ttl(self, expires_at: float) -> bool:
        """Whether an entry's lifetime is allowed; False for NaN."""
        return expires_at <= self._clock() + MAX_LIFETIME_S + MAX_CLOCK_SKEW_S

    def sign_value(self, record: DHTRecord) -> bytes:
        return bytes(record.value) + self._identity.sign(_signed(record, record.value))

    def strip_value(self, record: DHTRecord) -> bytes:
        return bytes(record.value[:-SIGNATURE])


class StrictSerializer(MSGPackSerializer):  # type: ignore[misc]
    """Decodes only what our DHT holds: text, bytes, dictionaries of text to bytes. Rejects the rest at once."""

    @classmethod
    def loads(cls, buf: bytes) -> Any:
        """Raises ProtocolError."""
        kind = buf[0] if buf else 0  # MessagePack's first byte is the type of what follows
        try:
            if 0xC4 <= kind <= 0xC6:
                return _decode_bytes(buf)
            if not (0xC7 <= kind <= 0xC9 or 0xD4 <= kind <= 0xD8):
                return _decode_subkey(buf)
            value = _decode_ext(buf)
            if value.code != _DICTIONARY_CODE:
                raise ProtocolError(f"a DHT value of unknown kind {value.code}")
            _, latest, entries = _decode_dictionary(value.data)
        except UNDECODABLE as error:
            raise ProtocolError(f"not a DHT value: {error}") from None
        with DictionaryDHTValue().freeze() as dictionary:
            for subkey, data, expires_at in entries:
                dictionary.store(subkey, data, expires_at)
            dictionary.latest_expiration_time = latest
            return dictionary


def install_validators(node: DHTNode, validator: SignedSubkeyValidator) -> None:
    """Make a DHT node decode strictly, drop the invalid entries of a dictionary instead of all of it, ignore replies
    that expire too late, which would end the search for other replicas, and not count a peer that rejected an entry as
    a replica.
    """
    protocol = node.protocol
    protocol.serializer = StrictSerializer
    protocol._validate_dictionary = functools.partial(_drop_invalid, validator)
    protocol.call_find = functools.partial(_find_within_ttl, validator, protocol.call_find)
    protocol.call_store = functools.partial(_store_if_valid, protocol.call_store)


async def _store_if_valid(store: Callable[..., Awaitable[list[bool] | None]], *args: Any, **kwargs: Any) -> Any:
    """`DHTProtocol.call_store`; None, as if there was no reply, from a peer that stored nothing.

    `DHTNode.store` reports the last peer's reply: one that has the entry already would turn a success into a failure.
    """
    stored = await store(*args, **kwargs)
    return stored if stored and any(stored) else None


async def _find_within_ttl(
    validator: SignedSubkeyValidator, find: Callable[..., Awaitable[Any]], peer: Any, keys: Collection[Any]
) -> Any:
    """`DHTProtocol.call_find`, without the values that expire too late: {key: (value or None, nearest peers)}."""
    replies = await find(peer, keys)
    for key, (value, nearest) in list((replies or {}).items()):
        if value is not None and not validator.within_ttl(value.expiration_time):
            replies[key] = None, nearest
    return replies


def _drop_invalid(validator: SignedSubkeyValidator, key: bytes, dictionary: DictionaryDHTValue) -> bool:
    with dictionary.freeze():
        for subkey, (value, expires_at) in list(dictionary.items()):
            if not validator.validate(DHTRecord(key, MSGPackSerializer.dumps(subkey), value, expires_at)):
                del dictionary[subkey]
    return True


def _signed(record: DHTRecord, value: bytes) -> bytes:
    """The bytes that an entry's signature is for."""
    return b"".join((_CONTEXT, record.key, record.subkey, struct.pack(">d", record.expiration_time), value))
