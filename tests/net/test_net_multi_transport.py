"""Both transports as one on 127.0.0.1: which one reaches a peer, and how a live link migrates."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
from child_processes import children
from transport_conformance import drain, echo

from swarm.errors import AddressInUse, ConnectionLost, NetworkError, PeerUnreachable, UsageError
from swarm.messages import AnyMessage, CloseSession, Ping, SessionOpened
from swarm.net.base.tls_addresses import is_direct
from swarm.net.base.transport import Connection
from swarm.net.libp2p.options import HostOptions
from swarm.net.pool.connection_pool import ConnectionPool
from swarm.net.pool.migratable_link import MigratableLink
from swarm.net.security.identity import Identity
from swarm.net.security.swarm_secret import SwarmSecret
from swarm.net.transports import tls
from swarm.net.transports.multi import MultiTransport, MultiTransportPolicy

pytestmark = pytest.mark.processes

QUICK = MultiTransportPolicy(upgrade_backoff_s=(0.1,))


def is_tcp(connection: Connection) -> bool:
    assert isinstance(connection, tls.FramedStream)
    return connection.transport_info("ssl_object") is not None


@contextlib.asynccontextmanager
async def running(options: HostOptions | None = None, **kwargs: object) -> AsyncIterator[MultiTransport]:
    transport = await MultiTransport.start(Identity.generate(), options, **kwargs)  # type: ignore[arg-type]
    try:
        yield transport
    finally:
        await transport.close()


async def test_direct_addresses_first_and_the_daemon_otherwise() -> None:
    async with running() as listener, running(accept=False) as caller, running(direct=False) as plain:
        assert [is_direct(address) for address in listener.addresses] == [False, True]
        assert not any(map(is_direct, (*caller.addresses, *plain.addresses)))
        assert (listener.direct_disabled_reason, plain.direct_disabled_reason) == ("", "they are turned off")
        await listener.serve(echo)
        for transport, addresses, direct_one in (
            (caller, listener.addresses, True),
            (caller, listener.addresses[1:], True),
            (caller, listener.addresses[:1], False),
            (plain, listener.addresses, False),
        ):
            connection = await transport.dial(listener.peer, addresses)
            await connection.send(Ping(4))
            assert (await connection.receive())[0] == Ping(4)
            assert is_tcp(connection) is direct_one
        await listener.close()
        with pytest.raises(PeerUnreachable):
            await caller.dial(listener.peer, listener.addresses)
        with pytest.raises(ConnectionLost):
            await drain(connection)
    assert not children()


async def test_where_direct_connections_do_not_work_the_daemon_carries_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise NetworkError("this Python's ssl cannot ask clients for certificates")

    async with running() as listener:
        await listener.serve(echo)
        monkeypatch.setattr(tls, "contexts", broken)
        async with running() as caller:
            assert "certificates" in caller.direct_disabled_reason
            assert "certificates" in caplog.text
            connection = await caller.dial(listener.peer, listener.addresses)
            await connection.send(Ping(4))
            assert (await connection.receive())[0] == Ping(4)


async def test_a_direct_port_that_is_taken_is_an_error() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        with pytest.raises(AddressInUse):
            await MultiTransport.start(Identity.generate(), direct_port=busy.getsockname()[1])
    assert not children()


async def test_relays_that_do_not_answer_are_an_error() -> None:
    dead = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.from_seed(bytes(32)).peer}"
    with pytest.raises(PeerUnreachable, match="none of the relays"):
        await MultiTransport.start(Identity.generate(), HostOptions(relays=(dead,)))
    with pytest.raises(UsageError, match="either"):
        HostOptions(relays=(dead,), relay_server=True)
    with pytest.raises(UsageError, match="which peer"):
        HostOptions(relays=("/ip4/127.0.0.1/tcp/1",))
    async with running() as relay, running(HostOptions(relays=relay.addresses[:1])) as transport:
        assert f"{relay.addresses[0]}/p2p-circuit/p2p/{transport.peer}" in transport.addresses
    assert not children()


async def test_a_link_migrates_to_a_direct_connection_when_one_is_possible() -> None:
    """The direct port is shut at first. Frames cross without a gap while it opens and the link migrates."""
    answers: list[int] = []

    async def node(link: MigratableLink, message: AnyMessage, body: memoryview) -> None:
        assert isinstance(message, CloseSession)
        await link.send(SessionOpened(message.session), body)

    async def client(_: MigratableLink, message: AnyMessage, body: memoryview) -> None:
        assert isinstance(message, SessionOpened)
        assert body == message.session * 2000
        answers.append(int.from_bytes(message.session, "big"))
        news.set()

    news = asyncio.Event()
    async with running() as listener, running(accept=False, policy=QUICK) as caller:
        async with ConnectionPool(listener, node) as serving, ConnectionPool(caller, client) as dialling:
            await listener.daemon.serve(serving._accept)
            link = await dialling.get(listener.peer, listener.addresses)
            assert not is_tcp(link.path)
            sent = 0
            async with asyncio.timeout(20):
                while not is_tcp(link.path) or sent % 500:
                    await link.send(CloseSession(sent.to_bytes(16, "big")), sent.to_bytes(16, "big") * 2000)
                    sent += 1
                    if sent == 100:
                        await listener.serve(serving._accept)
                    await asyncio.sleep(0.001)
                while len(answers) < sent:
                    news.clear()
                    await news.wait()
            assert answers == list(range(sent))
            assert await dialling.get(listener.peer) is link
            assert (len(serving), len(dialling)) == (1, 1)


async def test_members_of_a_private_swarm_connect_and_others_do_not() -> None:
    secret = SwarmSecret("a secret of our own")
    async with (
        running(secret=secret) as listener,
        running(accept=False, secret=secret) as member,
        running(accept=False, secret=SwarmSecret("another swarm's secret")) as other,
        running(accept=False) as outsider,
    ):
        let_in: list[str] = []

        async def handle(connection: Connection) -> None:
            let_in.append(connection.peer)
            await echo(connection)

        await listener.serve(handle)
        daemon_only = [address for address in listener.addresses if not is_direct(address)]
        for addresses in (listener.addresses, daemon_only):
            connection = await member.dial(listener.peer, addresses)
            await connection.send(Ping(1))
            assert (await connection.receive())[0] == Ping(1)
            for transport in (other, outsider):
                with pytest.raises(PeerUnreachable):
                    await transport.dial(listener.peer, addresses)
        assert let_in == [member.peer, member.peer]
