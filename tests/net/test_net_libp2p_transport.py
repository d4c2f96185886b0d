"""The libp2p transport on real p2p daemons on 127.0.0.1: the shared conformance suite, its errors, its process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from child_processes import children
from transport_conformance import SMALL, Conformance, drain, echo

from swarm.errors import (
    AddressInUse,
    ConnectionLost,
    NetworkError,
    PeerUnreachable,
    ProtocolError,
    SwarmError,
    UsageError,
)
from swarm.messages import AnyMessage, CloseSession, DropInFlight, Ping
from swarm.net.base.transport import Connection, Transport, TransportPolicy
from swarm.net.libp2p import go_daemon
from swarm.net.libp2p.options import HostOptions, same_ports
from swarm.net.pool.connection_pool import ConnectionPool
from swarm.net.security.identity import Identity
from swarm.net.transports.libp2p_streams import Libp2pTransport

pytestmark = pytest.mark.processes

NOBODY = Identity.from_seed(bytes(32)).peer


@pytest.fixture(autouse=True)
def no_child_left() -> Iterator[None]:
    before = children()
    yield
    assert not children() - before


class TestDaemon(Conformance):
    @contextlib.asynccontextmanager
    async def pair(self) -> AsyncIterator[tuple[Transport, Transport]]:
        caller, listener = await asyncio.gather(
            Libp2pTransport.start(Identity.generate()), Libp2pTransport.start(Identity.generate(), limits=SMALL)
        )
        try:
            yield caller, listener
        finally:
            await asyncio.gather(caller.close(), listener.close())


@contextlib.asynccontextmanager
async def running(options: HostOptions | None = None, **kwargs: object) -> AsyncIterator[Libp2pTransport]:
    transport = await Libp2pTransport.start(Identity.generate(), options, **kwargs)  # type: ignore[arg-type]
    try:
        yield transport
    finally:
        await transport.close()


async def test_join_and_dial_by_id_alone() -> None:
    async with running() as first, running(HostOptions(peers=first.addresses)) as second:
        await first.serve(echo)
        connection = await second.dial(first.peer)
        await connection.send(Ping(1))
        assert (await connection.receive())[0] == Ping(1)
        with pytest.raises(PeerUnreachable):
            await second.dial(NOBODY)
        with pytest.raises(PeerUnreachable):
            await second.dial(NOBODY, ["/ip4/127.0.0.1/tcp/1", "rubbish", ""])
        with pytest.raises(PeerUnreachable):
            await second.dial("not a peer id")
        with pytest.raises(PeerUnreachable):
            await second.dial(second.peer)


async def test_a_listener_that_does_not_serve_yet() -> None:
    async with running() as first, running() as second:
        with pytest.raises(PeerUnreachable):
            await second.dial(first.peer, first.addresses)


async def test_connections_are_bounded() -> None:
    async def alive(connection: Connection) -> bool:
        try:
            await connection.send(Ping(1))
            return (await connection.receive())[0] == Ping(1)
        except ConnectionLost:
            return False

    async with running(policy=TransportPolicy(2)) as listener, running(policy=TransportPolicy(3)) as caller:
        await listener.serve(echo)
        opened = [await caller.dial(listener.peer, listener.addresses) for _ in range(3)]
        assert len([connection for connection in opened if await alive(connection)]) == 2
        opened.append(await caller.dial(listener.peer, listener.addresses))  # in place of the refused one
        with pytest.raises(PeerUnreachable, match="limit"):
            await caller.dial(listener.peer, listener.addresses)


async def test_a_busy_port() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        for extra in ((), ("/ip4/127.0.0.1/tcp/0",)):
            with pytest.raises(AddressInUse, match=str(port)):
                await Libp2pTransport.start(Identity.generate(), HostOptions((f"/ip4/127.0.0.1/tcp/{port}", *extra)))


async def test_two_daemons_do_not_share_a_port() -> None:
    """They could (SO_REUSEPORT), and would take each other's callers."""
    async with running() as transport:
        taken = transport.addresses[0].partition("/p2p/")[0]
        with pytest.raises(AddressInUse, match="is taken"):
            await Libp2pTransport.start(Identity.generate(), HostOptions((taken,)))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"listen": ("rubbish",)}, UsageError, "rubbish"),
        ({"listen": ()}, UsageError, "listen"),
        ({"listen": ("/ip4/127.0.0.1/tcp/99999",)}, UsageError, "99999"),
        ({"listen": ("/ip4/203.0.113.1/tcp/0",)}, UsageError, "no such address"),
        ({"peers": ("/ip4/127.0.0.1/tcp/1",)}, UsageError, "/p2p/"),
        ({"peers": (f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}",)}, PeerUnreachable, "none of the peers"),
    ],
)
async def test_options_that_cannot_work(
    options: dict[str, tuple[str, ...]], error: type[SwarmError], says: str
) -> None:
    with pytest.raises(error, match=says):
        await Libp2pTransport.start(Identity.generate(), HostOptions(**options))


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_daemon_that_dies_or_freezes_restarts_as_the_same_peer_at_the_same_address(
    blow: signal.Signals,
) -> None:
    async with running() as listener, running() as caller:
        await listener.serve(echo)
        addresses = listener.addresses
        restarted: asyncio.Queue[None] = asyncio.Queue()
        listener.daemon.on_up(lambda: restarted.put(None))
        for round_ in range(2):
            connection = await caller.dial(listener.peer, addresses)
            victim = listener.daemon_pid
            os.kill(victim, blow)
            async with asyncio.timeout(10):
                with pytest.raises(ConnectionLost):
                    await drain(connection)
                await restarted.get()
            assert listener.daemon_pid != victim
            assert listener.addresses == addresses
            assert not psutil.pid_exists(victim), "the dead daemon was not reaped"
            # From its side first: the other daemon may have seen it gone, and would wait before it dials again.
            await listener.control.connect(caller.peer, caller.addresses)
            again = await caller.dial(listener.peer, addresses)
            await again.send(Ping(round_))
            assert (await again.receive())[0] == Ping(round_)
            await again.close()


async def test_a_daemon_that_cannot_be_restarted_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(go_daemon, "POLICY", replace(go_daemon.POLICY, restart_backoff_s=(0.0, 0.1)))
    async with running() as transport:
        monkeypatch.setattr(go_daemon, "P2PD", "/nowhere/p2pd")
        os.kill(transport.daemon_pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            await transport.failed.wait()
        with pytest.raises(PeerUnreachable):
            await transport.dial(NOBODY, ())


async def test_a_daemon_in_a_crash_loop_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(go_daemon, "POLICY", replace(go_daemon.POLICY, max_crashes=2))
    async with running() as transport:
        async with asyncio.timeout(20):
            while not transport.failed.is_set():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(transport.daemon_pid, signal.SIGKILL)
                await asyncio.sleep(0.3)
        assert transport.daemon.restarts <= 2


@pytest.mark.parametrize(
    ("wanted", "bound", "kept"),
    [
        ("/ip4/0.0.0.0/tcp/0", "/ip4/10.0.0.7/tcp/4001/p2p/Q", "/ip4/0.0.0.0/tcp/4001"),
        ("/ip4/127.0.0.1/tcp/0", "/ip4/10.0.0.7/tcp/4001/p2p/Q", "/ip4/127.0.0.1/tcp/0"),
        ("/ip4/127.0.0.1/tcp/99", "/ip4/127.0.0.1/tcp/99/p2p/Q", "/ip4/127.0.0.1/tcp/99"),
        ("/ip4/0.0.0.0/udp/0/quic-v1", "/ip4/10.0.0.7/udp/55/quic-v1/p2p/Q", "/ip4/0.0.0.0/udp/55/quic-v1"),
        ("/ip4/0.0.0.0/tcp/0", "/ip6/::1/tcp/4001/p2p/Q", "/ip4/0.0.0.0/tcp/0"),
    ],
)
def test_ports_that_were_free_to_choose_are_kept_in_a_restart(wanted: str, bound: str, kept: str) -> None:
    assert same_ports((wanted,), (bound,)) == (kept,)


async def test_a_start_that_is_cancelled_at_any_moment_leaves_nothing_behind() -> None:
    for delay in (0.0, 0.01, 0.05, 0.1, 0.2, 0.3):
        starting = asyncio.create_task(Libp2pTransport.start(Identity.generate()))
        await asyncio.sleep(delay)
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await starting).close()  # it was quicker than we
        assert not children()


async def test_a_close_that_is_cancelled_still_ends_the_daemon() -> None:
    for turns in range(4):
        transport = await Libp2pTransport.start(Identity.generate())
        await transport.serve(echo)
        closing = asyncio.create_task(transport.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        closing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await closing
        if not turns:  # cancelled before its first line
            await transport.close()
        assert not children()


async def test_pools_over_daemons() -> None:
    """The same pool that is tested in memory: frames both ways, round trips, an offender, a death."""
    answers: asyncio.Queue[tuple[AnyMessage, bytes]] = asyncio.Queue()
    lost: asyncio.Queue[NetworkError] = asyncio.Queue()

    async def serve(connection: Connection, message: AnyMessage, body: memoryview) -> None:
        if isinstance(message, DropInFlight):
            raise ProtocolError("no prunes here")
        await connection.send(message, body)

    async def note(_: Connection, message: AnyMessage, body: memoryview) -> None:
        answers.put_nowait((message, bytes(body)))

    async def on_lost(_: Connection, error: NetworkError) -> None:
        lost.put_nowait(error)

    async with running() as listener, running() as caller:
        served = ConnectionPool(listener, serve, uses=lambda peer: True)  # or no peer could send it a large body
        async with served as node, ConnectionPool(caller, note, on_lost) as client:
            await node.serve()
            connections = await asyncio.gather(*(client.get(listener.peer, listener.addresses) for _ in range(8)))
            assert len(set(connections)) == 1
            assert await client.rtt(listener.peer) > 0
            await connections[0].send(CloseSession(bytes(16)), bytes(300_000))
            assert await answers.get() == (CloseSession(bytes(16)), bytes(300_000))
            await connections[0].send(DropInFlight(bytes(16), 0))
            await lost.get()
            assert node.violations.counts == {caller.peer: 1}
            assert await client.rtt(listener.peer) > 0
            os.kill(listener.daemon_pid, signal.SIGKILL)
            await lost.get()


_ORPHAN_MAKER = """
import asyncio
from swarm.net.transports.libp2p_streams import Libp2pTransport
from swarm.net.security.identity import Identity
from swarm.net.pool.connection_pool import ConnectionPool

async def main():
    transport = await Libp2pTransport.start(Identity.generate())
    print(transport.daemon_pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_the_daemon_does_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", _ORPHAN_MAKER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    deadline = time.monotonic() + 10
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert not list(tmp_path.rglob("identity")), "no key is left lying about"
