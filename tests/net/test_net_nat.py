"""Two peers behind routers that masquerade meet through a relay between them; and the routers themselves.

Each peer is in a network namespace whose only way out is a router of `nat_box`. Only root can make these.
"""

from __future__ import annotations

import os
import random
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from nat_box import Router
from test_net_relay import ip, namespaces, peer

pytestmark = pytest.mark.processes

NAT_BOX = Path(__file__).with_name("nat_box.py")
LEFT, PUBLIC, RIGHT = (f"swarmnat{os.getpid()}{side}" for side in "apb")
RELAY_IP, LEFT_IP, RIGHT_IP = "198.18.0.2", "198.18.0.11", "198.18.0.12"


@contextmanager
def behind_routers() -> Iterator[None]:
    """10.1.0.2 LEFT - router 198.18.0.11 - PUBLIC 198.18.0.2 - router 198.18.0.12 - RIGHT 10.2.0.2"""
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        pytest.skip("no /dev/net/tun, of which the routers between the namespaces are made")
    with namespaces(LEFT, PUBLIC, RIGHT), ExitStack() as stack:
        ip("-n", PUBLIC, "addr", "add", f"{RELAY_IP}/32", "dev", "lo")
        forward = ["ip", "netns", "exec", PUBLIC, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"]
        subprocess.run(forward, check=True)
        for inside, host, outside in ((LEFT, "10.1.0.2", LEFT_IP), (RIGHT, "10.2.0.2", RIGHT_IP)):
            command = [sys.executable, str(NAT_BOX), inside, PUBLIC, outside]
            box = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(box.communicate, timeout=10)
            assert box.stdout is not None
            assert box.stdout.readline() == "ready\n"
            ip("-n", inside, "addr", "add", f"{host}/32", "dev", "nat")
        yield


def reaches(network: str, host: str, port: int) -> bool:
    code = f"import socket; socket.create_connection(({host!r}, {port}), timeout=1)"
    command = ["ip", "netns", "exec", network, sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, timeout=20).returncode == 0


def test_two_peers_behind_routers_meet_through_a_relay() -> None:
    with behind_routers(), peer(PUBLIC, "relay", "0.0.0.0") as relay:
        public = next(a for a in relay["addresses"] if f"/ip4/{RELAY_IP}/" in a and "/tls" not in a)
        with peer(RIGHT, "listen", "0.0.0.0", public) as listener:
            circuit = f"{public}/p2p-circuit/p2p/{listener['peer']}"
            assert circuit in listener["addresses"]
            own = next(a for a in listener["addresses"] if "/ip4/10.2.0.2/" in a)
            port = int(own.split("/")[4])
            assert reaches(LEFT, RELAY_IP, int(public.split("/")[4]))
            assert not reaches(LEFT, RIGHT_IP, port)
            assert not reaches(LEFT, "10.2.0.2", port)
            with peer(LEFT, "dial", "0.0.0.0", public, listener["peer"], *listener["addresses"]) as said:
                assert said["echoed"] == said["of"]


def checksum(data: bytes) -> int:
    data += bytes(len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def udp(source: tuple[str, int], target: tuple[str, int], data: bytes) -> bytearray:
    ips = socket.inet_aton(source[0]) + socket.inet_aton(target[0])
    head = struct.pack("!BBHHHBBH", 0x45, 0, 28 + len(data), 0, 0, 64, socket.IPPROTO_UDP, 0) + ips
    body = struct.pack("!HHHH", source[1], target[1], 8 + len(data), 0) + data
    pseudo = ips + struct.pack("!BBH", 0, socket.IPPROTO_UDP, len(body))
    head = head[:10] + checksum(head).to_bytes(2, "big") + head[12:]
    return bytearray(head + body[:6] + checksum(pseudo + body).to_bytes(2, "big") + body[8:])


def ends(packet: bytes) -> tuple[tuple[str, int], tuple[str, int]]:
    ports = struct.unpack_from("!HH", packet, 20)
    return (socket.inet_ntoa(packet[12:16]), ports[0]), (socket.inet_ntoa(packet[16:20]), ports[1])


def test_a_router_rewrites_what_it_should_and_turns_the_rest_away() -> None:
    rng = random.Random(7)
    router = Router(LEFT_IP)
    home, server, stranger = ("10.1.0.2", 4000), (RELAY_IP, 53), (RIGHT_IP, 53)
    for _ in range(50):
        data = rng.randbytes(rng.randrange(0, 40))
        sent = router.out(udp(home, server, data))
        assert sent is not None
        outside, there = ends(sent)
        assert (outside[0], there) == (LEFT_IP, server)
        assert sent == udp(outside, server, data), "checksums and all"
        assert router.back(udp(server, outside, data)) == udp(server, home, data)
        assert router.back(udp(stranger, outside, data)) is None
        assert router.back(udp(server, (LEFT_IP, outside[1] + 1), data)) is None
    assert router.turned_away == 100
