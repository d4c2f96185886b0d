"""When a client starts libp2p: for a peer that nothing else leads to, for layers that nobody has told of, and later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from transport_conformance import echo

from swarm.errors import NetworkError, PeerUnreachable, UsageError
from swarm.messages import Ping
from swarm.net.security.identity import Identity
from swarm.net.transports.tls import TlsTransport
from swarm_client.network import connection
from swarm_client.network.deferred_libp2p import DeferralPolicy, DeferredLibp2p

QUICK = DeferralPolicy(direct_head_start_s=0.05, lacking_after_s=0.0, retry_s=30.0)
STRANGER = Identity.generate().peer
LIBP2P = f"/ip4/127.0.0.1/tcp/1/p2p/{STRANGER}"
DIRECT = f"/ip4/127.0.0.1/tcp/1/tls/p2p/{STRANGER}"


class FakeLibp2p:
    """In place of a host and the DHT. Dials by a direct connection to `listener`, whoever is asked for."""

    daemon = None

    def __init__(self, own: Identity, listener: TlsTransport, fails: bool = False) -> None:
        self.peer = own.peer
        self.own, self.listener, self.fails = own, listener, fails
        self.starts = 0
        self.closed = 0
        self.blocked = False

    async def start(self) -> Any:
        self.starts += 1
        if self.blocked:
            await asyncio.Event().wait()
        if self.fails:
            raise NetworkError("the daemon does not start")
        return self, self

    async def dial(self, peer: str, addresses: Sequence[str]) -> Any:
        self.own_tls = await TlsTransport.start(self.own)
        return await self.own_tls.dial(self.listener.peer, self.listener.addresses)

    async def read(self, model: str) -> dict[str, bytes]:
        return {STRANGER: model.encode()}

    async def rebootstrap(self, addresses: Sequence[str]) -> int:
        return len(addresses)

    async def close(self) -> None:
        self.closed += 1


@asynccontextmanager
async def client(
    policy: DeferralPolicy = QUICK, fails: bool = False
) -> AsyncIterator[tuple[DeferredLibp2p, FakeLibp2p, TlsTransport]]:
    own = Identity.generate()
    listener = await TlsTransport.start(Identity.generate(), ["127.0.0.1"])
    await listener.serve(echo)
    libp2p = FakeLibp2p(own, listener, fails)
    transport = DeferredLibp2p(own.peer, await TlsTransport.start(own), libp2p.start, policy)
    try:
        yield transport, libp2p, listener
    finally:
        await transport.close()
        await listener.close()


async def test_a_swarm_that_answers_directly_needs_no_libp2p() -> None:
    async with client() as (transport, libp2p, listener):
        stream = await transport.dial(listener.peer, listener.addresses)
        await stream.send(Ping(7))
        assert (await stream.receive())[0] == Ping(7)
        assert await transport.read("m") == {}
        assert await transport.rebootstrap((LIBP2P,)) == 0
        assert libp2p.starts == 0
        assert not transport.is_started


@pytest.mark.parametrize("addresses", [(), (LIBP2P,), (DIRECT, LIBP2P)])
async def test_a_peer_that_no_direct_connection_leads_to_is_dialled_by_libp2p(addresses: tuple[str, ...]) -> None:
    async with client() as (transport, libp2p, _):
        streams = await asyncio.gather(*(transport.dial(STRANGER, addresses) for _ in range(3)))
        for stream in streams:
            await stream.send(Ping(8))
            assert (await stream.receive())[0] == Ping(8)
        assert libp2p.starts == 1, "one host for all"
        assert await transport.read("m") == {STRANGER: b"m"}
        assert await transport.rebootstrap((LIBP2P,)) == 1
    assert libp2p.closed == 2, "host and directory"


async def test_missing_layers_are_looked_for_in_the_dht() -> None:
    async with client() as (transport, libp2p, _):
        transport.is_lacking = lambda: True
        assert await transport.read("m") == {STRANGER: b"m"}
        assert libp2p.starts == 1


async def test_a_client_that_stays_reads_the_dht_and_does_not_wait_for_it() -> None:
    async with client(DeferralPolicy(lacking_after_s=0.0, stays_after_s=0.0)) as (transport, libp2p, _):
        assert await transport.read("m") == {}
        async with asyncio.timeout(10):
            await transport.started()
        assert libp2p.starts == 1
        assert await transport.read("m") == {STRANGER: b"m"}


async def test_a_start_that_failed_is_not_tried_again_at_once() -> None:
    async with client(fails=True) as (transport, libp2p, listener):
        transport.is_lacking = lambda: True
        for _ in range(3):
            with pytest.raises(NetworkError, match="does not start"):
                await transport.read("m")
            with pytest.raises(PeerUnreachable):
                await transport.dial(STRANGER, (LIBP2P,))
        assert libp2p.starts == 1
        await transport.dial(listener.peer, listener.addresses)
    async with client(DeferralPolicy(lacking_after_s=0.0, retry_s=-1.0), fails=True) as (transport, libp2p, _):
        transport.is_lacking = lambda: True
        for _ in range(2):
            with pytest.raises(NetworkError):
                await transport.read("m")
        assert libp2p.starts == 2


async def test_closing_ends_a_start_that_nobody_waits_for() -> None:
    async with client(DeferralPolicy(lacking_after_s=0.0, stays_after_s=0.0)) as (transport, libp2p, listener):
        libp2p.blocked = True
        assert await transport.read("m") == {}
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await transport.close()
        with pytest.raises(PeerUnreachable):
            await transport.dial(listener.peer, listener.addresses)
        assert not transport.is_started


async def test_without_libp2p_there_are_direct_connections_alone() -> None:
    own = Identity.generate()
    transport = DeferredLibp2p(own.peer, await TlsTransport.start(own), None, QUICK)
    transport.is_lacking = lambda: True
    assert await transport.read("m") == {}
    for addresses in ((), (LIBP2P,), (DIRECT,)):
        with pytest.raises(PeerUnreachable):
            await transport.dial(STRANGER, addresses)
    await transport.close()


@pytest.mark.parametrize(
    ("transport", "hivemind", "peers", "starts"),
    [
        ("auto", True, (DIRECT, LIBP2P), True),
        ("auto", True, (LIBP2P,), True),
        ("auto", True, (DIRECT,), False),  # there is nobody to join by
        ("auto", False, (DIRECT, LIBP2P), False),
        ("auto", False, (LIBP2P,), "use an invitation, or libp2p: pip install 'swarm-llm\\[node\\]'"),
        ("direct", True, (DIRECT, LIBP2P), False),
        ("direct", True, (LIBP2P,), "use an invitation$"),
        ("libp2p", True, (DIRECT, LIBP2P), True),
        ("libp2p", True, (DIRECT,), "without /tls/"),
        ("libp2p", False, (LIBP2P,), "needs hivemind, which is not installed: pip install"),
    ],
)
async def test_whether_there_is_libp2p(
    transport: Any,
    hivemind: bool,
    peers: tuple[str, ...],
    starts: bool | str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    monkeypatch.setattr(connection, "HAS_HIVEMIND", hivemind)
    file = connection.RecordFile.of(tmp_path, "m", peers, "", "")
    joining = connection._Joining(Identity.generate(), None, connection.Limits(), transport, "go", file)
    if isinstance(starts, str):
        with pytest.raises(UsageError, match=starts):
            joining.starts_libp2p(peers)
    else:
        assert (joining.starts_libp2p(peers) is not None) is starts
