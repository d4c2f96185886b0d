"""Connections that say nothing, or a byte at a time: each ends in time, and they are not too many."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from gateway_swarm import gateway_swarm

from swarm.config import GatewayConfig
from swarm_gateway.http import body, connection
from swarm_gateway.http.policy import POLICY

QUICK = replace(POLICY, header_timeout_s=0.3, body_timeout_s=0.5, max_connections=4)
POST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "POLICY", QUICK)
    monkeypatch.setattr(body, "POLICY", QUICK)


async def dribble(port: int, first: bytes, then: bytes = b"x", within_s: float = 3.0) -> bytes:
    """Send `first`, then `then` every 50 ms, until the gateway closes the connection. -> what it answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(first)
        async with asyncio.timeout(within_s):
            reading = asyncio.ensure_future(reader.read())
            while not reading.done():
                writer.write(then)
                await asyncio.sleep(0.05)
            return await reading
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_slow_and_silent_connections_end() -> None:
    async with gateway_swarm(config=GatewayConfig(api_keys=("k",)), sockets=True) as gateway:
        port = gateway.http.base_url.port
        assert port is not None
        assert await dribble(port, b"", b"") == b""
        assert await dribble(port, b"GET /health HTTP/1.1\r\nX: ") == b""
        answer = await dribble(port, POST.replace(b"Content-Type", b"X-Api-Key: k\r\nContent-Type"))
        assert answer.startswith(b"HTTP/1.1 408 ")
        await dribble(port, POST)  # refused for want of a key; nobody reads the rest of its body
        health = await gateway.http.get("/health")
        assert health.status_code == 200
        await asyncio.sleep(0.5)  # an idle connection between two requests has its own, longer time
        assert (await gateway.http.get("/health")).status_code == 200


async def test_connections_are_not_too_many() -> None:
    async with gateway_swarm(sockets=True) as gateway, AsyncExitStack() as stack:
        port = gateway.http.base_url.port
        opened = []
        for _ in range(QUICK.max_connections + 3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            opened.append(reader)
        await asyncio.sleep(0.1)
        assert sum(reader.at_eof() or reader.exception() is not None for reader in opened) == 3
        await asyncio.sleep(0.4)  # the silent ones end, and there is room again
        assert (await gateway.http.get("/health")).status_code == 200
