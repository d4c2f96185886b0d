"""Multiaddrs in both notations: as py-multiaddr reads and writes them, and refused where they make no sense."""

from __future__ import annotations

import random

import base58
import pytest
from multiaddr import Multiaddr

from swarm.net.base import multiaddr

PEER = "12D3KooWF7H1EcNjHH51DAtxkvn4fAAzJKkUtTrLrrtaFYvV2T8T"
RSA = base58.b58encode(bytes([0x12, 0x20]) + bytes(range(32))).decode()
SAMPLES = [
    f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}",
    f"/ip4/192.0.2.1/tcp/65535/tls/p2p/{PEER}",
    f"/ip6/::1/udp/0/quic-v1/p2p/{RSA}",
    f"/ip6/2001:db8::8:800:200c:417a/udp/443/quic/p2p/{PEER}",
    f"/dns4/example.org/tcp/443/wss/p2p/{PEER}/p2p-circuit/p2p/{RSA}",
    "/dnsaddr/bootstrap.libp2p.io",
    "/ip4/10.0.0.1/tcp/1/ws",
    "/ip4/10.0.0.1/udp/9/quic-v1/webtransport/certhash/uEiAkH5a4DPGKUuOBjYw0CgwjvcJCJMD2K_1aluKR_tpevQ",
]


@pytest.mark.parametrize("text", SAMPLES)
def test_both_notations_are_py_multiaddr_s(text: str) -> None:
    reference = Multiaddr(text)
    assert multiaddr.to_bytes(text) == reference.to_bytes()
    assert multiaddr.from_bytes(reference.to_bytes()) == str(reference) == text
    assert list(multiaddr.protocols(text)) == [protocol.name for protocol in reference.protocols()]


def test_random_addresses_are_read_and_written_as_py_multiaddr_does() -> None:
    rng = random.Random(5)
    for _ in range(300):
        parts = [f"/ip4/{'.'.join(str(rng.randrange(256)) for _ in range(4))}"]
        if rng.random() < 0.5:
            parts = ["/ip6/" + ":".join(f"{rng.choice((0, 0, rng.randrange(1 << 16))):x}" for _ in range(8))]
        parts.append(f"/{rng.choice(('tcp', 'udp'))}/{rng.randrange(1 << 16)}")
        parts += rng.sample(["/quic-v1", "/ws", "/tls", "/p2p-circuit", f"/p2p/{PEER}"], rng.randrange(4))
        text = "".join(parts)
        raw = Multiaddr(text).to_bytes()
        assert multiaddr.to_bytes(text) == raw
        assert Multiaddr(multiaddr.from_bytes(raw)).to_bytes() == raw  # it writes some IPv6 addresses otherwise


def test_bytes_of_strangers_are_refused_or_come_back_as_they_were() -> None:
    rng = random.Random(6)
    refused = 0
    for _ in range(3000):
        raw = bytearray(multiaddr.to_bytes(rng.choice(SAMPLES)))
        for _ in range(rng.randrange(1, 4)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        if rng.random() < 0.3:
            del raw[rng.randrange(1, len(raw)) :]
        try:
            text = multiaddr.from_bytes(bytes(raw))
        except ValueError:
            refused += 1
        else:
            assert multiaddr.to_bytes(text) == raw
    assert 500 < refused < 3000


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "ip4/1.2.3.4",
        "/ip4",
        "/ip4/",
        "/ip4/1.2.3",
        "/ip4/::1/tcp/1",
        "/ip6/127.0.0.1/tcp/1",
        "/ip4/1.2.3.4/tcp/65536",
        "/ip4/1.2.3.4/tcp/-1",
        "/ip4/1.2.3.4/tcp/١",
        "/ip4/1.2.3.4/tcp/1/p2p/0OIl",
        "/ip4/1.2.3.4/tcp/1/p2p/abc",
        "/ip4/1.2.3.4//tcp/1",
        "/nothing/1",
        "/dns/a b/tcp/1",
        "/dns/ä/tcp/1",
        "/ip4/1.2.3.4" * 100,
    ],
)
def test_text_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        multiaddr.to_bytes(text)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        bytes([4, 1, 2, 3]),
        bytes([0xFF] * 8),
        bytes([53, 3, 97, 47, 98]),
        bytes([53, 1, 0x80]),
        bytes([0x86, 0x00, 0, 1]),
        bytes(4) * 1024,
    ],
)
def test_bytes_that_are_no_address_are_refused(raw: bytes) -> None:
    with pytest.raises(ValueError):
        multiaddr.from_bytes(raw)
