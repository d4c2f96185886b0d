"""A whole swarm in one process and in virtual time: real services, spans and client; only the network is in memory."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from virtual_clock import wall_clock

from swarm.config import ClientConfig, Limits
from swarm.errors import NetworkError
from swarm.messages import AnyMessage
from swarm.net.carrier import Connection
from swarm.net.identity import Identity
from swarm.net.memory import Link, MemoryNetwork
from swarm.net.pool import ConnectionPool
from swarm.types import LayerSpan, NodeProfile, NodeState, PeerId
from swarm_client import SwarmClient
from swarm_client.network import Network
from swarm_kernels.span_loading import load_span
from swarm_node.announcer import Announcer
from swarm_node.engine import SpanEngine
from swarm_node.executor import Executor, InlineDevice
from swarm_node.service import Served, Service

LIMITS = Limits(route_timeout_s=3.0)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class NumberTokenizer:
    """Token ids as words, for models without a vocabulary of their own."""

    def __init__(self, eos_token_ids: Sequence[int] = ()) -> None:
        self.eos_token_ids = tuple(eos_token_ids)

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def apply_chat_template(self, messages: Sequence[Any]) -> list[int]:
        return [token for message in messages for token in self.encode(message["content"])]

    def stream(self) -> NumberTokenizer:
        return self

    def push(self, token: int) -> str:
        return f"{token} "

    def finish(self) -> str:
        return ""


@dataclass
class MemorySwarm:
    """`client()` connects a new one; `kill(peer)` ends a node without a word."""

    source: Any
    network: MemoryNetwork
    stack: AsyncExitStack
    peers: list[PeerId] = field(default_factory=list)
    engines: dict[PeerId, SpanEngine] = field(default_factory=dict)

    async def add_node(self, span: LayerSpan, dtype: str = "fp32", kv_tokens: int = 2048) -> PeerId:
        identity = Identity.from_seed(len(self.peers).to_bytes(32, "big"))
        peer, source = identity.peer, self.source
        loaded = load_span(source, span, DTYPES[dtype])
        engine = SpanEngine(loaded, loaded.new_cache(kv_tokens))
        services: list[Service] = []

        async def on_frame(connection: Connection, message: AnyMessage, body: memoryview) -> None:
            await services[0].on_frame(connection, message, body)

        async def on_lost(connection: Connection, error: NetworkError) -> None:
            await services[0].on_lost(connection, error)

        carrier = self.network.carrier(peer)
        self.stack.push_async_callback(carrier.close)
        pool = await self.stack.enter_async_context(ConnectionPool(carrier, on_frame, on_lost, LIMITS))
        service = await self.stack.enter_async_context(
            Service(Served(source.name, source.weight_hash, dtype), pool, LIMITS)
        )
        services.append(service)
        executor = Executor(engine, InlineDevice(0.002), LIMITS.batch_tokens, clock=asyncio.get_running_loop().time)
        self.stack.push_async_callback(executor.close)
        service.begin(engine, executor)
        await pool.serve()

        def profile(now: float) -> NodeProfile:
            return NodeProfile(
                peer,
                f"node-{len(self.peers)}",
                NodeState.SERVING,
                dtype,
                source.weight_hash,
                len(span),
                span,
                carrier.addresses,
                (0.5,) * len(span),
                kv_capacity_tokens=kv_tokens,
                kv_free_tokens=kv_tokens,
                published_at=now,
            )

        announcer = Announcer(
            self.network.directory(peer),
            identity.sign,
            source.name,
            source.config.num_layers,
            profile,
            LIMITS,
            wall_clock,
        )
        await announcer.publish()
        task = asyncio.get_running_loop().create_task(announcer.run())
        self.stack.callback(task.cancel)
        self.peers.append(peer)
        self.engines[peer] = engine
        return peer

    @asynccontextmanager
    async def client(self, name: int = 0, eos: Sequence[int] = (), **config: Any) -> AsyncIterator[SwarmClient]:
        peer = Identity.from_seed((1000 + name).to_bytes(32, "big")).peer
        carrier = self.network.carrier(peer)
        network = Network.over(carrier, self.network.directory(peer), LIMITS, wall_clock)
        async with (
            network.pool,
            SwarmClient(
                config=ClientConfig(limits=LIMITS, **config),
                network=network,
                source=self.source,
                tokenizer=NumberTokenizer(eos),  # type: ignore[arg-type]
            ) as client,
        ):
            yield client
        await carrier.close()

    def kill(self, peer: PeerId) -> None:
        self.network.kill(peer)


@asynccontextmanager
async def memory_swarm(
    source: Any, spans: Sequence[LayerSpan], link: Link | None = None, dtype: str = "fp32", seed: int = 0
) -> AsyncIterator[MemorySwarm]:
    async with AsyncExitStack() as stack:
        swarm = MemorySwarm(source, MemoryNetwork(seed, link, clock=wall_clock), stack)
        for span in spans:
            await swarm.add_node(span, dtype)
        yield swarm


def cut(num_layers: int, *borders: int) -> list[LayerSpan]:
    """Spans of `[0, num_layers)` with these inner borders."""
    edges = (0, *borders, num_layers)
    return [LayerSpan(a, b) for a, b in itertools.pairwise(edges)]
