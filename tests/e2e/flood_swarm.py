"""Floods of work in virtual time: batches take the time that a cost curve gives, attackers send what the protocol lets
them, and honest clients count their tokens. Used by the tests and by `benchmarks/bench_fairness.py`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from memory_swarm import MemorySwarm, memory_swarm

from swarm.errors import NetworkError
from swarm.messages import AnyMessage, OpenSession, Step, StepResult
from swarm.net.base.transport import Connection
from swarm.net.pool.connection_pool import ConnectionPool
from swarm.net.security.identity import Identity
from swarm.planner.scheduling.fair_shares import Share
from swarm.planner.scheduling.work_model import WorkModel
from swarm.testing.memory_network import LinkModel
from swarm.types import CostCurve, LayerSpan, ModelId, PeerId
from swarm_hop.serving.executor import ScheduledStep
from swarm_hop.sharing.shares import SharePlaces

# ms a layer for a batch of so many rows: a core reads the weights, then computes (the shape of a small model on a CPU)
CURVE = CostCurve((1, 4, 16, 64, 256), (1.25, 1.6, 3.2, 9.0, 34.0))
CONTEXT_TOKENS = 1024.0  # of context cost as much as a row's weights


class CostedDevice:
    """Computes at once, and is busy for as long as the cost curve says."""

    def __init__(self) -> None:
        self.owed_ms = 0.0
        self.delay_s = 0.0  # of `memory_swarm.VirtualDevice`, for what the node's record says

    def run(self, compute: Callable[[], Any]) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_task(self._run(compute))

    async def _run(self, compute: Callable[[], Any]) -> Any:
        return compute()

    def run_parts(self, part: Callable[[], Any]) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_task(self._run_parts(part))

    async def _run_parts(self, part: Callable[[], Any]) -> Any:
        took_ms, result = 0.0, None
        while result is None:
            result = part()
            owed_ms, self.owed_ms = self.owed_ms, 0.0
            took_ms += owed_ms
            await asyncio.sleep(owed_ms / 1e3)
        return result, took_ms

    def close(self) -> None:
        """Nothing to release."""


class CostedCompute:
    """A batch, whole or in slices; each part adds its time to what the device owes."""

    def __init__(self, inner: Any, device: CostedDevice, batch_ms: float, layers: int) -> None:
        self._inner = inner
        self._device = device
        self._left_ms = batch_ms
        self._layer_ms = batch_ms / layers

    def run_layers(self, count: int) -> Any:
        self._owe(min(self._left_ms, count * self._layer_ms))
        return self._inner.run_layers(count)

    def __call__(self) -> Any:
        self._owe(self._left_ms)
        return self._inner()

    def _owe(self, ms: float) -> None:
        self._left_ms -= ms
        self._device.owed_ms += ms


def batch_ms(steps: Sequence[ScheduledStep]) -> float:
    rows = sum(step.rows for step in steps)
    row_context = sum(step.rows * step.arrival.step.committed_before for step in steps)
    per_row = CURVE.ms[-1] / CURVE.widths[-1]
    return (CURVE.ms_at(rows) + per_row * row_context / CONTEXT_TOKENS) * len(steps[0].span)


class OneQueue(SharePlaces):
    """Everybody's work goes on one account, so that nothing is shared: first come, first served."""

    def of(self, peer: PeerId, remote: str) -> Share:
        return Share()


def make_costly(swarm: MemorySwarm, places: Callable[[], SharePlaces]) -> None:
    """Let the batches of all nodes take their time."""
    for node in swarm.nodes.values():
        node.service._admission._places = places()
        device, original = CostedDevice(), node.engine.prepare
        executor: Any = next(iter(node.service.served_spans)).executor
        executor._device = device
        executor._scheduler._work = WorkModel(CURVE, CONTEXT_TOKENS)

        def prepare(steps: Sequence[ScheduledStep], device: Any = device, original: Any = original) -> Any:
            return CostedCompute(original(steps), device, batch_ms(steps), len(steps[0].span))

        node.engine.prepare = prepare  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class Flood:
    """What one session of an attacker sends again and again: `causal` rows, then `tree` rows, `window` steps ahead."""

    name: str
    causal: int
    tree: int = 0
    window: int = 2
    sample: bool = True


TREES = Flood("tree steps of 256 rows", 1, 255)
PREFILLS = Flood("prefill chunks of 256 rows", 256, sample=False)
SMALL = Flood("small prefills", 8, sample=False, window=8)
TOKENS = Flood("single tokens", 1, window=4)
MAX_TOKENS = 512
KV_TOKENS = 32 * MAX_TOKENS


class Attacker:
    """`async with` it: `sessions` sessions through all nodes, of one identity, flooded until the block ends."""

    def __init__(self, swarm: MemorySwarm, number: int, flood: Flood, sessions: int = 4, host: str = "") -> None:
        self.peer = Identity.from_seed((5000 + number).to_bytes(32, "big")).peer
        self.results = 0
        self._swarm = swarm
        self._flood = flood
        self._sessions = sessions
        self._progress = {bytes([number % 256, i]) * 8: asyncio.Event() for i in range(sessions)}
        self._received = dict.fromkeys(self._progress, 0)
        if host:
            swarm.network.hosts[self.peer] = host

    @asynccontextmanager
    async def run(self) -> AsyncIterator[Attacker]:
        transport = self._swarm.network.transport(self.peer)
        async with ConnectionPool(transport, self._on_frame, self._on_lost, self._swarm.limits) as pool:
            tasks = [asyncio.ensure_future(self._session(pool, session)) for session in self._progress]
            try:
                yield self
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        await transport.close()

    async def _on_frame(self, connection: Connection, message: AnyMessage, body: memoryview) -> None:
        if isinstance(message, StepResult):
            self.results += 1
            self._received[message.session] += 1
            self._progress[message.session].set()

    async def _on_lost(self, connection: Connection, error: NetworkError) -> None:
        """Whatever it was, others are flooded on."""

    async def _session(self, pool: ConnectionPool, session: bytes) -> None:
        swarm, flood = self._swarm, self._flood
        peers: list[PeerId] = list(swarm.peers)
        served = ModelId(swarm.source.name, swarm.source.weight_hash, "fp32")
        for i, peer in enumerate(peers):
            span = swarm.nodes[peer].span
            message = OpenSession(
                session, served.model, served.weight_hash, served.dtype, span.start, span.end, MAX_TOKENS,
                upstream=peers[i - 1] if i else "", downstream=peers[i + 1] if i + 1 < len(peers) else "",
            )  # fmt: skip
            await (await pool.get(peer)).send(message)
        await asyncio.sleep(0.2)
        base = epoch = 0
        link = await pool.get(peers[0])
        for number in itertools.count():
            if base + flood.causal > MAX_TOKENS:
                base, epoch = 0, epoch + 1
            while number - self._received[session] >= flood.window:
                self._progress[session].clear()
                await self._progress[session].wait()
            step = Step(
                session, epoch, number, base, flood.causal, sample=flood.sample,
                tokens=[5] * (flood.causal + flood.tree), parents=[-1] * flood.tree, slots=list(range(flood.tree)),
            )  # fmt: skip
            base += flood.causal
            with contextlib.suppress(NetworkError):
                await link.send(step)


@asynccontextmanager
async def costly_swarm(
    source: Any, spans: Sequence[LayerSpan], places: Callable[[], SharePlaces] = SharePlaces, delay_s: float = 0.001
) -> AsyncIterator[MemorySwarm]:
    async with memory_swarm(source, (), LinkModel(delay_s=delay_s)) as swarm:
        for span in spans:
            await swarm.add_node(span, kv_tokens=KV_TOKENS)
        make_costly(swarm, places)
        yield swarm


@dataclass(slots=True)
class Honest:
    """A client that asks again and again: its tokens/s and the answers, which must not depend on the company."""

    rate: float = 0.0
    answers: list[tuple[int, ...]] | None = None


async def honest_rate(
    swarm: MemorySwarm, seconds: float, name: int = 0, prompt: Sequence[int] = (3, 5, 7), tokens: int = 32
) -> Honest:
    loop = asyncio.get_running_loop()
    async with swarm.client(name, decoding="sequential") as client:
        await client.generate(list(prompt), max_new_tokens=2)
        started, count, answers = loop.time(), 0, []
        while loop.time() - started < seconds:
            answer = await client.generate(list(prompt), max_new_tokens=tokens)
            answers.append(tuple(answer.token_ids))
            count += len(answer.token_ids)
        return Honest(count / (loop.time() - started), answers)
