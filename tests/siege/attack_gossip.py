"""Attacks on the map by way of gossip: what peers tell each other of the records that they hold."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from attack_map import perfect_record, perfect_records
from hostile import Siege, Victim

from swarm.errors import NetworkError
from swarm.gossip_messages import MAX_LISTED, MAX_SLICES, Records, RecordsQuery, pack_listed
from swarm.net.security.identity import Identity
from swarm.net.transports.tls import TlsTransport

Run = Callable[[], Awaitable[None]]
TELLERS = 100  # identities that a node is told of


async def gossip_records(siege: Siege) -> Run:
    """100 identities tell every node their own record, each a perfect node, over and over."""
    server = await asyncio.start_server(_silent, siege.target.own_address, 0)
    siege.stack.callback(server.close)
    port = server.sockets[0].getsockname()[1]
    identities = [Identity.generate() for _ in range(TELLERS)]
    transports = [await siege.transport(identity) for identity in identities]

    async def one(node: Victim, first: int) -> None:
        number = first
        while siege.running:
            number += 1
            identity, transport = identities[number % TELLERS], transports[number % TELLERS]
            with contextlib.suppress(NetworkError, TimeoutError):
                async with asyncio.timeout(3.0):
                    stream = await siege.link(node, transport)
                    own = perfect_record(siege, identity, port)
                    await stream.send(RecordsQuery(number, siege.target.model, own=own))
                    siege.counts["told"] += 1
                    await asyncio.sleep(0.2)
                    await stream.close()

    return lambda: siege.all_of(one(node, 20 * i) for node in siege.target.nodes for i in range(5))


async def gossip_questions(siege: Siege) -> Run:
    """Questions for records with the longest lists, as fast as the node reads them, from many identities."""
    transports = [await siege.transport() for _ in range(8)]

    async def one(node: Victim, transport: TlsTransport) -> None:
        number = 0
        while siege.running:
            try:
                stream = await siege.link(node, transport)
                while siege.running:
                    number += 1
                    listed = pack_listed((siege.rng.randbytes(8), number) for _ in range(MAX_LISTED))
                    slices = siege.rng.randrange(1, MAX_SLICES)
                    await stream.send(RecordsQuery(number, siege.target.model, listed, 0, slices))
                    siege.counts["asked"] += 1
                    await asyncio.sleep(0.002)
            except NetworkError:
                siege.counts["cut off"] += 1
                transport = await siege.transport()

    return lambda: siege.all_of(one(node, transport) for node in siege.target.nodes for transport in transports)


async def gossip_answers(siege: Siege) -> Run:
    """Answers that nobody asked for, each with 64 perfect records."""
    made = [record for _, record in await perfect_records(siege, 640)]

    async def one(node: Victim) -> None:
        while siege.running:
            with contextlib.suppress(NetworkError):
                stream = await siege.link(node)
                for number in range(1 << 20):
                    if not siege.running:
                        return
                    await stream.send(Records(number, siege.rng.sample(made, 64), more=True))
                    siege.counts["sent"] += 1
                    await asyncio.sleep(0.01)

    return lambda: siege.all_of(one(node) for node in siege.target.nodes for _ in range(4))


async def _silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        await reader.read()
    writer.close()
