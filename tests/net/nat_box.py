"""A router that masquerades, in user space: where root may make network namespaces, it needs no NAT of the kernel's.

    python nat_box.py INSIDE_NETNS OUTSIDE_NETNS OUTSIDE_IP

Makes a device `nat` in the namespace INSIDE, through which everything there leaves, and one in OUTSIDE, behind which
OUTSIDE_IP is. As home routers do, it takes from outside only what answers something that went out to the same address
and port. Prints a line when it works, and how much it turned away when its stdin ends. Not a test.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import socket
import struct
import subprocess
import sys

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
TCP, UDP = socket.IPPROTO_TCP, socket.IPPROTO_UDP
FIRST_PORT = 20_000
CHECKSUM = {TCP: 16, UDP: 6}  # where it is in the header

_libc = ctypes.CDLL(None, use_errno=True)


def device(netns: str, name: str) -> int:
    """A new TUN device in a namespace, as the descriptor of its other end."""
    with open(f"/run/netns/{netns}", "rb") as namespace:
        if _libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {netns}")
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return tun


def rewritten(packet: bytearray, head: int, at: int, ip: bytes, port_at: int, port: int) -> bytes:
    """`packet` with another address at `at` and another port at `port_at`; its checksums follow (RFC 1624)."""
    protocol = packet[9]
    checksum = head + CHECKSUM[protocol]
    before = bytes(packet[at : at + 4]) + bytes(packet[port_at : port_at + 2])
    packet[at : at + 4] = ip
    packet[port_at : port_at + 2] = port.to_bytes(2, "big")
    after = ip + port.to_bytes(2, "big")
    _adjust(packet, 10, before[:4], after[:4])
    if protocol == TCP or packet[checksum : checksum + 2] != b"\0\0":
        _adjust(packet, checksum, before, after)
    return bytes(packet)


def _adjust(packet: bytearray, at: int, before: bytes, after: bytes) -> None:
    total = ~int.from_bytes(packet[at : at + 2], "big") & 0xFFFF
    for i in range(0, len(before), 2):
        total += (~int.from_bytes(before[i : i + 2], "big") & 0xFFFF) + int.from_bytes(after[i : i + 2], "big")
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    packet[at : at + 2] = (~total & 0xFFFF).to_bytes(2, "big")


class Router:
    """The table of a router: (protocol, inside address, inside port) -> outside port, and whom it has sent to."""

    def __init__(self, outside_ip: str) -> None:
        self._ip = socket.inet_aton(outside_ip)
        self._ports: dict[tuple[int, bytes, int], int] = {}
        self._inside: dict[tuple[int, int], tuple[bytes, int]] = {}
        self._sent: set[tuple[int, int, bytes, int]] = set()
        self.turned_away = 0

    def out(self, packet: bytearray) -> bytes | None:
        """What leaves for a packet from inside."""
        if packet[0] >> 4 != 4 or packet[9] not in CHECKSUM:
            return None
        protocol, head = packet[9], (packet[0] & 15) * 4
        source, target = struct.unpack_from("!HH", packet, head)
        key = protocol, bytes(packet[12:16]), source
        port = self._ports.setdefault(key, FIRST_PORT + len(self._ports))
        self._inside[protocol, port] = key[1:]
        self._sent.add((protocol, port, bytes(packet[16:20]), target))
        return rewritten(packet, head, 12, self._ip, head, port)

    def back(self, packet: bytearray) -> bytes | None:
        """What enters for a packet from outside; None if no mapping exists."""
        if packet[0] >> 4 != 4 or packet[9] not in CHECKSUM:
            return None
        protocol, head = packet[9], (packet[0] & 15) * 4
        source, target = struct.unpack_from("!HH", packet, head)
        if (protocol, target, bytes(packet[12:16]), source) not in self._sent:
            self.turned_away += 1
            return None
        ip, port = self._inside[protocol, target]
        return rewritten(packet, head, 16, ip, head + 2, port)


def main(inside: str, outside: str, outside_ip: str) -> None:
    inner, outer = device(inside, "nat"), device(outside, f"nat{outside_ip.rpartition('.')[2]}")
    for netns, name, route in (
        (inside, "nat", "default"),
        (outside, f"nat{outside_ip.rpartition('.')[2]}", outside_ip),
    ):
        for arguments in (("link", "set", name, "up", "mtu", "1400"), ("route", "add", route, "dev", name)):
            subprocess.run(["ip", "-n", netns, *arguments], check=True)
    router = Router(outside_ip)
    print("ready", flush=True)
    while True:
        readable, _, _ = select.select([inner, outer, sys.stdin], [], [])
        if sys.stdin in readable:
            break
        for source, target, translate in ((inner, outer, router.out), (outer, inner, router.back)):
            if source in readable:
                packet = translate(bytearray(os.read(source, 2048)))
                if packet is not None:
                    os.write(target, packet)
    print(json.dumps({"turned_away": router.turned_away}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
