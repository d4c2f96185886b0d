"""What every transport must do. A test module subclasses `Conformance` and says how to make a pair of endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable

import pytest

from swarm.codec import FrameLimits
from swarm.errors import ConnectionLost, PeerUnreachable, ProtocolError
from swarm.messages import AnyMessage, CloseSession, DropInFlight, OpenSession, Ping, Pong, Step
from swarm.net.base.transport import Connection, Transport

SESSION = bytes(range(16))
SMALL = FrameLimits(header=4096, body=1 << 20)


async def echo(connection: Connection) -> None:
    with contextlib.suppress(ConnectionLost, ProtocolError):
        while True:
            await connection.send(*await connection.receive())


async def drain(connection: Connection) -> None:
    """Read to the end."""
    while True:
        await connection.receive()


async def ping_forever(connection: Connection) -> None:
    while True:
        await connection.send(Ping(1))
        await asyncio.sleep(0.01)


class Conformance:
    """`pair()` yields (caller, listener): two transports that can reach each other; the listener keeps to SMALL."""

    pair: Callable[[], contextlib.AbstractAsyncContextManager[tuple[Transport, Transport]]]

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[Connection, Connection]]:
        """(the caller's end, the listener's end) of one connection."""
        async with self.pair() as (caller, listener):
            accepted: asyncio.Queue[Connection] = asyncio.Queue()
            done = asyncio.Event()

            async def hold(connection: Connection) -> None:
                accepted.put_nowait(connection)
                await done.wait()

            await listener.serve(hold)
            near = await caller.dial(listener.peer, listener.addresses)
            await near.send(Ping(0))
            far = await accepted.get()
            assert await far.receive() == (Ping(0), b"")
            yield near, far
            done.set()

    async def test_frames_come_back_as_they_went(self) -> None:
        frames: list[tuple[AnyMessage, bytes]] = [
            (Ping(1), b""),
            (Step(SESSION, 3, 4, 5, 2, tokens=[7, 8], trace=[(1.5, 2.5)]), os.urandom(2 * 576 * 2)),
            (OpenSession(SESSION, "m", "h", "bf16", 0, 10, 2048, history=list(range(500))), b""),
            (DropInFlight(SESSION, 9, [1, 2, 3]), b"x"),
            (Step(SESSION, 0, 0, 0, 512), os.urandom(1 << 20)),
            (CloseSession(SESSION), b""),
        ]
        async with self.pair() as (caller, listener):
            await listener.serve(echo)
            connection = await caller.dial(listener.peer, listener.addresses)
            for message, body in frames:
                await connection.send(message, body)
            for message, body in frames:
                back, echoed = await connection.receive()
                assert back == message
                assert echoed == body

    async def test_both_sides_know_who_the_other_is(self) -> None:
        async with self.pair() as (caller, listener):
            callers: asyncio.Queue[str] = asyncio.Queue()

            async def note(connection: Connection) -> None:
                callers.put_nowait(connection.peer)
                await echo(connection)

            await listener.serve(note)
            connection = await caller.dial(listener.peer, listener.addresses)
            await connection.send(Ping(1))
            assert connection.peer == listener.peer
            assert await callers.get() == caller.peer
            assert all(address.endswith(f"/p2p/{listener.peer}") for address in listener.addresses)

    async def test_concurrent_senders_do_not_mix_their_frames(self) -> None:
        async with self.pair() as (caller, listener):
            await listener.serve(echo)
            connection = await caller.dial(listener.peer, listener.addresses)

            async def sender(who: int) -> None:
                for i in range(8):
                    await connection.send(DropInFlight(SESSION, who * 100 + i), bytes([who]) * (70_000 * who + 1))

            async with asyncio.TaskGroup() as group:
                for who in range(1, 5):
                    group.create_task(sender(who))
                seen: dict[int, list[int]] = {}
                for _ in range(32):
                    message, body = await connection.receive()
                    assert isinstance(message, DropInFlight)
                    who, i = divmod(message.epoch, 100)
                    assert body == bytes([who]) * (70_000 * who + 1)
                    seen.setdefault(who, []).append(i)
            assert seen == {who: list(range(8)) for who in range(1, 5)}

    async def test_a_cancelled_send_leaves_the_stream_whole(self) -> None:
        async with self.connected() as (near, far):
            stuck = asyncio.create_task(self._send_until_stuck(near))
            await asyncio.sleep(0.3)
            assert not stuck.done(), "a sender is held back while nobody reads"
            stuck.cancel()
            await asyncio.wait({stuck})
            last = asyncio.create_task(near.send(Ping(77)))
            while True:
                message, body = await far.receive()
                if message == Ping(77):
                    break
                assert isinstance(message, DropInFlight)
                assert body == bytes([message.epoch % 251]) * (1 << 20)
            await last

    @staticmethod
    async def _send_until_stuck(connection: Connection) -> None:
        for i in range(1000):
            await connection.send(DropInFlight(SESSION, i), bytes([i % 251]) * (1 << 20))

    async def test_what_was_sent_before_closing_still_arrives(self) -> None:
        async with self.connected() as (near, far):
            await near.send(DropInFlight(SESSION, 1), bytes(500_000))
            await near.send(Ping(2))
            await near.close()
            await near.close()
            message, body = await far.receive()
            assert message == DropInFlight(SESSION, 1)
            assert len(body) == 500_000
            assert (await far.receive())[0] == Ping(2)
            for _ in range(2):
                with pytest.raises(ConnectionLost):
                    await far.receive()
            with pytest.raises(ConnectionLost):
                await near.receive()
            with pytest.raises(ConnectionLost):
                await near.send(Ping(3))

    async def test_a_reader_that_waits_learns_of_the_end(self) -> None:
        async with self.connected() as (near, far):
            waiting = asyncio.create_task(near.receive())
            await asyncio.sleep(0)
            await far.close()
            with pytest.raises(ConnectionLost):
                await waiting
            with pytest.raises(ConnectionLost):
                await ping_forever(near)  # the other side's end may take a moment to be seen

    async def test_a_sender_that_waits_learns_of_the_end(self) -> None:
        async with self.connected() as (near, far):
            stuck = asyncio.create_task(self._send_until_stuck(near))
            await asyncio.sleep(0.3)
            await far.close()
            with pytest.raises(ConnectionLost):
                await stuck

    async def test_a_frame_over_the_limits_ends_the_connection(self) -> None:
        frames: list[tuple[AnyMessage, bytes]] = [
            (Ping(1), bytes(SMALL.body + 1)),
            (DropInFlight(SESSION, 0, list(range(4096))), b""),
        ]
        for message, body in frames:
            async with self.connected() as (near, far):
                with contextlib.suppress(ConnectionLost):  # it may be cut off before all is sent
                    await near.send(message, body)
                with pytest.raises(ProtocolError):
                    await far.receive()
                with pytest.raises(ConnectionLost):
                    await far.receive()
                with pytest.raises(ConnectionLost):
                    await drain(near)

    async def test_nobody_there(self) -> None:
        async with self.pair() as (caller, listener):
            await listener.close()
            with pytest.raises(PeerUnreachable):
                await caller.dial(listener.peer, listener.addresses)
            await caller.close()
            with pytest.raises(PeerUnreachable):
                await caller.dial(listener.peer, listener.addresses)
            await caller.close()

    async def test_closing_a_transport_ends_everything_on_it(self) -> None:
        async with self.pair() as (caller, listener):
            ended = asyncio.Event()

            async def handler(connection: Connection) -> None:
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.set()

            await listener.serve(handler)
            connection = await caller.dial(listener.peer, listener.addresses)
            await connection.send(Ping(1))
            await asyncio.sleep(0.2)
            await listener.close()
            assert ended.is_set()
            with pytest.raises(ConnectionLost):
                await connection.receive()

    async def test_a_handler_that_returns_closes_its_connection(self) -> None:
        async with self.pair() as (caller, listener):

            async def once(connection: Connection) -> None:
                message, _ = await connection.receive()
                assert isinstance(message, Ping)
                await connection.send(Pong(message.nonce))

            await listener.serve(once)
            connection = await caller.dial(listener.peer, listener.addresses)
            await connection.send(Ping(5))
            assert (await connection.receive())[0] == Pong(5)
            with pytest.raises(ConnectionLost):
                await connection.receive()
