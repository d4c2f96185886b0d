"""Two peers that cannot reach each other, each in a network of its own, meet through a relay that stands in both.

The networks are namespaces without a route between them, which only root can make.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.processes

NODE = Path(__file__).with_name("reach_node.py")
TIMEOUT_S = 40
LEFT, RELAY, RIGHT = (f"swarm{os.getpid()}{side}" for side in "arb")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def namespaces(*names: str) -> Iterator[None]:
    """Networks of nothing but a loopback device each. Skips the test where they cannot be had."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("only root can make network namespaces, and iproute2 is needed for it")
    with ExitStack() as stack:
        for name in names:
            made = subprocess.run(["ip", "netns", "add", name], capture_output=True)
            if made.returncode:
                pytest.skip(f"this system makes no network namespaces: {made.stderr.decode().strip()}")
            stack.callback(subprocess.run, ["ip", "netns", "del", name], capture_output=True)
            ip("-n", name, "link", "set", "lo", "up")
        yield


@contextmanager
def networks() -> Iterator[None]:
    """LEFT 10.1.0.2 - 10.1.0.1 RELAY 10.2.0.1 - 10.2.0.2 RIGHT; the relay's machine forwards nothing."""
    with namespaces(LEFT, RELAY, RIGHT):
        for net, (name, end) in enumerate(((LEFT, "left"), (RIGHT, "right")), start=1):
            ip("-n", name, "link", "add", "out", "type", "veth", "peer", "name", end, "netns", RELAY)
            for where, link, host in ((name, "out", 2), (RELAY, end, 1)):
                ip("-n", where, "addr", "add", f"10.{net}.0.{host}/24", "dev", link)
                ip("-n", where, "link", "set", link, "up")
        yield


@contextmanager
def peer(network: str, *arguments: str) -> Iterator[dict[str, Any]]:
    """What the peer said first; it lives until the end of the block."""
    command = ["ip", "netns", "exec", network, sys.executable, str(NODE), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
            line = process.stdout.readline() if ready else ""
            assert line, f"{arguments} said nothing"
            yield json.loads(line)
            process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()


def test_two_peers_that_cannot_reach_each_other_meet_through_a_relay() -> None:
    with networks(), peer(RELAY, "relay", "0.0.0.0") as relay:
        by_net = {
            net: next(a for a in relay["addresses"] if f"/ip4/10.{net}." in a and "/tls" not in a) for net in "12"
        }
        with peer(RIGHT, "listen", "10.2.0.2", by_net["2"]) as listener:
            relayed = [address for address in listener["addresses"] if "/p2p-circuit" in address]
            assert relayed == [f"{by_net['2']}/p2p-circuit/p2p/{listener['peer']}"]
            # The relay's address in the listener's network means nothing to the caller; it knows the relay by its own.
            circuits = [f"{by_net['1']}/p2p-circuit/p2p/{listener['peer']}"]
            others = [address for address in listener["addresses"] if address not in relayed]
            with peer(LEFT, "dial", "10.1.0.2", by_net["1"], listener["peer"], *others, *circuits) as said:
                assert said["echoed"] == said["of"]
