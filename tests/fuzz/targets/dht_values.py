"""Values in the DHT: text, bytes and dictionaries of signed entries, as a replica returns or stores them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from swarm.errors import ProtocolError
from swarm.net.dht.validation import SignedSubkeyValidator, StrictSerializer, _drop_invalid
from swarm.net.libp2p._hivemind import DHTRecord, DictionaryDHTValue
from swarm.net.security.identity import Identity

INSTRUMENT = ("swarm.net.dht", "swarm.net.security.identity", "hivemind.dht.storage", "hivemind.dht.validation")
_validator = SignedSubkeyValidator(Identity.generate(), lambda: 1000.0)


def run(data: bytes) -> None:
    _validator.validate(DHTRecord(b"key", data[:80], data[80:], 1010.0))
    try:
        value = StrictSerializer.loads(data)
    except ProtocolError:
        return
    assert isinstance(value, str | bytes | DictionaryDHTValue)
    if isinstance(value, DictionaryDHTValue):
        _drop_invalid(_validator, b"key", value)
        assert not value.data, "an entry without its peer's signature is kept"
    else:
        assert StrictSerializer.loads(StrictSerializer.dumps(value)) == value


def seeds() -> Iterator[bytes]:
    dictionary = DictionaryDHTValue()
    peer = _validator._identity.peer
    dictionary.store(peer, StrictSerializer.dumps(b"x" * 80), 1010.0)
    dictionary.store("b", b"", 1020.5)
    yield StrictSerializer.dumps(dictionary)
    yield StrictSerializer.dumps(peer) + bytes(20) + StrictSerializer.dumps(b"x") + bytes(64)
    yield StrictSerializer.dumps(b"y" * 300)
    yield msgspec.msgpack.encode(msgspec.msgpack.Ext(0x51, b""))
