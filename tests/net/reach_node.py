"""A peer in a process of its own, for the tests that put each into its own network namespace.

    python reach_node.py relay HOST | listen HOST RELAY | dial HOST RELAY PEER ADDRESS...

Prints JSON lines. Not a test.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Sequence

from swarm.errors import NetworkError, PeerUnreachable
from swarm.messages import CloseSession
from swarm.net.base.transport import Connection
from swarm.net.libp2p.options import HostOptions
from swarm.net.security.identity import Identity
from swarm.net.transports.multi import MultiTransport

BODY = 60_000
FRAMES = 40  # 2.4 MB each way: far more than the 128 kB of libp2p's own relays, see `GoDaemonPolicy.relay_data_limit`


async def echo(connection: Connection) -> None:
    with contextlib.suppress(NetworkError):
        while True:
            await connection.send(*await connection.receive())


async def dial(transport: MultiTransport, peer: str, addresses: Sequence[str]) -> Connection:
    """A listener's reservation at its relay takes a moment."""
    for _ in range(20):
        with contextlib.suppress(PeerUnreachable):
            return await transport.dial(peer, addresses)
        await asyncio.sleep(0.5)
    return await transport.dial(peer, addresses)


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


async def main(role: str, host: str, relay: str = "", peer: str = "", *addresses: str) -> None:
    listen = (f"/ip4/{host}/tcp/0",)
    if role == "relay":
        options = HostOptions(listen, relay_server=True)
    else:
        options = HostOptions(listen, peers=(relay,), relays=(relay,) if role == "listen" else ())
    transport = await MultiTransport.start(Identity.generate(), options)
    try:
        await transport.serve(echo)
        if role == "dial":
            connection = await dial(transport, peer, addresses)
            echoed = 0
            with contextlib.suppress(NetworkError):
                while echoed < FRAMES:
                    body = os.urandom(BODY)
                    await connection.send(CloseSession(bytes(16)), body)
                    if await connection.receive() != (CloseSession(bytes(16)), body):
                        break
                    echoed += 1
            say(echoed=echoed, of=FRAMES)
            return
        say(peer=transport.peer, addresses=transport.addresses)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await transport.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
