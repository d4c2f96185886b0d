"""A session server without tensors: an engine that does arithmetic on bytes, and a rig of services in memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from swarm.codec import Buffer
from swarm.config import Limits, data_dir
from swarm.errors import InvalidRequest, NetworkError, OutOfMemory, UnsupportedRequest
from swarm.messages import AnyMessage, CloseSession, OpenSession, SessionOpened, Step, StepResult, WireSampling
from swarm.net.base.transport import Connection
from swarm.net.pool.connection_pool import ConnectionPool
from swarm.planner.scheduling.fair_shares import Share
from swarm.testing.memory_network import MemoryNetwork
from swarm.types import Grammar, LayerSpan, ModelId, PeerId, Sampling
from swarm_hop.serving.compute_device import InlineDevice
from swarm_hop.serving.executor import Executor, ScheduledStep, StepOutput
from swarm_hop.serving.served_spans import SpanEngineApi
from swarm_hop.serving.session import ActivationSpec
from swarm_hop.serving.session_server import SessionServer
from swarm_hop.serving.token_history import StepTokens
from swarm_kernels.models.row_layout import RowLayout
from swarm_kernels.sampling.grammar import GrammarState, TokenMask

LAYERS = 6
ROWS = ActivationSpec(RowLayout(1, LAYERS), element_bytes=1, vocab_size=200, context_length=1 << 20)
SERVED = ModelId("toy", "hash", "fp32")
LIMITS = Limits(max_sessions=4, max_sessions_per_peer=3, max_protocol_errors=3)


@dataclass
class FakeWriter:
    """Takes what a `ToyEngine`'s reader returns."""

    filled: list[tuple[int, int]]

    def __call__(self, layer: int, first: int, body: bytes) -> None:
        assert body == bytes([layer]) * len(body)
        self.filled.append((layer, first))

    def finish(self) -> None:
        """Nothing is left to do."""


@dataclass
class ToyEngine:
    """A row is one byte; a layer adds one to it (mod 200); the token sampled from a row is its value."""

    span: LayerSpan
    rows: ActivationSpec = ROWS
    capacity: int = 1000
    reserved: dict[int, int] = field(default_factory=dict)
    batches: list[int] = field(default_factory=list)
    fail: Exception | None = None
    refuse_key: int | None = None
    rolled_back: list[int] = field(default_factory=list)
    filled: list[tuple[int, int]] = field(default_factory=list)

    @property
    def capacity_tokens(self) -> int:
        return self.capacity

    async def compile_grammar(self, grammar: Grammar, share: Share) -> GrammarState:
        raise UnsupportedRequest("a toy has no tokenizer")

    async def grammar_masks(self, state: GrammarState, tokens: StepTokens, peer: PeerId) -> Sequence[TokenMask | None]:
        raise UnsupportedRequest("a toy has no tokenizer")

    def admit(self, key: int, max_tokens: int) -> None:
        if sum(self.reserved.values()) + max_tokens > self.capacity:
            raise OutOfMemory(f"{max_tokens} tokens do not fit")
        self.reserved[key] = max_tokens

    def fork(self, parent: int, key: int, max_tokens: int, length: int) -> None:
        assert parent in self.reserved
        self.admit(key, max_tokens)

    def freeze_prefix(self, key: int, length: int) -> None:
        self.reserved[key] = length

    def shrink(self, key: int, max_tokens: int) -> None:
        self.reserved[key] = max_tokens

    def release(self, key: int) -> None:
        self.reserved.pop(key, None)

    def prune(self, key: int, slots: Sequence[int]) -> None:
        assert key in self.reserved

    def rollback(self, key: int, length: int) -> None:
        assert key in self.reserved
        self.rolled_back.append(length)

    session_capacity = 1 << 30
    tail_drafts = None

    def reusable(self, key: int, length: int, multiple: int) -> int:
        return length // multiple * multiple

    def transfer_units(self, layer: int, tokens: int) -> int:
        return -(-tokens // 4)

    def unit_bytes(self, layer: int) -> int:
        return 4

    def distinct_layers(self, layers: LayerSpan) -> Sequence[int]:
        return list(layers)

    def import_blocks(self, key: int, tokens: int) -> None:
        if tokens > self.reserved[key]:
            raise InvalidRequest("more than was reserved")

    def reader(self, key: int, tokens: int) -> Callable[[int, int, int], bytes]:
        assert key in self.reserved
        return lambda layer, block, count: bytes([layer]) * (self.unit_bytes(layer) * count)

    def writer(self, key: int, tokens: int, layers: LayerSpan) -> FakeWriter:
        return FakeWriter(self.filled)

    def prepare(self, works: Sequence[ScheduledStep]) -> Callable[[], list[StepOutput]]:
        assert len({id(w.session) for w in works}) == len(works)
        assert len({w.session.span for w in works}) == 1
        if any(w.session.key == self.refuse_key for w in works):
            raise InvalidRequest("that step is not allowed")
        self.batches.append(len(works))
        return lambda: [self._compute(w) for w in works]

    def finished(self, works: Sequence[ScheduledStep]) -> None:
        """Nothing was held back."""

    def min_layers(self, part: LayerSpan) -> int:
        return len(part)

    def _compute(self, work: ScheduledStep) -> StepOutput:
        if self.fail is not None:
            raise self.fail
        step, session = work.arrival.step, work.session
        rows = bytes(step.tokens) if session.first else bytes(work.arrival.body)
        rows = bytes((r + len(session.span)) % 200 for r in rows)
        if session.tail:
            return StepOutput(tokens=tuple(rows[max(step.causal_rows - 1, 0) :]) if step.sample else ())
        return StepOutput(body=rows)


@dataclass
class ToyClient:
    """Raw messages to any node; everything that comes back in order of arrival."""

    pool: ConnectionPool
    inbox: asyncio.Queue[tuple[PeerId, AnyMessage, bytes]]
    lost: list[PeerId]

    async def send(self, peer: PeerId, message: AnyMessage, body: Buffer = b"") -> None:
        await (await self.pool.get(peer)).send(message, body)

    async def next(self) -> tuple[PeerId, AnyMessage, bytes]:
        async with asyncio.timeout(30):
            return await self.inbox.get()

    async def message(self) -> AnyMessage:
        return (await self.next())[1]

    async def quiet(self, seconds: float = 1.0) -> bool:
        """Whether nothing comes for so long."""
        await asyncio.sleep(seconds)
        return self.inbox.empty()

    async def open(
        self,
        session: bytes,
        hops: Sequence[tuple[PeerId, int, int]],
        max_tokens: int = 50,
        sampling: Sampling | None = None,
        history: Sequence[int] = (),
        served: ModelId = SERVED,
    ) -> None:
        for i, (peer, start, end) in enumerate(hops):
            await self.send(peer, open_message(session, hops, i, start, end, max_tokens, sampling, history, served))
        for _ in hops:
            message = await self.message()
            assert isinstance(message, SessionOpened), message


def open_message(
    session: bytes,
    hops: Sequence[tuple[PeerId, int, int]],
    i: int,
    start: int,
    end: int,
    max_tokens: int = 50,
    sampling: Sampling | None = None,
    history: Sequence[int] = (),
    served: ModelId = SERVED,
) -> OpenSession:
    return OpenSession(
        session=session,
        model=served.model,
        weight_hash=served.weight_hash,
        dtype=served.dtype,
        sampling=WireSampling.of(sampling) if sampling else None,
        history=list(history),
        prompt_tokens=len(history),
        start=start,
        end=end,
        max_tokens=max_tokens,
        upstream=hops[i - 1][0] if i else "",
        downstream=hops[i + 1][0] if i + 1 < len(hops) else "",
    )


def line_step(
    session: bytes, number: int, base: int, tokens: Sequence[int], sample: bool = True, forward: bool = False
) -> Step:
    return Step(
        session,
        epoch=0,
        step=number,
        committed_before=base,
        causal_rows=len(tokens),
        sample=sample,
        tokens=list(tokens),
        forward_tokens=forward,
    )


@asynccontextmanager
async def toy_client(network: MemoryNetwork, name: str = "client") -> AsyncIterator[ToyClient]:
    inbox: asyncio.Queue[tuple[PeerId, AnyMessage, bytes]] = asyncio.Queue()
    lost: list[PeerId] = []

    async def on_frame(connection: Connection, message: AnyMessage, body: memoryview) -> None:
        inbox.put_nowait((connection.peer, message, bytes(body)))

    async def on_lost(connection: Connection, error: NetworkError) -> None:
        lost.append(connection.peer)

    transport = network.transport(name)
    async with ConnectionPool(transport, on_frame, on_lost, LIMITS) as pool:
        yield ToyClient(pool, inbox, lost)
    await transport.close()


@asynccontextmanager
async def serving(
    network: MemoryNetwork,
    name: str,
    engine: SpanEngineApi,
    served: ModelId = SERVED,
    delay_s: float = 0.01,
    limits: Limits = LIMITS,
) -> AsyncIterator[SessionServer]:
    """A node of the memory network around any engine. A batch takes `delay_s` of the loop's time."""
    transport = network.transport(name)
    services: list[SessionServer] = []

    async def on_frame(connection: Connection, message: AnyMessage, body: memoryview) -> None:
        await services[0].on_frame(connection, message, body)

    async def on_lost(connection: Connection, error: NetworkError) -> None:
        await services[0].on_lost(connection, error)

    async with (
        ConnectionPool(
            transport, on_frame, on_lost, limits, uses=lambda peer: bool(services) and services[0].uses(peer)
        ) as pool,
        SessionServer(served, pool, limits) as service,
    ):
        services.append(service)
        executor = Executor(engine, InlineDevice(delay_s), limits.batch_tokens, clock=asyncio.get_running_loop().time)
        service.begin(engine, executor)
        await pool.serve()
        yield service
    await executor.close()
    await transport.close()


@asynccontextmanager
async def toy_node(
    network: MemoryNetwork, name: str, span: LayerSpan
) -> AsyncIterator[tuple[SessionServer, ToyEngine]]:
    engine = ToyEngine(span)
    async with serving(network, name, engine) as service:
        yield service, engine


class Generation:
    """A client that sends a prompt in chunks, then token after token."""

    def __init__(
        self,
        client: ToyClient,
        session: bytes,
        prompt: Sequence[int],
        hops: Sequence[tuple[PeerId, int, int]],
        served: ModelId = SERVED,
    ) -> None:
        self.client, self.session, self.hops, self.served = client, session, hops, served
        self.known = list(prompt)
        self.sent = self.steps = 0
        self.forward = False

    async def open(self, count: int, sampling: Sampling | None = None) -> None:
        self.forward = sampling is not None and sampling.needs_history
        await self.client.open(self.session, self.hops, len(self.known) + count, sampling, self.known, self.served)

    async def send(self, chunk: int = 1000) -> None:
        """Send the next rows; the last of those known asks for a token."""
        part = self.known[self.sent : self.sent + chunk]
        sample = self.sent + len(part) == len(self.known)
        step = line_step(self.session, self.steps, self.sent, part, sample, self.forward)
        await self.client.send(self.hops[0][0], step)
        self.sent += len(part)
        self.steps += 1

    async def generate(
        self, count: int, chunks: Sequence[int] = (1000,), sampling: Sampling | None = None
    ) -> list[int]:
        """`count` tokens, one after the other; then the session is closed."""
        await self.open(count, sampling)
        prompt = len(self.known)
        for chunk in (*chunks, 1000):
            if self.sent < prompt:
                await self.send(chunk)
        waiting = self.steps
        while len(self.known) < prompt + count:
            result = await self.client.message()
            assert isinstance(result, StepResult), result
            waiting -= 1
            self.known.extend(result.tokens)
            if not waiting and len(self.known) < prompt + count:
                await self.send()
                waiting += 1
        for name, _, _ in self.hops:
            await self.client.send(name, CloseSession(self.session))
        return self.known[prompt:]


def prompt_of(length: int, seed: int) -> list[int]:
    """Token ids of the tiny models' vocabulary."""
    rng = random.Random(seed)
    return [rng.randrange(131) for _ in range(length)]


def private_home(folder: Path) -> Path:
    """A SWARM_HOME with nothing in it but the compiled kernels, which take long to build."""
    kernels = data_dir() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    if not (folder / "kernels").exists():
        (folder / "kernels").symlink_to(kernels)
    return folder
