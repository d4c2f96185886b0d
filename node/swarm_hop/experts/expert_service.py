"""The holder's side: computes experts for the leaders of their layers, one frame after another.

Owns who may ask, how many frames wait, and every reason to refuse one. Who leads our layers is told by `membership`, by
their signed records; tensors belong to `swarm_kernels.runtime.mixture_reader`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

import torch

from swarm.codec import Buffer
from swarm.errors import ConnectionLost, InvalidRequest, NodeBusy, NodeLeaving, ProtocolError, SwarmError, WrongModel
from swarm.expert_messages import ExpertOutputs, ExpertRows, ExpertsRefused
from swarm.net.base.tasks import TaskSet
from swarm.types import ModelId, PeerId
from swarm_hop.experts.policy import ExpertPolicy
from swarm_hop.experts.rows import OUTPUT, outputs_to_wire, rows_from_wire
from swarm_hop.serving.compute_device import ComputeDevice
from swarm_hop.serving.session import PeerChannel
from swarm_kernels.runtime.mixture_reader import ExpertSpan, rows_dtype

logger = logging.getLogger(__name__)

_Asked = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""See `rows.rows_from_wire`."""
_MAX_REPLY_BYTES = 16 << 20  # of one frame: leaders ask for far less


class ExpertService:
    """`begin` with loaded experts, `end` before they are freed. `leads(peer)`: whether, by its record, it leads layers
    that we hold experts of; it may read records to find out."""

    def __init__(
        self,
        served: ModelId,
        leads: Callable[[PeerId], Awaitable[bool]],
        timeout_s: float,
        policy: ExpertPolicy = ExpertPolicy(),
    ) -> None:
        """`timeout_s`: a leader that does not read its answer for so long loses it."""
        self.span: ExpertSpan | None = None
        self.computed = 0  # pairs of a row and an expert
        self.refused = 0
        self._served = served
        self._leads = leads
        self._timeout_s = timeout_s
        self._policy = policy
        self._device: ComputeDevice | None = None
        self._waiting: Counter[PeerId] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks = TaskSet("experts for others")

    def begin(self, span: ExpertSpan, device: ComputeDevice) -> None:
        self.span, self._device = span, device

    async def end(self) -> None:
        """No more answers; what is computed now is waited for."""
        self.span = None
        await self._idle.wait()

    async def close(self) -> None:
        self.span = None
        await self._tasks.close()

    def on_rows(self, link: PeerChannel, message: ExpertRows, body: Buffer) -> None:
        """Answers from a task. Raises ProtocolError for what no leader sends."""
        asked = self._read(message, body)
        beyond = self._waiting.total() >= 2 * self._policy.max_waiting
        if beyond or self._waiting[link.peer] >= 2 * self._policy.max_waiting_per_leader:
            self.refused += 1  # without an answer, since refusals are not heeded
            return
        self._waiting[link.peer] += 1
        self._idle.clear()
        self._tasks.start(self._answer(link, message, asked), f"layer {message.layer} for {link.peer}")

    def _read(self, message: ExpertRows, body: Buffer) -> _Asked | None:
        """None for another model's, or when nothing is here. Raises ProtocolError."""
        span = self.span
        if span is None or (message.weight_hash, message.dtype) != (self._served.weight_hash, self._served.dtype):
            return None
        if message.pairs * span.hidden * OUTPUT.itemsize > _MAX_REPLY_BYTES:
            raise ProtocolError(f"{message.pairs} outputs of {span.hidden} numbers were asked for at once")
        return rows_from_wire(message, body, span.hidden, rows_dtype(span.weight_dtype))

    async def _answer(self, link: PeerChannel, message: ExpertRows, asked: _Asked | None) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                try:
                    outputs = await self._compute(link.peer, message, asked)
                except SwarmError as error:
                    self.refused += 1
                    logger.info("%s does not get outputs of experts: %s", link.peer, error)
                    await link.send(ExpertsRefused(message.request, error.code, str(error)[:1024]))
                else:
                    await link.send(ExpertOutputs(message.request), outputs_to_wire(outputs))
        except (TimeoutError, ConnectionLost):
            logger.debug("%s did not read its outputs", link.peer)
        finally:
            self._waiting[link.peer] -= 1
            if not self._waiting[link.peer]:
                del self._waiting[link.peer]
            if not self._waiting:
                self._idle.set()

    async def _compute(self, peer: PeerId, message: ExpertRows, asked: _Asked | None) -> torch.Tensor:
        """Raises SwarmError."""
        if (message.weight_hash, message.dtype) != (self._served.weight_hash, self._served.dtype):
            raise WrongModel(f"this node holds experts of {self._served.model} in {self._served.dtype}")
        policy = self._policy
        if self._waiting[peer] > policy.max_waiting_per_leader or self._waiting.total() > policy.max_waiting:
            raise NodeBusy("too many rows wait here")
        if not await self._leads(peer):
            raise InvalidRequest("no record says that you lead these layers")
        span, device = self.span, self._device
        if span is None or device is None or asked is None:
            raise NodeLeaving("this node holds no experts now")
        x, rows, experts = asked
        outputs = await device.run(lambda: span.outputs(message.layer, x, rows, experts))
        self.computed += message.pairs
        return outputs
