"""One peer has another dial its addresses; nobody can make it dial anything else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest
from transport_conformance import echo

from swarm.config import Libp2pImpl
from swarm.errors import ConnectionLost, NetworkError
from swarm.net.discovery import autonat
from swarm.net.discovery.autonat import PROTOCOL, AutoNatPolicy, probe
from swarm.net.libp2p.go_daemon_control import accepted_from
from swarm.net.libp2p.options import HostOptions
from swarm.net.security.identity import Identity
from swarm.net.transports.multi import MultiTransport

pytestmark = pytest.mark.processes

OTHER = Identity.from_seed(bytes(32)).peer


@contextlib.asynccontextmanager
async def running(libp2p_impl: Libp2pImpl, *peers: str) -> AsyncIterator[MultiTransport]:
    transport = await MultiTransport.start(Identity.generate(), HostOptions(peers=peers), libp2p_impl=libp2p_impl)
    try:
        await transport.serve(echo)
        yield transport
    finally:
        await transport.close()


@pytest.mark.parametrize(("client", "server"), [("go", "go"), ("python", "go"), ("go", "python")])
async def test_what_another_peer_reaches(
    client: Libp2pImpl, server: Libp2pImpl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autonat, "POLICY", AutoNatPolicy(client_interval_s=0.0, request_interval_s=0.0))
    async with running(server) as other, running(client, other.addresses[0]) as us:
        verdict = await us.check_reachability(other.peer)
        assert verdict.observed == "127.0.0.1"
        assert set(verdict.reached) == set(us.addresses)
        assert not verdict.missed
        closed = (f"/ip4/127.0.0.1/tcp/1/p2p/{us.peer}", f"/ip4/127.0.0.1/tcp/1/tls/p2p/{us.peer}")
        verdict = await probe(us.daemon.daemon, other.peer, closed)
        assert set(verdict.missed) == set(closed)
        assert not verdict.reached


async def test_only_a_clients_own_addresses_at_its_own_ip_are_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autonat, "POLICY", AutoNatPolicy(client_interval_s=0.0, request_interval_s=0.0))
    accepts = 0

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepts
        accepts += 1
        writer.close()

    async with running("go") as other, running("go", other.addresses[0]) as us:
        async with await asyncio.start_server(accepted, "127.0.0.2", 0) as server:
            port = server.sockets[0].getsockname()[1]
            elsewhere = [f"/ip4/127.0.0.2/tcp/{port}/p2p/{us.peer}", f"/ip4/127.0.0.2/tcp/{port}/tls/p2p/{us.peer}"]
            elsewhere += [f"/dns4/localhost/tcp/{port}/p2p/{us.peer}", f"/ip4/127.0.0.1/udp/{port}/p2p/{us.peer}"]
            elsewhere += [f"/ip4/127.0.0.1/tcp/{port}/p2p/{OTHER}", f"{other.addresses[0]}/p2p-circuit/p2p/{us.peer}"]
            elsewhere += [f"/ip4/127.0.0.1/tcp/99999999/p2p/{us.peer}", "nonsense"]
            verdict = await probe(us.daemon.daemon, other.peer, elsewhere)
        assert verdict.reached == ()
        assert set(verdict.missed) <= {f"/ip4/127.0.0.1/tcp/99999999/p2p/{us.peer}"}
        assert accepts == 0


async def test_clients_are_rate_limited_and_malformed_requests_refused() -> None:
    async with running("go") as other, running("go", other.addresses[0]) as us:
        assert (await us.check_reachability(other.peer)).reached
        with pytest.raises(NetworkError, match="asked too often"):
            await us.check_reachability(other.peer)
        many = msgspec.msgpack.encode([["/ip4/127.0.0.1/tcp/1"] * 9])
        for junk in (b"", b"\xff" * 100, bytes(3000), many):
            stream = await us.daemon.control.open_stream(other.peer, PROTOCOL)
            await stream.write_delimited(junk)
            with pytest.raises(ConnectionLost):
                await stream.preamble()
            stream.abort()


def test_where_a_request_came_from() -> None:
    from swarm.net.libp2p._hivemind import HivemindMultiaddr, PeerID
    from swarm.net.libp2p._hivemind import p2pd_pb2 as pb

    peer = PeerID.from_base58(OTHER).to_bytes()
    for address, ip in (
        ("/ip4/203.0.113.7/tcp/4001", "203.0.113.7"),
        ("/ip6/2001:db8::1/tcp/4001", "2001:db8::1"),
        (f"/ip4/203.0.113.7/tcp/4001/p2p/{OTHER}/p2p-circuit", ""),
    ):
        raw = HivemindMultiaddr(address).to_bytes()
        assert accepted_from(pb.StreamInfo(peer=peer, addr=raw, proto="x").SerializeToString()) == (OTHER, ip)
    assert accepted_from(pb.StreamInfo(peer=peer, addr=b"", proto="x").SerializeToString()) == (OTHER, "")
