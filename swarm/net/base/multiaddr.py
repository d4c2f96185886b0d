"""Multiaddrs, as text and as bytes: `/ip4/192.0.2.1/tcp/4001/p2p/<peer id>`, <https://multiformats.io/multiaddr>.

Owns both notations of the protocols that libp2p addresses are made of. py-multiaddr knows more of them and brings 24 MB
along; what a libp2p host says is still read by it. Opens no socket and resolves no name.
"""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import base58

MAX_LENGTH = 1024  # of either notation


@dataclass(frozen=True, slots=True)
class _Protocol:
    """`size`: of its value in bytes; 0: it has none; None: its length stands before it."""

    name: str
    code: int
    size: int | None = 0
    pack: Callable[[str], bytes] = lambda text: b""
    unpack: Callable[[bytes], str] = lambda raw: ""


def _pack_port(text: str) -> bytes:
    if not (text.isascii() and text.isdigit()) or len(text) > 5:
        raise ValueError(f"'{text}' is not a port")
    port = int(text)
    if port >= 1 << 16:
        raise ValueError(f"{port} is not a port")
    return port.to_bytes(2)


def _unpack_port(raw: bytes) -> str:
    return str(int.from_bytes(raw))


def _pack_name(text: str) -> bytes:
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError(f"'{text}' is not the name of a host")
    return text.encode()


def _unpack_name(raw: bytes) -> str:
    text = raw.decode("ascii")
    if "/" in text:
        raise ValueError("the name of a host has a slash")
    _pack_name(text)
    return text


def _pack_peer(text: str) -> bytes:
    raw = base58.b58decode(text)
    _check_multihash(raw)
    return raw


def _unpack_peer(raw: bytes) -> str:
    _check_multihash(raw)
    return base58.b58encode(raw).decode()


def _check_multihash(raw: bytes) -> None:
    """A peer id is a hash function's code, a length, and so many bytes."""
    if len(raw) < 3 or raw[0] not in (0x00, 0x12) or raw[1] != len(raw) - 2:
        raise ValueError("that is not a peer id")


def _pack_certificate(text: str) -> bytes:
    if not text.startswith("u"):  # multibase: base64url without padding
        raise ValueError(f"'{text}' is not the hash of a certificate")
    return base64.b64decode(text[1:] + "=" * (-len(text[1:]) % 4), altchars=b"-_", validate=True)


def _unpack_certificate(raw: bytes) -> str:
    return "u" + base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _pack_ip4(text: str) -> bytes:
    return ipaddress.IPv4Address(text).packed


def _pack_ip6(text: str) -> bytes:
    return ipaddress.IPv6Address(text).packed


_PROTOCOLS = (
    _Protocol("ip4", 4, 4, _pack_ip4, lambda raw: str(ipaddress.IPv4Address(raw))),
    _Protocol("ip6", 41, 16, _pack_ip6, lambda raw: str(ipaddress.IPv6Address(raw))),
    *(_Protocol(name, code, 2, _pack_port, _unpack_port) for name, code in (("tcp", 6), ("udp", 273))),
    *(
        _Protocol(name, code, None, _pack_name, _unpack_name)
        for name, code in (("dns", 53), ("dns4", 54), ("dns6", 55), ("dnsaddr", 56), ("sni", 449))
    ),
    _Protocol("p2p", 421, None, _pack_peer, _unpack_peer),
    _Protocol("certhash", 466, None, _pack_certificate, _unpack_certificate),
    *(
        _Protocol(name, code)
        for name, code in (
            *(("p2p-circuit", 290), ("tls", 448), ("noise", 454), ("quic", 460), ("quic-v1", 461)),
            *(("webtransport", 465), ("ws", 477), ("wss", 478), ("webrtc-direct", 280), ("webrtc", 281)),
        )
    ),
)
_BY_NAME = {protocol.name: protocol for protocol in _PROTOCOLS}
_BY_CODE = {protocol.code: protocol for protocol in _PROTOCOLS}


def to_bytes(text: str) -> bytes:
    """Raises ValueError with what is wrong."""
    return b"".join(_varint(protocol.code) + _sized(protocol, value) for protocol, value in _parts(text))


def from_bytes(raw: bytes) -> str:
    """Raises ValueError with what is wrong."""
    if not 0 < len(raw) <= MAX_LENGTH:
        raise ValueError(f"an address has 1 to {MAX_LENGTH} bytes")
    text, at = "", 0
    while at < len(raw):
        code, at = _read_varint(raw, at)
        protocol = _BY_CODE.get(code)
        if protocol is None:
            raise ValueError(f"protocol {code} is not known")
        size = protocol.size
        if size is None:
            size, at = _read_varint(raw, at)
        if size > len(raw) - at:
            raise ValueError("it ends too early")
        text += f"/{protocol.name}"
        if protocol.size != 0:
            text += f"/{protocol.unpack(raw[at : at + size])}"
        at += size
    return text


def protocols(text: str) -> tuple[str, ...]:
    """The names of its protocols. Raises ValueError with what is wrong."""
    return tuple(protocol.name for protocol, _ in _parts(text))


def _parts(text: str) -> Iterator[tuple[_Protocol, bytes]]:
    """Each protocol with its value. Raises ValueError."""
    if not text.startswith("/") or len(text) > MAX_LENGTH:
        raise ValueError(f"an address begins with a slash and has at most {MAX_LENGTH} characters")
    words = iter(text.split("/")[1:])
    for name in words:
        protocol = _BY_NAME.get("p2p" if name == "ipfs" else name)
        if protocol is None:
            raise ValueError(f"protocol '{name}' is not known")
        value = b""
        if protocol.size != 0:
            word = next(words, None)
            if not word:
                raise ValueError(f"nothing follows /{name}")
            value = protocol.pack(word)
        yield protocol, value


def _sized(protocol: _Protocol, value: bytes) -> bytes:
    return value if protocol.size is not None else _varint(len(value)) + value


def _varint(number: int) -> bytes:
    """Unsigned LEB128."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _read_varint(raw: bytes, at: int) -> tuple[int, int]:
    """-> the number, and where it ends. Raises ValueError."""
    number = 0
    for index, byte in enumerate(raw[at : at + 3]):
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            if index and not byte:
                raise ValueError("a number has needless bytes")
            return number, at + index + 1
    raise ValueError("it ends within a number, or the number is too large")
