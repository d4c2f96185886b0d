"""The leader's side: outputs of experts that other nodes hold, for a compute thread that waits for them.

Owns the questions under way, whom they go to, and who is not asked for a while because it failed. `membership` says who
holds what, `swarm.planner.placement.experts` who is asked for which experts. The compute thread blocks, the event loop
never does; nothing waits longer than `ExpertPolicy.give_up_s`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field

import torch

from swarm.codec import Buffer
from swarm.errors import ConnectionLost, NetworkError, NodeBusy, ProtocolError, RemoteError, SwarmError
from swarm.expert_messages import ExpertOutputs, ExpertRows, ExpertsRefused
from swarm.net.base.tasks import TaskSet, run_all
from swarm.planner.placement.experts import assign_experts
from swarm.types import ExpertShare, ModelId, PeerId
from swarm_hop.experts.policy import ExpertPolicy
from swarm_hop.experts.rows import outputs_from_wire, pairs_of_frame, rows_to_wire
from swarm_hop.serving.links import LinkSource
from swarm_hop.serving.session import PeerChannel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Holder:
    """By its record."""

    peer: PeerId
    share: ExpertShare
    addresses: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class _Question:
    """One frame that waits for its answer."""

    peer: PeerId
    pairs: int
    answer: asyncio.Future[torch.Tensor]


@dataclass(slots=True)
class ExpertCounters:
    """Since the start."""

    asked: int = 0  # pairs of a row and an expert
    frames: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    failures: int = 0
    lost: int = 0  # steps that nobody could compute


@dataclass(slots=True, eq=False)
class _Batch:
    """What one layer of one batch asks for."""

    layer: int
    x: torch.Tensor  # [n, hidden]
    rows: torch.Tensor  # [pairs]
    experts: torch.Tensor  # [pairs]
    failed: set[PeerId] = field(default_factory=set)


class ExpertExchange:
    """`ask` is `swarm_kernels.ops.base.split_experts.Ask`, called in the compute thread; all else belongs to the loop.

    `holders`: the nodes that may be asked, set by who reads their records; `probe` tries those that are new, and until
    then no step depends on them. `on_failed()`: one of them was given up.
    """

    def __init__(
        self,
        links: LinkSource,
        served: ModelId,
        hidden: int,
        rows: torch.dtype,
        on_failed: Callable[[], None] = lambda: None,
        policy: ExpertPolicy = ExpertPolicy(),
    ) -> None:
        """`rows`: in which they travel."""
        self.holders: Sequence[Holder] = ()
        self.counters = ExpertCounters()
        self._links = links
        self._served = served
        self._hidden = hidden
        self._rows = rows
        self._on_failed = on_failed
        self._policy = policy
        self._loop = asyncio.get_running_loop()
        self._tasks = TaskSet("experts")
        self._questions: dict[int, _Question] = {}
        self._numbers = itertools.count()
        self._proven: set[PeerId] = set()
        self._heard: dict[PeerId, float] = {}  # when its last answer came
        self._avoided: dict[PeerId, float] = {}  # until when

    # In the compute thread -------------------------------------------------------------------------------------------

    def ask(self, layer: int, x: torch.Tensor, rows: torch.Tensor, experts: torch.Tensor) -> Callable[[], torch.Tensor]:
        """See `split_experts.Ask`. Waiting raises NodeBusy when nobody answers."""
        assert self._loop is not _running_loop()  # it would wait for itself
        batch = _Batch(layer, x, rows, experts)
        result = asyncio.run_coroutine_threadsafe(self._start(batch), self._loop)

        def wait() -> torch.Tensor:
            try:
                return result.result(self._policy.give_up_s)
            except (TimeoutError, CancelledError):
                result.cancel()
                raise self._lost(layer, "no answer") from None

        return wait

    # In the event loop -----------------------------------------------------------------------------------------------

    def usable(self) -> list[Holder]:
        """Those that have answered, and not failed since; the ones with the fewest questions under way first."""
        under_way = [question.peer for question in self._questions.values()]
        found = [holder for holder in self.holders if holder.peer in self._proven]
        return sorted(found, key=lambda holder: (under_way.count(holder.peer), holder.peer))

    async def probe(self, layers: Collection[int]) -> None:
        """Ask each holder that is new, or was given up a while ago, for one output. `layers`: that have experts."""
        now = self._loop.time()
        self._avoided = {peer: until for peer, until in self._avoided.items() if now < until}
        known = {holder.peer for holder in self.holders}
        self._proven &= known
        self._heard = {peer: at for peer, at in self._heard.items() if peer in known}
        new = [h for h in self.holders if h.peer not in self._proven and h.peer not in self._avoided]
        await run_all(self._probe(holder, layers) for holder in new[: self._policy.probes_at_once])

    async def _probe(self, holder: Holder, layers: Collection[int]) -> None:
        layer = next((layer for layer in holder.share.layers if layer in layers), None)
        if layer is not None:
            first = torch.tensor([holder.share.first])
            batch = _Batch(layer, torch.full((1, self._hidden), 0.1), torch.tensor([0]), first)
            if await self._of_holder(holder, batch, torch.tensor([0])) is not None:
                self._proven.add(holder.peer)

    def uses(self, peer: PeerId) -> bool:
        """Whether the connections with `peer` are needed."""
        return any(holder.peer == peer for holder in self.holders)

    async def close(self) -> None:
        """Every question fails."""
        await self._tasks.close()

    def on_outputs(self, peer: PeerId, message: ExpertOutputs, body: Buffer) -> bool:
        """Whether it was asked for. Raises ProtocolError for what cannot be an answer."""
        question = self._questions.get(message.request)
        if question is None:
            return False
        if question.peer != peer:
            raise ProtocolError("outputs of experts that another peer was asked for")
        self._heard[peer] = self._loop.time()
        try:
            outputs = outputs_from_wire(body, question.pairs, self._hidden)
        except ProtocolError as error:
            _fail(question, error)
            raise
        if not question.answer.done():
            self.counters.received_bytes += memoryview(body).nbytes
            question.answer.set_result(outputs)
        return True

    def on_refused(self, peer: PeerId, message: ExpertsRefused) -> bool:
        """Whether it was asked. Raises ProtocolError."""
        question = self._questions.get(message.request)
        if question is None:
            return False
        if question.peer != peer:
            raise ProtocolError("a refusal of experts that another peer was asked for")
        _fail(question, RemoteError(message.detail, message.error, peer))
        return True

    def on_lost(self, peer: PeerId) -> None:
        for question in self._questions.values():
            if question.peer == peer:
                _fail(question, ConnectionLost(f"the connection to {peer} was lost"))

    async def _start(self, batch: _Batch) -> torch.Tensor:
        """Raises SwarmError. As a child, so that `close` ends it."""
        if self._tasks.closed:
            raise self._lost(batch.layer, "this node stops")
        found = await self._tasks.start(self._outputs_or_loss(batch), f"layer {batch.layer}")
        if isinstance(found, NodeBusy):
            raise found
        return found

    async def _outputs_or_loss(self, batch: _Batch) -> torch.Tensor | NodeBusy:
        try:
            return await self._outputs(batch)
        except NodeBusy as error:
            return error

    async def _outputs(self, batch: _Batch) -> torch.Tensor:
        """Every pair's output, `[pairs, hidden]`: of those who failed again, by others. Raises NodeBusy."""
        found = torch.empty(len(batch.rows), self._hidden)
        left = torch.arange(len(batch.rows))
        self.counters.asked += len(left)
        while len(left):
            fit = [h for h in self.usable() if batch.layer in h.share.layers and h.peer not in batch.failed]
            holders = {holder.peer: holder for holder in fit}
            asked, nobody = assign_experts(
                batch.experts[left].tolist(), [(holder.peer, holder.share.experts) for holder in fit]
            )
            if nobody:
                raise self._lost(batch.layer, f"nobody holds {len(nobody)} of its experts")
            parts = [left[torch.isin(batch.experts[left], torch.tensor(given))] for given in asked.values()]
            answers = await run_all(
                self._of_holder(holders[peer], batch, part) for peer, part in zip(asked, parts, strict=True)
            )
            done = [part for part, answer in zip(parts, answers, strict=True) if answer is not None]
            for part, answer in zip(parts, answers, strict=True):
                if answer is not None:
                    found[part] = answer
            left = left[~torch.isin(left, torch.cat(done))] if done else left
        return found

    async def _of_holder(self, holder: Holder, batch: _Batch, part: torch.Tensor) -> torch.Tensor | None:
        """The outputs of the pairs `part`; None, and it is avoided from now on, if it fails."""
        try:
            async with asyncio.timeout(self._policy.dial_s):
                link = await self._links.get(holder.peer, holder.addresses, self._policy.dial_s)
            in_flight = asyncio.Semaphore(self._policy.frames_in_flight)
            size = pairs_of_frame(self._hidden, self._policy.reply_bytes)
            pieces = [part[at : at + size] for at in range(0, len(part), size)]
            answers = await run_all(self._of_frame(link, in_flight, batch, piece) for piece in pieces)
            outputs = torch.cat(answers)
            if not bool(outputs.isfinite().all()) and bool(batch.x.isfinite().all()):
                raise ProtocolError(f"{holder.peer} sent outputs that are no numbers")
        except (TimeoutError, NetworkError) as error:
            self._give_up(holder, error)
            batch.failed.add(holder.peer)
            return None
        return outputs

    async def _of_frame(
        self, link: PeerChannel, in_flight: asyncio.Semaphore, batch: _Batch, piece: torch.Tensor
    ) -> torch.Tensor:
        """Raises NetworkError."""
        used, rows = torch.unique(batch.rows[piece], return_inverse=True)
        body = rows_to_wire(batch.x[used], rows, batch.experts[piece], self._rows)
        number = next(self._numbers)
        message = ExpertRows(number, batch.layer, len(used), len(piece), self._served.weight_hash, self._served.dtype)
        async with in_flight:
            question = _Question(link.peer, len(piece), self._loop.create_future())
            self._questions[number] = question
            try:
                asked_at = self._loop.time()
                async with asyncio.timeout(self._policy.stall_s):
                    await link.send(message, body)
                self.counters.frames += 1
                self.counters.sent_bytes += len(body)
                return await self._answer(question, asked_at)
            finally:
                del self._questions[number]
                question.answer.cancel()

    async def _answer(self, question: _Question, asked_at: float) -> torch.Tensor:
        """Raises NetworkError, ConnectionLost if nothing at all comes from this holder for too long."""
        while True:
            since = max(asked_at, self._heard.get(question.peer, asked_at))
            left_s = since + self._policy.stall_s - self._loop.time()
            if left_s <= 0:
                raise ConnectionLost(f"nothing came from {question.peer} for {self._policy.stall_s:g} s")
            await asyncio.wait({question.answer}, timeout=left_s)
            if question.answer.done():
                return question.answer.result()

    def _give_up(self, holder: Holder, error: Exception) -> None:
        self.counters.failures += 1
        self._proven.discard(holder.peer)
        seconds = self._policy.distrust_s if isinstance(error, ProtocolError) else self._policy.avoid_s
        self._avoided[holder.peer] = self._loop.time() + seconds
        logger.warning("%s of %s is not asked now: %s", holder.share, holder.peer, error or "it was not reached")
        self._on_failed()

    def _lost(self, layer: int, why: str) -> NodeBusy:
        self.counters.lost += 1
        return NodeBusy(f"experts of layer {layer} are lost: {why}", retry_after_s=self._policy.busy_retry_s)


def _fail(question: _Question, error: SwarmError) -> None:
    if not question.answer.done():
        question.answer.set_exception(error)
        question.answer.exception()  # who asked may have given up


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
