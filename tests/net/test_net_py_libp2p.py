"""py-libp2p in place of the Go daemon: the shared conformance suite, both in one swarm, and untrusted peers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from transport_conformance import SMALL, Conformance, echo

from swarm.config import Libp2pImpl
from swarm.errors import AddressInUse, ConnectionLost, NetworkError, PeerUnreachable, UsageError, WrongSwarm
from swarm.messages import CloseSession, Ping
from swarm.net.base.frame_stream import varint
from swarm.net.base.transport import Transport
from swarm.net.dht.directory import DhtDirectory
from swarm.net.libp2p._hivemind import p2pd_pb2 as pb
from swarm.net.libp2p.host import ProtocolNotSupported, start
from swarm.net.libp2p.options import HostOptions
from swarm.net.libp2p.py_host import PyHost
from swarm.net.security.identity import Identity
from swarm.net.security.swarm_secret import SwarmSecret
from swarm.net.transports.libp2p_streams import Libp2pTransport

pytestmark = pytest.mark.processes

NOBODY = Identity.from_seed(bytes(32)).peer
MULTISTREAM = b"\x13/multistream/1.0.0\n"
MIXED: list[tuple[Libp2pImpl, Libp2pImpl]] = [("python", "go"), ("go", "python"), ("python", "python")]


@pytest.fixture(autouse=True)
def no_socket_left_open() -> Iterator[None]:
    yield
    gc.collect()  # a socket that nobody closed is a warning, and warnings are errors


@contextlib.asynccontextmanager
async def running(
    libp2p_impl: Libp2pImpl = "python", options: HostOptions | None = None, **kwargs: object
) -> AsyncIterator[Libp2pTransport]:
    transport = await Libp2pTransport.start(Identity.generate(), options, libp2p_impl=libp2p_impl, **kwargs)  # type: ignore[arg-type]
    try:
        yield transport
    finally:
        await transport.close()


class TestPy(Conformance):
    @contextlib.asynccontextmanager
    async def pair(self) -> AsyncIterator[tuple[Transport, Transport]]:
        async with running() as caller, running(limits=SMALL) as listener:
            yield caller, listener


def host_of(transport: Libp2pTransport) -> PyHost:
    assert isinstance(transport.daemon, PyHost)
    return transport.daemon


def endpoint(transport: Libp2pTransport) -> tuple[str, int]:
    return "127.0.0.1", int(transport.addresses[0].split("/")[4])


@pytest.mark.parametrize(("caller", "listener"), MIXED)
async def test_frames_cross_whichever_program_is_at_either_end(caller: Libp2pImpl, listener: Libp2pImpl) -> None:
    body = bytes(range(256)) * 12_000
    async with running(caller) as a, running(listener) as b:
        await b.serve(echo)
        connection = await a.dial(b.peer, b.addresses)
        assert connection.peer == b.peer
        for message, data in ((Ping(1), b""), (CloseSession(bytes(16)), body)):
            await connection.send(message, data)
            assert await connection.receive() == (message, data)


async def test_one_swarm_of_both() -> None:
    """Five peers, each knowing one of another kind: all read all records, and dial each other by id alone."""
    async with contextlib.AsyncExitStack() as stack:
        transports: list[Libp2pTransport] = []
        directories: list[DhtDirectory] = []
        kinds: tuple[Libp2pImpl, ...] = ("go", "python", "go", "python", "python")
        for kind in kinds:
            peers = transports[-1].addresses[:1] if transports else ()
            transports.append(await stack.enter_async_context(running(kind, HostOptions(peers=peers))))
            await transports[-1].serve(echo)
            directories.append(await DhtDirectory.start(transports[-1], peers))
            stack.push_async_callback(directories[-1].close)
        await asyncio.gather(
            *(d.publish(c.peer.encode(), "m", time.time() + 30) for c, d in zip(transports, directories, strict=True))
        )
        expected = {transport.peer: transport.peer.encode() for transport in transports}
        for directory in directories:
            assert await directory.read("m") == expected
            await directory.check_clock()
        for near, far in ((0, 4), (4, 0), (1, 3), (3, 2)):
            connection = await transports[near].dial(transports[far].peer)
            await connection.send(Ping(7))
            assert await connection.receive() == (Ping(7), b"")


async def test_a_private_swarm_of_both() -> None:
    secret, other = SwarmSecret("one secret of many"), SwarmSecret("another secret of many")
    async with (
        running("go", authenticator=secret.authenticate) as a,
        running("python", authenticator=secret.authenticate) as b,
    ):
        await a.serve(echo)
        await b.serve(echo)
        for near, far in ((a, b), (b, a)):
            connection = await near.dial(far.peer, far.addresses)
            await connection.send(Ping(1))
            assert await connection.receive() == (Ping(1), b"")
        for authenticator in (other.authenticate, None):
            async with running("python", authenticator=authenticator) as outsider:
                for member in (a, b):
                    with pytest.raises(WrongSwarm):
                        await outsider.dial(member.peer, member.addresses)


async def test_peers_that_are_not_there_or_not_themselves() -> None:
    async with running() as caller, running() as listener:
        with pytest.raises(PeerUnreachable):
            await caller.dial(NOBODY, ("/ip4/127.0.0.1/tcp/1/p2p/" + NOBODY,))
        with pytest.raises(PeerUnreachable):
            await caller.dial(NOBODY, [a.replace(listener.peer, NOBODY) for a in listener.addresses])
        with pytest.raises(PeerUnreachable, match="no address of"):
            await caller.dial(Identity.generate().peer)
        await caller.control.connect(listener.peer, listener.addresses)
        with pytest.raises(ProtocolNotSupported):
            await caller.control.open_stream(listener.peer, "/no/such/protocol")
    with pytest.raises(PeerUnreachable, match="none of the peers"):
        async with running(options=HostOptions(peers=(f"/ip4/127.0.0.1/tcp/1/p2p/{NOBODY}",))):
            pass
    with pytest.raises(PeerUnreachable):
        await caller.dial(listener.peer, listener.addresses)


async def test_options_that_cannot_work() -> None:
    async with running() as first:
        taken = f"/ip4/127.0.0.1/tcp/{endpoint(first)[1]}"
        for kind, options in (
            (AddressInUse, HostOptions(listen=(taken,))),
            (UsageError, HostOptions(listen=("/ip4/203.0.113.9/tcp/0",))),
            (UsageError, HostOptions(listen=("/ip4/127.0.0.1/udp/0/quic-v1",))),
            (UsageError, HostOptions(relay_server=True)),
        ):
            with pytest.raises(kind):
                async with running(options=options):
                    pass


async def test_nothing_is_offered_or_taken_in_clear() -> None:
    async with running() as listener:
        await listener.serve(echo)
        for protocol in (b"/plaintext/2.0.0", b"/plaintext/1.0.0", b"/secio/1.0.0", b"/swarm/rpc/2"):
            reader, writer = await asyncio.open_connection(*endpoint(listener))
            writer.write(MULTISTREAM + bytes([len(protocol) + 1]) + protocol + b"\n")
            async with asyncio.timeout(5):
                said = await reader.readexactly(len(MULTISTREAM) + 4)
            assert said == MULTISTREAM + b"\x03na\n"
            writer.close()
    # And as a caller: whoever answers that it knows nothing but plaintext is not spoken to.
    heard = bytearray()

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(MULTISTREAM + b"\x03na\n" * 4)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(4096):
                heard.extend(data)
        writer.close()

    async with running() as caller, await asyncio.start_server(plain, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(PeerUnreachable):
            await caller.dial(NOBODY, (f"/ip4/127.0.0.1/tcp/{port}/p2p/{NOBODY}",))
    assert b"plaintext" not in heard
    assert b"/noise" in heard


async def test_a_host_survives_malformed_input() -> None:
    async with running() as listener, running("go") as member:
        await listener.serve(echo)
        for data in (b"GET / HTTP/1.1\r\n\r\n", MULTISTREAM + b"\x07/noise\n" + bytes(300), b"\xff" * 5000, b""):
            with socket.create_connection(endpoint(listener)) as outsider:
                outsider.sendall(data)
                await asyncio.sleep(0.02)
        control = member.control
        await control.connect(listener.peer, listener.addresses)
        for junk in (b"\xff" * 1000, b""):
            for protocol in ("/ipfs/kad/1.0.0", "/ipfs/id/1.0.0"):
                stream = await control.open_stream(listener.peer, protocol)
                with contextlib.suppress(ConnectionLost):
                    await stream.write_delimited(junk)
                stream.abort()
        connection = await member.dial(listener.peer, listener.addresses)
        await connection.send(Ping(2))
        assert await connection.receive() == (Ping(2), b"")
        assert host_of(listener).restarts == 0


async def test_malformed_calls() -> None:
    """What hivemind's DHT answers over py-libp2p, to a daemon that violates the protocol."""
    async with running() as listener, running("go") as member:
        directory = await DhtDirectory.start(listener)
        await member.control.connect(listener.peer, listener.addresses)
        call = pb.CallUnaryRequest(peer=b"", proto="CheckedDHTProtocol.rpc_find", data=b"\xff" * 50)
        refused = pb.PersistentConnectionRequest(callId=b"1", callUnary=call).SerializeToString()
        for name in ("rpc_ping", "rpc_store", "rpc_find"):
            for junk in (b"\xff" * 100, bytes(5000), refused):
                stream = await member.control.open_stream(listener.peer, f"CheckedDHTProtocol.{name}")
                await stream.write_delimited(junk)
                if junk == refused:
                    answer = pb.PersistentConnectionRequest.FromString(await stream.preamble())
                    assert answer.unaryResponse.error
                else:
                    with pytest.raises(ConnectionLost):
                        await stream.preamble()
                stream.abort()
        huge = await member.control.open_stream(listener.peer, "CheckedDHTProtocol.rpc_find")
        huge._write(varint(64 << 20))
        with pytest.raises(ConnectionLost):
            await huge.preamble()
        huge.abort()
        other = await DhtDirectory.start(member, listener.addresses)
        await other.publish(b"record", "m", time.time() + 10)
        assert await directory.read("m") == {member.peer: b"record"}
        await other.close()
        await directory.close()


async def test_a_host_that_dies_restarts_as_the_same_peer_at_the_same_address() -> None:
    async with running() as listener, running() as caller:
        await listener.serve(echo)
        directory = await DhtDirectory.start(listener)
        before = listener.addresses
        lost = await caller.dial(listener.peer, before)
        node = host_of(listener)._node
        assert node is not None
        back = asyncio.Event()

        async def up() -> None:
            back.set()

        listener.daemon.on_up(up)
        node.end()
        with pytest.raises(ConnectionLost):
            await lost.receive()
        await asyncio.wait_for(back.wait(), 10)
        assert listener.addresses == before
        connection = await caller.dial(listener.peer, before)
        await connection.send(Ping(3))
        assert await connection.receive() == (Ping(3), b"")
        await directory.publish(b"record", "m", time.time() + 10)
        assert await directory.read("m") == {listener.peer: b"record"}
        await directory.close()


async def test_a_restart_that_fails_is_retried() -> None:
    async with running() as transport:
        host = host_of(transport)
        tries = 0
        back = asyncio.Event()

        async def up() -> None:
            nonlocal tries
            tries += 1
            if tries == 1:
                raise NetworkError("not yet")
            back.set()

        host.on_up(up)
        assert host._node is not None
        host._node.end()
        await asyncio.wait_for(back.wait(), 10)
        await host.refresh()
        assert (tries, host.failed.is_set()) == (2, False)


async def test_cancellation_leaks_nothing() -> None:
    starting = asyncio.create_task(Libp2pTransport.start(Identity.generate(), libp2p_impl="python"))
    await asyncio.sleep(0.001)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    async with running() as caller:
        silent = socket.create_server(("127.0.0.1", 0))  # takes connections and never sends a byte
        with silent:
            address = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{NOBODY}"
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await caller.dial(NOBODY, (address,))
        with pytest.raises(NetworkError):
            await caller.dial(NOBODY, (address,))


async def test_without_its_package_the_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("swarm.net.libp2p.py_") or name == "trio"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "trio", None)  # an import of it raises ModuleNotFoundError
    with pytest.raises(UsageError, match=r"swarm-llm\[libp2p\]"):
        await start(Identity.generate(), None, "python")
