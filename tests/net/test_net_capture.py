"""A packet capture of a conversation holds nothing of it in clear, whichever transport it took."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import msgspec
import pytest
from transport_conformance import echo

from swarm.messages import Step
from swarm.net.base.transport import Transport
from swarm.net.security.identity import Identity
from swarm.net.transports.libp2p_streams import Libp2pTransport
from swarm.net.transports.tls import TlsTransport

ALL_PROTOCOLS = 3
ACTIVATIONS = os.urandom(4096)
TOKENS = [49_100 + i for i in range(32)]
STEP = Step(b"a session's id!!", 0, 1, 2, len(TOKENS), tokens=TOKENS)


@pytest.fixture
def loopback() -> Iterator[socket.socket]:
    """A socket that sees every packet on the loopback device."""
    try:
        tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
    except (AttributeError, PermissionError):
        pytest.skip("only root can capture packets, on Linux")
    with tap:
        tap.bind(("lo", 0))
        tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 20)
        tap.setblocking(False)
        yield tap


def captured(tap: socket.socket) -> bytes:
    packets = []
    while True:
        try:
            packets.append(tap.recv(1 << 16))
        except BlockingIOError:
            return b"".join(packets)


async def _daemon() -> Transport:
    return await Libp2pTransport.start(Identity.generate())


async def _py() -> Transport:
    return await Libp2pTransport.start(Identity.generate(), libp2p_impl="python")


async def _direct() -> Transport:
    return await TlsTransport.start(Identity.generate(), ["127.0.0.1"])


@pytest.mark.parametrize("make", [_daemon, _py, _direct])
async def test_neither_tokens_nor_activations_cross_in_clear(
    make: Callable[[], Coroutine[Any, Any, Transport]], loopback: socket.socket
) -> None:
    listener, caller = await make(), await make()
    try:
        await listener.serve(echo)
        connection = await caller.dial(listener.peer, listener.addresses)
        captured(loopback)
        for _ in range(3):
            await connection.send(STEP, ACTIVATIONS)
            assert await connection.receive() == (STEP, ACTIVATIONS)
        # The same in clear, to see that the capture would have shown it.
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as open_:
            open_.sendall(b"in clear " + ACTIVATIONS[:64])
        await asyncio.sleep(0.05)
        seen = captured(loopback)
        assert b"in clear " + ACTIVATIONS[:64] in seen
        assert len(seen) > 6 * len(ACTIVATIONS), "the conversation is in the capture"
        assert ACTIVATIONS[64:80] not in seen
        assert STEP.session not in seen
        assert msgspec.msgpack.encode(TOKENS)[:24] not in seen
    finally:
        await asyncio.gather(listener.close(), caller.close())
