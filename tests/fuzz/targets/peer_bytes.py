"""What a peer shows before it is known: its certificate, an announcement in the local network, AutoNAT's messages."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from fuzz_values import filled

from swarm.errors import UNDECODABLE, ProtocolError
from swarm.net.discovery import autonat
from swarm.net.discovery.mdns import SwarmTag
from swarm.net.security.identity import Identity
from swarm.net.security.tls_certificates import make_certificate, peer_id_of_certificate

INSTRUMENT = ("swarm.net.discovery", "swarm.net.libp2p.options", "swarm.net.security", "multiaddr")
_tag = SwarmTag("", "", None)


def run(data: bytes) -> None:
    kind, rest = data[:1], data[1:]
    if kind == b"c":
        try:
            peer_id_of_certificate(rest)
        except ProtocolError:
            return
    elif kind == b"m":
        addresses = _tag.decode({"network": b"", "model": b"", "d0": rest[:200], "d1": rest[200:400]})
        assert all(isinstance(address, str) for address in addresses)
    else:
        for decode in (autonat._decode_request, autonat._decode_reply):
            try:
                decode(rest)
            except UNDECODABLE:
                continue


def seeds() -> Iterator[bytes]:
    pem, _ = make_certificate(Identity.generate())
    yield b"c" + x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)
    yield b"m/ip4/10.0.0.1/tcp/4001/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN\n/ip6/::1/tcp/1"
    for message in (autonat._ProbeRequest, autonat._ProbeReply):
        yield b"a" + msgspec.msgpack.encode(filled(message))
