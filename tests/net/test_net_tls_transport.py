"""The direct transport on 127.0.0.1: the shared conformance suite on both event loops, its errors, its limits."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
import uvloop
from transport_conformance import SMALL, Conformance, echo

from swarm.errors import AddressInUse, ConnectionLost, PeerUnreachable, UsageError
from swarm.messages import Ping
from swarm.net.base.tls_addresses import TlsEndpoint, advertised, is_direct, parse
from swarm.net.base.transport import Transport, TransportPolicy
from swarm.net.security.identity import Identity
from swarm.net.transports import tls
from swarm.net.transports.tls import TlsTransport

HOME = ("127.0.0.1",)


class TestDirect(Conformance):
    @contextlib.asynccontextmanager
    async def pair(self) -> AsyncIterator[tuple[Transport, Transport]]:
        caller = await TlsTransport.start(Identity.generate())
        listener = await TlsTransport.start(Identity.generate(), HOME, limits=SMALL)
        try:
            yield caller, listener
        finally:
            await asyncio.gather(caller.close(), listener.close())


@pytest.mark.parametrize("name", [name for name in dir(Conformance) if name.startswith("test_")])
def test_the_same_on_uvloop(name: str) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(getattr(TestDirect(), name)())


@contextlib.asynccontextmanager
async def running(*hosts: str, **kwargs: object) -> AsyncIterator[TlsTransport]:
    transport = await TlsTransport.start(Identity.generate(), hosts, **kwargs)  # type: ignore[arg-type]
    try:
        yield transport
    finally:
        await transport.close()


async def test_one_good_address_among_bad_ones_will_do() -> None:
    async with running(*HOME) as listener, running() as caller:
        await listener.serve(echo)
        good = listener.addresses[0]
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()  # accepts, and never says a word
            bad = [
                f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/tls/p2p/{listener.peer}",
                f"/ip4/127.0.0.1/tcp/1/tls/p2p/{listener.peer}",
                "rubbish",
                f"/ip4/127.0.0.1/tcp/4001/p2p/{listener.peer}",
            ]
            connection = await caller.dial(listener.peer, [*bad, good, good])
            await connection.send(Ping(3))
            assert (await connection.receive())[0] == Ping(3)
            with pytest.raises(PeerUnreachable, match="no direct address"):
                await caller.dial(listener.peer, bad[2:])
            with pytest.raises(PeerUnreachable, match="port 1"):
                await caller.dial(listener.peer, bad[1:])
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await caller.dial(listener.peer, bad[:1])


async def test_connections_are_bounded() -> None:
    async def alive(connection: tls.Connection) -> bool:
        try:
            await connection.send(Ping(1))
            return (await connection.receive())[0] == Ping(1)
        except ConnectionLost:
            return False

    async with running(*HOME, policy=TransportPolicy(2)) as listener, running() as caller:
        await listener.serve(echo)
        opened = [await caller.dial(listener.peer, listener.addresses) for _ in range(2)]
        with pytest.raises(PeerUnreachable):
            await caller.dial(listener.peer, listener.addresses)
        assert [await alive(connection) for connection in opened] == [True, True]


async def test_sockets_are_tuned() -> None:
    async with running(*HOME) as listener, running() as caller:
        await listener.serve(echo)
        stream = await caller.dial(listener.peer, listener.addresses)
        assert isinstance(stream, tls.FramedStream)
        raw = stream.transport_info("socket")
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


async def test_ports_and_hosts_that_cannot_be_had() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(AddressInUse, match=str(port)):
            await TlsTransport.start(Identity.generate(), HOME, port)
    with pytest.raises(UsageError, match=r"203\.0\.113\.1"):
        await TlsTransport.start(Identity.generate(), ["203.0.113.1"])


def test_addresses_are_read_as_they_are_written() -> None:
    peer = Identity.from_seed(bytes(32)).peer
    for endpoint in (TlsEndpoint("192.0.2.1", 4001), TlsEndpoint("2001:db8::1", 1)):
        address = endpoint.address(peer)
        assert is_direct(address)
        assert parse(address, peer) == endpoint
        assert parse(address, peer[:-1]) is None
    for text in ("", "/", f"/ip4/192.0.2/tcp/1/tls/p2p/{peer}", f"/ip4/192.0.2.1/tcp/0/tls/p2p/{peer}"):
        assert parse(text, peer) is None
    for port in ("65536", "-1", "1e3", "٣"):
        assert parse(f"/ip4/192.0.2.1/tcp/{port}/tls/p2p/{peer}", peer) is None


def test_which_addresses_are_advertised() -> None:
    any4, any6 = TlsEndpoint("0.0.0.0", 10), TlsEndpoint("::", 11)
    daemon = [
        "/ip4/127.0.0.1/tcp/4001/p2p/x",
        "/ip4/192.168.1.2/tcp/4001/p2p/x",
        "/ip4/192.168.1.2/udp/4001/quic/p2p/x",
        "/ip4/8.8.8.8/tcp/4001/p2p/x",
        "/ip6/2001:4860::1/tcp/4001/p2p/x",
        "/ip4/9.9.9.9/tcp/4001/p2p/relay/p2p-circuit/p2p/x",
        "/dns4/example.org/tcp/1/p2p/x",
    ]
    assert advertised([any4], daemon) == [TlsEndpoint("8.8.8.8", 10), TlsEndpoint("192.168.1.2", 10)]
    assert advertised([any4, any6], daemon)[:2] == [TlsEndpoint("8.8.8.8", 10), TlsEndpoint("2001:4860::1", 11)]
    assert advertised([any4], daemon[:1]) == [TlsEndpoint("127.0.0.1", 10)]
    assert advertised([TlsEndpoint("127.0.0.1", 5)], daemon) == [TlsEndpoint("127.0.0.1", 5)]
    assert advertised([], daemon) == []
