"""Layers that are too big for a node, as a member of the swarm: who holds experts of the layers that we lead, who leads
the layers of the experts that we hold.

Owns the watch over both, by records, and whether our layers are announced: only while every expert of them is held by
us or by nodes that answer. The questions are `swarm_hop.experts`'; the rules `swarm.planner.placement.experts`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import torch

from swarm.codec import Buffer
from swarm.errors import NetworkError, NodeBusy
from swarm.expert_messages import ExpertOutputs, ExpertRows, ExpertsRefused
from swarm.messages import AnyMessage
from swarm.planner.placement.experts import holders, missing_experts
from swarm.types import ExpertShare, ModelId, NodeProfile, NodeState, PeerId, Snapshot
from swarm_hop.experts.expert_exchange import ExpertExchange, Holder
from swarm_hop.experts.expert_service import ExpertService
from swarm_hop.serving.links import Links
from swarm_hop.serving.session import PeerChannel
from swarm_kernels.models.config import ModelConfig
from swarm_kernels.runtime.mixture_reader import rows_dtype
from swarm_node.membership.lifecycle import Lifecycle
from swarm_node.membership.placement import Mixtures, alike
from swarm_node.membership.policy import MembershipPolicy

logger = logging.getLogger(__name__)

Missing = dict[int, tuple[tuple[int, int], ...]]
"""By layer, ranges of experts."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is needed of the rest of the node. `snapshot()` raises NetworkError; `changed()`: publish our record;
    `report(event, sentence)` tells the owner."""

    snapshot: Callable[[], Awaitable[Snapshot]]
    profile: Callable[[], NodeProfile]
    changed: Callable[[], None]
    report: Callable[[str, str], None]


class ExpertSharing:
    """`await run()` in a task; `on_frame`, `on_lost` and `uses` of the pool. Close it before the pool."""

    def __init__(
        self,
        config: ModelConfig,
        weights: torch.dtype,
        served: ModelId,
        links: Links,
        swarm: Surroundings,
        lifecycle: Lifecycle,
        timeout_s: float,
        policy: MembershipPolicy = MembershipPolicy(),
    ) -> None:
        """`weights`: their number format; `timeout_s`: see `ExpertService`."""
        self.mixtures = Mixtures.of(config)
        self.exchange = ExpertExchange(
            links, served, config.hidden_size, rows_dtype(weights), on_failed=self._look_soon
        )
        self.service = ExpertService(served, self._leads, timeout_s)
        self.missing: Missing = {}
        self._links = links
        self._swarm = swarm
        self._lifecycle = lifecycle
        self._policy = policy
        self._withdrawn = False
        self._told: Missing = {}
        self._leaders: frozenset[PeerId] = frozenset()
        self._read_at = float("-inf")
        self._look_again = asyncio.Event()
        self._complete = asyncio.Event()

    def uses(self, peer: PeerId) -> bool:
        """Whether what runs here needs the connections with `peer`."""
        return peer in self._leaders or self.exchange.uses(peer)

    def on_frame(self, link: PeerChannel, message: AnyMessage, body: Buffer) -> bool:
        """Whether it was about experts. Raises ProtocolError."""
        match message:
            case ExpertRows():
                self.service.on_rows(link, message, body)
            case ExpertOutputs():
                if not self.exchange.on_outputs(link.peer, message, body):
                    self._links.unasked(link.peer, "outputs of experts")
            case ExpertsRefused():
                if not self.exchange.on_refused(link.peer, message):
                    self._links.unasked(link.peer, "a refusal of experts")
            case _:
                return False
        return True

    def on_lost(self, peer: PeerId) -> None:
        self.exchange.on_lost(peer)

    async def ready(self, measure: Callable[[], Awaitable[None]]) -> None:
        """Until every expert of the layers that we lead is held by somebody, and `measure()` has timed the layers with
        them; at once if we lead none. `run` must be under way."""
        self._withdrawn, self._told = False, {}
        while self._led() is not None:
            self._lifecycle.phase = NodeState.WAITING
            self._swarm.changed()
            self._complete.clear()
            self._look_soon()
            await self._complete.wait()
            try:
                await measure()
            except NodeBusy as error:
                logger.info("the layers cannot be timed: %s", error)
            else:
                return

    def _look_soon(self) -> None:
        self._look_again.set()

    async def close(self) -> None:
        await self.exchange.close()
        await self.service.close()

    async def run(self) -> None:
        """Look at the swarm again and again."""
        while True:
            await self._look()
            self._look_again.clear()
            try:
                async with asyncio.timeout(self._policy.tick_s):
                    await self._look_again.wait()
            except TimeoutError:
                continue
            self._judge()  # before the swarm is read: a step may have failed

    async def _look(self) -> None:
        if self._lifecycle.share is None:
            return
        try:
            snapshot = await self._swarm.snapshot()
        except NetworkError as error:
            logger.info("cannot read who shares experts with us: %s", error)
            return
        self._note_leaders(snapshot)
        if self._led() is not None:
            me = self._swarm.profile()
            found = holders((n for n in snapshot.nodes if n.peer != me.peer and alike(n, me)), self.mixtures.count)
            self.exchange.holders = [Holder(n.peer, n.experts, n.addresses) for n in found if n.experts is not None]
            await self.exchange.probe(self.mixtures.layers)
            self._judge()

    def _judge(self) -> None:
        """Announce our layers, or withdraw them."""
        own, lifecycle = self._led(), self._lifecycle
        if own is None or lifecycle.phase not in (NodeState.WAITING, NodeState.SERVING):
            return
        layers = [layer for layer in own.layers if layer in self.mixtures.layers]
        self.missing = missing_experts(layers, own, [holder.share for holder in self.exchange.usable()])
        if self.missing and self.missing != self._told:
            self._swarm.report("waiting", f"serves nobody now: {self.waits_for}")
        self._told = self.missing
        if not self.missing:
            self._complete.set()
        if self.missing and lifecycle.phase is NodeState.SERVING:
            lifecycle.phase, self._withdrawn = NodeState.WAITING, True
            self._swarm.changed()
        elif not self.missing and self._withdrawn and lifecycle.phase is NodeState.WAITING:
            lifecycle.phase, self._withdrawn = NodeState.SERVING, False
            self._swarm.report("resumed", "serves again: all experts of its layers are held")
            self._swarm.changed()

    @property
    def waits_for(self) -> str:
        """What nobody holds, for people; "" if nothing is missing."""
        ranges = sorted({gap for gaps in self.missing.values() for gap in gaps})
        if not ranges:
            return ""
        layers = ", ".join(map(str, sorted(self.missing)))
        return f"nobody who answers holds experts {', '.join(f'{a}:{b}' for a, b in ranges)} of layers {layers}"

    def _led(self) -> ExpertShare | None:
        return self._lifecycle.share if self._lifecycle.span is not None else None

    async def _leads(self, peer: PeerId) -> bool:
        loop = asyncio.get_running_loop()
        if peer not in self._leaders and loop.time() - self._read_at > self._policy.unknown_leader_s:
            self._read_at = loop.time()
            try:
                self._note_leaders(await self._swarm.snapshot())
            except NetworkError as error:
                logger.info("cannot read who leads our layers: %s", error)
        return peer in self._leaders

    def _note_leaders(self, snapshot: Snapshot) -> None:
        share, me = self._lifecycle.share, self._swarm.profile()
        if share is None or self._lifecycle.span is not None:
            self._leaders = frozenset()
            return
        leading = (n for n in snapshot.nodes if n.span is not None and n.experts is not None and alike(n, me))
        self._leaders = frozenset(n.peer for n in leading if n.span and any(layer in share.layers for layer in n.span))
