"""Invitations: pasted text, and the bytes in it behind a checksum that fits. What is accepted can be passed on."""

from __future__ import annotations

from collections.abc import Iterator

import base58
import msgspec
from multiaddr import Multiaddr

from swarm.errors import UsageError
from swarm.net.discovery import invite
from swarm.net.discovery.invite import PREFIX, VERSION, Invite

INSTRUMENT = ("swarm.net.discovery.invite", "swarm.net.base.multiaddr")


def run(data: bytes) -> None:
    for token in (data.decode("latin-1"), PREFIX + base58.b58encode_check(bytes([VERSION]) + data).decode()):
        try:
            parsed = invite.parse(token)
        except UsageError:
            continue
        assert invite.parse(parsed.token()) == parsed


def seeds() -> Iterator[bytes]:
    peer = "/ip4/10.0.0.1/tcp/4001/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    dns = (
        "/dns4/example.org/udp/4001/quic-v1/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN/p2p-circuit"
        + (peer[peer.index("/p2p/") :])
    )
    yield Invite((peer,), "smollm2-135m", "home", "secret secret").token().encode()
    yield msgspec.msgpack.encode([[Multiaddr(peer).to_bytes(), Multiaddr(dns).to_bytes()], "model", "net", "s"])
