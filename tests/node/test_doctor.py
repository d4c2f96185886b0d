"""`swarm-node doctor`, `invite` and `join` on set-ups that cannot work: one sentence names the cause, exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from swarm.config import NodeConfig
from swarm.net.dht.directory import DhtDirectory
from swarm.net.discovery.autonat import ReachabilityReport
from swarm.net.discovery.invite import MAX_PEERS, Invite, parse
from swarm.net.libp2p.options import HostOptions
from swarm.net.security.identity import Identity
from swarm.net.security.swarm_secret import SwarmSecret
from swarm.net.transports.multi import MultiTransport
from swarm_kernels.ops import dispatch
from swarm_node.commands import doctor
from swarm_node.commands.doctor import Finding
from swarm_node.network import invite

pytestmark = pytest.mark.processes

PEER = Identity.from_seed(bytes(32)).peer
CLOSED = f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"
HERE = "/ip4/127.0.0.1/tcp/0"
SECRET = "a secret of our own"


def test_findings_without_other_peers() -> None:
    assert [doctor.memory(gb * 1e9).verdict for gb in (0.5, 8)] == ["broken", "ok"]
    assert [doctor.disk(gb * 1e9).verdict for gb in (0.5, 80)] == ["warning", "ok"]
    assert doctor.gpu(99).verdict == "broken"
    assert doctor.direct("no OpenSSL").verdict == "warning"
    assert doctor.kernels().verdict == "ok"
    for host, verdict in (("8.8.8.8", "ok"), ("192.168.1.5", "warning"), ("127.0.0.1", "warning")):
        found = doctor.reachability((f"/ip4/{host}/tcp/4001/p2p/{PEER}",))
        assert found.verdict == verdict, found
    relayed = (f"/ip4/192.168.1.5/tcp/1/p2p/{PEER}", f"/ip4/8.8.8.8/tcp/1/p2p/{PEER}/p2p-circuit/p2p/{PEER}")
    assert "relay" in doctor.reachability(relayed).sentence


def test_without_a_compiler_the_finding_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "isa", lambda: "reference")
    monkeypatch.setattr(dispatch, "describe", lambda: "plain torch: no C++ compiler found (g++ or clang++)")
    found = doctor.kernels()
    assert found.verdict == "warning"
    assert "no C++ compiler found" in found.sentence


def test_findings_of_a_dial_back() -> None:
    here, there = (f"/ip4/8.8.8.8/tcp/{port}/p2p/{PEER}" for port in (4001, 4002))
    for verdict, kind, words in (
        (ReachabilityReport("8.8.8.8", (here,), ()), "ok", "reached this machine (port 4001)"),
        (ReachabilityReport("8.8.8.8", (here,), (there,)), "warning", "reached only port 4001: open port 4002"),
        (ReachabilityReport("8.8.8.8", (), (here,)), "warning", "reached nothing: open port 4001"),
        (
            ReachabilityReport("8.8.8.8", (), ()),
            "warning",
            "others see this machine as 8.8.8.8, which is its router's address",
        ),
        (ReachabilityReport("192.168.1.5", (here,), ()), "ok", "in the home network"),
        (ReachabilityReport("", (), ()), "warning", "through a relay"),
    ):
        found = doctor.dialled_back(verdict)
        assert (found.verdict, words in found.sentence) == (kind, True), found


@asynccontextmanager
async def swarm(secret: str = "", relay: bool = False) -> AsyncIterator[tuple[MultiTransport, DhtDirectory]]:
    keys = SwarmSecret(secret) if secret else None
    async with AsyncExitStack() as stack:
        transport = await MultiTransport.start(
            Identity.generate(), HostOptions((HERE,), relay_server=relay), secret=keys
        )
        stack.push_async_callback(transport.close)

        async def handle(connection: object) -> None:
            return

        await transport.serve(handle)
        directory = await DhtDirectory.start(transport.daemon, secret=keys)
        stack.push_async_callback(directory.close)
        yield transport, directory


async def findings(**settings: object) -> dict[str, Finding]:
    """By subject; of several, the worst."""
    found: dict[str, Finding] = {}
    async for finding in doctor.examine(NodeConfig(listen=(HERE,), **settings)):  # type: ignore[arg-type]
        if finding.subject not in found or finding.verdict == "broken":
            found[finding.subject] = finding
    return found


async def test_a_healthy_private_swarm_and_a_wrong_secret() -> None:
    async with swarm(SECRET, relay=True) as (transport, _):
        peers = transport.addresses[:1]
        found = await findings(peers=peers, secret=SECRET, relay_via=peers)
        assert {name for name, finding in found.items() if finding.verdict == "broken"} == set(), found
        assert found["clock"].verdict == found["relay"].verdict == found["dial-back"].verdict == "ok"
        for secret in ("", "another swarm's secret"):
            found = await findings(peers=peers, secret=secret)
            assert found["peers"].verdict == "broken"
            assert "secret" in found["peers"].sentence or "private swarm" in found["peers"].sentence


async def test_a_wrong_clock_a_closed_port_and_a_dead_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm() as (transport, _):
        peers = transport.addresses[:1]
        # Both ends live in this process and have one clock, so the tolerance is what must change.
        monkeypatch.setattr("hivemind.dht.protocol.MAX_DHT_TIME_DISCREPANCY_SECONDS", -600)
        found = await findings(peers=(*peers, CLOSED), relay_via=(CLOSED, *peers))
        assert found["clock"].verdict == "broken"
        assert "clock" in found["clock"].sentence
        assert "does not answer" in found["peers"].sentence
        assert f"the relay {CLOSED} does not answer" in found["relay"].sentence


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "swarm_node.commands.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def test_join_names_the_cause_in_one_sentence() -> None:
    token = Invite((CLOSED,), "smollm2-135m").token()
    causes = {
        "invitation is damaged": ("--invite", token[:-3]),
        "is not an invitation": ("--invite", ""),
        "none of the peers to join answered": ("--invite", token),
    }
    running = {expected: start("join", "--listen", HERE, *arguments) for expected, arguments in causes.items()}
    for expected, process in running.items():
        _, output = process.communicate(timeout=120)
        assert process.returncode == 2, output
        assert expected in output
        assert len(output.strip().splitlines()) == 1, output


def test_doctor_exits_with_2_and_invite_prints_a_token() -> None:
    examining = start("doctor", "--listen", HERE, "--peer", CLOSED, "--json")
    inviting = start("invite", "--peer", CLOSED, "--model", "m", "--network", "friends", SWARM_SECRET=SECRET)
    output, _ = examining.communicate(timeout=120)
    assert examining.returncode == 2
    verdicts = {(found["subject"], found["verdict"]) for found in map(json.loads, output.splitlines())}
    assert ("peers", "broken") in verdicts
    assert ("direct", "ok") in verdicts
    output, _ = inviting.communicate(timeout=120)
    assert inviting.returncode == 0
    assert parse(output.split()[0]) == Invite((CLOSED,), "m", "friends", SECRET)
    assert "nobody else can join" in output


def test_addresses_in_an_invitation() -> None:
    public, private, loopback = (f"/ip4/{host}/tcp/1/p2p/{PEER}" for host in ("8.8.8.8", "10.0.0.1", "127.0.0.1"))
    direct, circuit = f"/ip4/8.8.8.8/tcp/2/tls/p2p/{PEER}", f"{public}/p2p-circuit/p2p/{PEER}"
    at_home = f"/ip4/127.0.0.1/tcp/2/tls/p2p/{PEER}"
    assert invite.shareable((loopback, direct, at_home, private, circuit, public)) == (public, circuit, private, direct)
    assert invite.shareable((at_home, public)) == (public,), "nobody else reaches a loopback address"
    assert invite.shareable((loopback, at_home)) == (loopback, at_home)
    many = tuple(f"/ip4/8.8.8.{i}/tcp/{i}{tls}/p2p/{PEER}" for i in range(1, 9) for tls in ("", "/tls"))
    assert len(invite.shareable(many)) == invite.MAX_ADDRESSES + invite.MAX_DIRECT <= MAX_PEERS
    config = NodeConfig(secret=SECRET)
    assert parse(invite.how_to_join(config, "m", (public,)).split()[-1]).secret == SECRET
    assert invite.how_to_join(NodeConfig(), "m", (loopback, public)) == f"others join with --peer {public}"
    assert len(invite.new_secret()) >= 22
