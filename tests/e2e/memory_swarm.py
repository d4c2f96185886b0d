"""A whole swarm in one process and in virtual time: real services, spans and client; only the network is in memory."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from virtual_clock import wall_clock

from swarm.config import ClientConfig, Limits, NodeConfig
from swarm.errors import NetworkError
from swarm.messages import AnyMessage
from swarm.net.pool.connection_pool import ConnectionPool
from swarm.net.pool.migratable_link import MigratableLink
from swarm.net.security.identity import Identity
from swarm.testing.memory_network import LinkModel as MemoryLink
from swarm.testing.memory_network import MemoryNetwork
from swarm.types import LayerSpan, ModelId, NodeProfile, NodeState, PeerId
from swarm_client import SwarmClient
from swarm_client.network.connection import ClientNetwork
from swarm_client.speculation.controller import AsyncDrafter
from swarm_hop.drafting.tail_drafts import TailDrafts
from swarm_hop.serving.executor import Executor
from swarm_hop.serving.grammars import TailGrammars
from swarm_hop.serving.session_server import SessionServer
from swarm_hop.serving.span_engine import SpanEngine
from swarm_kernels.device.device import DTYPES
from swarm_kernels.draft.medusa import MedusaHeads
from swarm_kernels.draft.tail import OpenDrafter
from swarm_kernels.runtime.load import load_span
from swarm_node.membership.address_book import AddressBook
from swarm_node.membership.record_publisher import RecordPublisher
from swarm_node.membership.swarm_records import SwarmRecords
from swarm_node.network.connection import NodeNetwork

LIMITS = Limits(route_timeout_s=3.0)
STEP_S = 0.002  # what a batch takes


class NumberTokenizer:
    """Token ids as words, for models without a vocabulary of their own. End-of-turn ids are special tokens."""

    skips: tuple[int, ...] = ()

    def __init__(self, eos_token_ids: Sequence[int] = ()) -> None:
        self.eos_token_ids = tuple(eos_token_ids)

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def apply_chat_template(self, messages: Sequence[Any]) -> list[int]:
        return [token for message in messages for token in self.encode(message["content"])]

    def stream(self, *, skip_special_tokens: bool = True) -> NumberTokenizer:
        decoder = NumberTokenizer(self.eos_token_ids)
        decoder.skips = self.eos_token_ids if skip_special_tokens else ()
        return decoder

    def push(self, token: int) -> str:
        return "" if token in self.skips else f"{token} "

    def finish(self) -> str:
        return ""


class VirtualDevice:
    """A device whose batches take, and report, `delay_s` of the loop's time."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s

    def run(self, compute: Callable[[], Any]) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_task(self._run(compute))

    async def _run(self, compute: Callable[[], Any]) -> Any:
        await asyncio.sleep(self.delay_s)
        return compute()

    def run_parts(self, part: Callable[[], Any]) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_task(self._run_parts(part, self.delay_s))

    async def _run_parts(self, part: Callable[[], Any], delay_s: float) -> Any:
        await asyncio.sleep(delay_s)
        while (result := part()) is None:
            """The next one."""
        return result, delay_s * 1e3

    def close(self) -> None:
        """Nothing to release."""


@dataclass
class MemoryNode:
    """One node: the real service, engine, pool and record publisher, on a transport in memory."""

    identity: Identity
    span: LayerSpan
    engine: SpanEngine
    device: VirtualDevice
    service: SessionServer
    pool: ConnectionPool
    records: SwarmRecords
    publishing: asyncio.Task[None]

    @property
    def peer(self) -> PeerId:
        return self.identity.peer

    def leaks(self) -> str:
        """Leaks of closed sessions, apart from retained prefixes; "" if none."""
        for served_span in self.service.served_spans:
            served_span.forget_all()
        self.engine.cache.check_integrity()
        held = (self.service.sessions, len(self.engine.cache), self.service.logged_bytes)
        return "" if held == (0, 0, 0) else f"node {self.peer[-6:]} holds {held} sessions, caches, bytes of logs"


@dataclass
class MemorySwarm:
    """`client()` connects a new one; `kill(peer)` crashes a node."""

    source: Any
    network: MemoryNetwork
    stack: AsyncExitStack
    limits: Limits = LIMITS
    heads: Path | None = None  # Medusa's, of the tails
    tokenizer: Any = None  # of the tails, for grammars
    drafter: OpenDrafter | None = None  # of the tails
    peers: list[PeerId] = field(default_factory=list)
    engines: dict[PeerId, SpanEngine] = field(default_factory=dict)
    nodes: dict[PeerId, MemoryNode] = field(default_factory=dict)
    _spans: dict[tuple[LayerSpan, str], Any] = field(default_factory=dict)

    async def add_node(
        self,
        span: LayerSpan,
        dtype: str = "fp32",
        kv_tokens: int = 2048,
        seed: int | None = None,
        region: str = "",
    ) -> PeerId:
        """A new node, or a restart of the one with this `seed`."""
        identity = Identity.from_seed((len(self.peers) if seed is None else seed).to_bytes(32, "big"))
        peer, source, limits = identity.peer, self.source, self.limits
        if (span, dtype) not in self._spans:
            self._spans[span, dtype] = load_span(source, span, DTYPES[dtype])
        loaded = self._spans[span, dtype]
        tail = self.heads is not None and span.end == source.config.num_layers
        heads = MedusaHeads.of(self.heads, loaded, self.source) if tail and self.heads is not None else None
        grammars = TailGrammars(lambda: self.tokenizer, source.config.vocab_size) if self.tokenizer else None
        drafts = TailDrafts(self.drafter) if self.drafter and span.end == source.config.num_layers else None
        engine = SpanEngine(loaded, loaded.new_cache(kv_tokens), heads, grammars, tail_drafts=drafts)
        services: list[SessionServer] = []

        async def on_frame(connection: MigratableLink, message: AnyMessage, body: memoryview) -> None:
            if not records.on_frame(connection, message, body):
                await services[0].on_frame(connection, message, body)

        async def on_lost(connection: MigratableLink, error: NetworkError) -> None:
            await services[0].on_lost(connection, error)

        carrier = self.network.transport(peer)
        self.stack.push_async_callback(carrier.close)
        pool = await self.stack.enter_async_context(
            ConnectionPool(carrier, on_frame, on_lost, limits, uses=lambda peer: services[0].uses(peer))
        )
        network = NodeNetwork(carrier, self.network.directory(peer), identity.sign, wall_clock=wall_clock)
        records = SwarmRecords(network, pool, NodeConfig(), source.name, source.config.num_layers)
        self.stack.push_async_callback(records.close)
        service = await self.stack.enter_async_context(
            SessionServer(
                ModelId(source.name, source.weight_hash, dtype),
                pool,
                limits,
                on_load=lambda: announcer.changed(),
                addresses_of=AddressBook(records.reader.snapshot).of,
            )
        )
        services.append(service)
        clock = asyncio.get_running_loop().time
        device = VirtualDevice(STEP_S)
        executor = Executor(engine, device, limits.batch_tokens, clock=clock)
        self.stack.push_async_callback(executor.close)
        service.begin(engine, executor)
        await pool.serve()

        def profile(now: float) -> NodeProfile:
            return NodeProfile(
                peer,
                f"node {peer[-4:]}",
                NodeState.SERVING,
                dtype,
                source.weight_hash,
                len(span),
                span,
                carrier.addresses,
                (device.delay_s * 1e3 / len(span),) * len(span),
                kv_capacity_tokens=kv_tokens,
                kv_free_tokens=service.free_tokens(engine, engine.cache.free_tokens),
                sessions=service.sessions,
                region=region,
                network_coordinate=(0.0,),
                drafter=drafts.offered if drafts is not None else None,
                published_at=now,
            )

        announcer = RecordPublisher(
            self.network.directory(peer),
            identity.sign,
            source.name,
            source.config.num_layers,
            profile,
            limits,
            wall_clock,
            keep_own=records.keep_own,
        )
        await announcer.publish()
        task = asyncio.get_running_loop().create_task(announcer.run())
        self.stack.callback(task.cancel)
        if peer not in self.peers:
            self.peers.append(peer)
        self.engines[peer] = engine
        self.nodes[peer] = MemoryNode(identity, span, engine, device, service, pool, records, task)
        return peer

    @asynccontextmanager
    async def client(
        self,
        name: int = 0,
        eos: Sequence[int] = (),
        make_drafter: Callable[[], AsyncDrafter] | None = None,
        tokenizer: Any = None,
        **config: Any,
    ) -> AsyncIterator[SwarmClient]:
        config.setdefault("audits", "off")
        peer = Identity.from_seed((1000 + name).to_bytes(32, "big")).peer
        carrier = self.network.transport(peer)
        network = ClientNetwork.from_transport(
            carrier, self.network.directory(peer), self.limits, wall_clock, wall_clock
        )
        async with (
            network.pool,
            SwarmClient(
                config=ClientConfig(limits=self.limits, **config),
                network=network,
                source=self.source,
                tokenizer=tokenizer or NumberTokenizer(eos),
                make_drafter=make_drafter,
            ) as client,
        ):
            yield client
        await carrier.close()

    def kill(self, peer: PeerId, silent: bool = False) -> None:
        """Its process crashes; `silent`: its machine vanishes, and no connection is closed."""
        self.network.kill(peer, silent)
        self.nodes[peer].publishing.cancel()


@asynccontextmanager
async def memory_swarm(
    source: Any,
    spans: Sequence[LayerSpan],
    link: MemoryLink | None = None,
    dtype: str = "fp32",
    seed: int = 0,
    limits: Limits = LIMITS,
    heads: Path | None = None,
    tokenizer: Any = None,
    drafter: OpenDrafter | None = None,
) -> AsyncIterator[MemorySwarm]:
    async with AsyncExitStack() as stack:
        network = MemoryNetwork(seed, link, clock=wall_clock)
        swarm = MemorySwarm(source, network, stack, limits, heads, tokenizer, drafter)
        for span in spans:
            await swarm.add_node(span, dtype)
        yield swarm


def cut(num_layers: int, *borders: int) -> list[LayerSpan]:
    """Spans of `[0, num_layers)` with these inner borders."""
    edges = (0, *borders, num_layers)
    return [LayerSpan(a, b) for a, b in itertools.pairwise(edges)]
