"""Sessions of one generation: opens one on the best chain, repairs it, and compares its chain with others.

Owns what a session is opened with, and decides whether another chain is worth a switch (a cached prefix, a straggler).
Which nodes a chain consists of is decided by ChainRouter, when to open or repair by GenerationLoop; InferenceSession
exchanges the messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

from swarm.block_hash import block_hashes
from swarm.config import Limits
from swarm.errors import NetworkError, NoRoute
from swarm.messages import StepResult
from swarm.planner.costs.chain_costs import ChainCosts
from swarm.planner.generation.state_machine import GenerationState
from swarm.planner.routing.prefix_affinity import prefer_cached_prefix
from swarm.receipts import Receipt, WorkReceipt, sign_receipt
from swarm.types import Chain, Hop, NodeProfile, PeerId, Sampling, Taps
from swarm_client.auditing.auditor import Auditor
from swarm_client.auditing.result import AuditResult
from swarm_client.health.straggler_detector import StragglerSuspicion
from swarm_client.home.ends import HomeEnds
from swarm_client.home.local_layers import foreign, is_home
from swarm_client.home.trusted_ends import TrustedEnds
from swarm_client.network.connection import ClientNetwork
from swarm_client.routing.conversations import Conversations
from swarm_client.routing.prefill_chunks import prompt_chunks
from swarm_client.routing.prefix_locations import PrefixLocations
from swarm_client.routing.router import ChainRouter
from swarm_client.session.hop_links import HopFailed
from swarm_client.session.inference_session import InferenceSession
from swarm_client.session.session_drafts import TailAsk
from swarm_client.session.session_messages import SessionSpec
from swarm_client.trust.chain_watch import ChainWatch
from swarm_client.trust.failures import AuditFailed, StragglerEvicted

MIN_SPEEDUP = 1.25  # predicted, before a working hop is evicted: higher means fewer repairs and slower chains


@dataclass(frozen=True, slots=True)
class SessionManager:
    """All methods raise NoRoute when no chain covers the model, and NetworkError when there is no snapshot."""

    router: ChainRouter
    network: ClientNetwork
    limits: Limits
    model: str
    sampling: Sampling
    num_medusa_candidates: int = 0  # per Medusa head of the tail, if it has any, with every token
    taps: Taps | None = None  # that the drafter reads
    tail_drafts: bool = False  # whether the tail's own drafter is used, where it has one
    hidden_size: int = 0  # of the model, for these
    plan_chunks: bool = True  # chunk prompts by the chain's costs
    prefix_locations: PrefixLocations = field(default_factory=PrefixLocations)  # of all generations of a client
    auditor: Auditor | None = None  # likewise
    ends: HomeEnds | TrustedEnds | None = None  # the hops at this client itself, or whom it trusts
    conversations: Conversations | None = None  # of a client that varies the first hop

    @property
    def trusted(self) -> Collection[PeerId]:
        """Who may see token ids; () for no rule."""
        return self.ends.peers if isinstance(self.ends, TrustedEnds) else ()

    async def open(self, generation: GenerationState) -> InferenceSession:
        """A session on the best chain. Raises HopFailed when a hop of it refused; that hop is then blocked."""
        prompt = generation.request.prompt
        stay, change = self.conversations.first_hop(prompt) if self.conversations is not None else ("", "")
        quickest, snapshot = await self.router.route(generation.max_tokens, stay, change)
        chain = self._prefer_cached_chain(quickest, generation)
        nodes = {n.peer: n for n in snapshot.nodes}
        first = nodes[foreign(chain.hops)[0].peer]
        spec = SessionSpec(
            self.model,
            first.weight_hash,
            first.dtype,
            generation.max_tokens,
            self.sampling,
            self.num_medusa_candidates,
            prompt_tokens=len(generation.request.prompt),
            taps=self.taps,
            tail=self._tail_ask(chain, nodes, generation) if self.tail_drafts else None,
        )
        try:
            session = await InferenceSession.open(
                chain,
                nodes,
                spec,
                generation.known,
                self.network.pool,
                self.network.demux,
                self.limits,
                generation.epoch,
                self.prefix_locations.salts(chain),
                self.ends,
            )
        except HopFailed as failed:
            if is_home(failed.peer):
                raise failed.cause from None  # it is no hop that another chain could do without
            self.router.block(failed.peer, failed.cause)
            raise
        self.prefix_locations.record(block_hashes(generation.known), chain)
        self._note_conversation(session, generation)
        return session

    def _tail_ask(
        self, chain: Chain, nodes: Mapping[PeerId, NodeProfile], generation: GenerationState
    ) -> TailAsk | None:
        """None also with ends of our own: the tail's drafter would have to know the token ids."""
        offered = nodes[chain.hops[-1].peer].drafter if self.ends is None else None
        vocab_size = generation.request.vocab_size
        return TailAsk(offered, self.hidden_size, vocab_size) if offered is not None and self.hidden_size else None

    def watch(self, session: InferenceSession) -> ChainWatch:
        """What the steps of the session take; hand it to `observe` and `done_with`."""
        return self.router.watch(session.chain)

    def observe(self, watch: ChainWatch, result: StepResult, now: float) -> StragglerSuspicion | None:
        """Remember what a step took. -> a hop that is slow from the start. `now`: as in `ChainWatch.sent`."""
        times = watch.on_result(result.step, result.trace, now)
        if times is not None:
            self.router.took(times)
        slow = watch.slow_from_start
        return StragglerSuspicion(slow, watch.slowdown) if slow is not None else None

    def done_with(self, watch: ChainWatch, session: InferenceSession) -> None:
        """The session ends, or goes on along another chain."""
        self.router.served(watch, session.failed_hops)

    async def close(self, session: InferenceSession, generation: GenerationState) -> asyncio.Task[AuditResult] | None:
        """Close the session at every hop, and remember the chain for the next text with the same prefix.

        -> the audit of its answer, if there is one: it closes the session.
        """
        self._note_conversation(session, generation)
        if session.prefix_salts == self.prefix_locations.salts(session.chain):  # or they cache it for nobody
            self.prefix_locations.record(block_hashes(generation.known), session.chain)
        receipt = partial(self._receipt, generation) if self.network.sign else None
        prompt, auditor = len(generation.request.prompt), self.auditor
        if auditor is not None and auditor.wants(session, generation.known, prompt):
            drafted = generation.stats.rows > 0
            return auditor.start(session, generation.known, prompt, drafted=drafted, receipt=receipt)
        await session.close(generation.known, receipt)
        return None

    def _note_conversation(self, session: InferenceSession, generation: GenerationState) -> None:
        if self.conversations is not None:
            self.conversations.note(generation.request.prompt, self.router.first_stranger(session.chain) or "")

    def _receipt(self, generation: GenerationState, session: bytes, hop: Hop) -> WorkReceipt:
        """For what every hop has certainly computed."""
        assert self.network.sign is not None  # or there are no receipts
        tokens, ended = generation.committed_to, self.network.wall_clock()
        receipt = Receipt(hop.peer, self.network.pool.peer, session, tokens, hop.end - hop.start, ended)
        return sign_receipt(receipt, self.network.sign)

    def _prefer_cached_chain(self, quickest: Chain, generation: GenerationState) -> Chain:
        """The chain with the longest cached prefix of this text, where it is predicted to finish before `quickest`."""
        match = self.prefix_locations.longest_match(block_hashes(generation.known[:-1]))
        if match is None or match[0].hops == quickest.hops:
            return quickest
        cached, cached_tokens = self.router.reprice(match[0], generation.max_tokens), match[1]
        if self.conversations is not None and cached is not None and self._begin_apart(cached, quickest):
            return quickest
        tokens = generation.max_tokens - len(generation.known)
        if cached is None or not prefer_cached_prefix(
            cached_tokens, tokens, cached.cost_ms, quickest.cost_ms, self.router.costs(quickest)
        ):
            return quickest
        return cached

    def _begin_apart(self, one: Chain, other: Chain) -> bool:
        return self.router.first_stranger(one) != self.router.first_stranger(other)

    def convicted(self, session: InferenceSession, since: float) -> HopFailed | None:
        """Mark a hop of the session as failed that has failed an audit after `since` (loop time). -> that failure."""
        peer = self.auditor.convicted(session.chain.peers, since) if self.auditor is not None else None
        if peer is None:
            return None
        return session.mark_failed(peer, AuditFailed("it failed an audit of another answer"))

    async def repair(self, session: InferenceSession, generation: GenerationState, committed: int) -> None:
        """Replace the session's failed hops. Hops evicted as stragglers come back only if nobody else has their layers.

        Raises HopFailed when a hop of the repaired chain failed as well.
        """
        slow = {peer for peer, cause in session.failed_hops.items() if isinstance(cause, StragglerEvicted)}
        chain, lost, tokens = session.last_ready_chain, session.failed_hops, session.spec.max_tokens
        try:
            plan, snapshot = await self.router.plan_repair(chain, lost, tokens, avoid=slow)
        except NoRoute:  # a slow chain is better than no answer
            plan, snapshot = await self.router.plan_repair(chain, lost, tokens, include_unresponsive=True)
        nodes = {n.peer: n for n in snapshot.nodes}
        self.prefix_locations.lost([hop.peer for hop in chain.hops if hop not in plan.kept])
        await session.apply_repair(plan, nodes, generation.known, committed, generation.epoch)

    def chunks(self, chain: Chain, tokens: int) -> tuple[int, ...]:
        """How to chunk the next `tokens`, which no hop has cached; () for the request's own chunk length."""
        return prompt_chunks(tokens, self.router.costs(chain)) if self.plan_chunks else ()

    def costs(self, chain: Chain) -> ChainCosts:
        """What steps along `chain` cost by the last snapshot."""
        return self.router.costs(chain)

    def block_failed(self, session: InferenceSession) -> None:
        """Route around all hops of the session that have failed."""
        session.drain_failures()
        self.prefix_locations.lost(session.failed_hops.keys())
        for peer, cause in session.failed_hops.items():
            self.router.block(peer, cause)

    async def has_alternative(self, session: InferenceSession, peer: PeerId) -> bool:
        """Whether other nodes can replace `peer` in this session."""
        try:
            await self.router.plan_repair(session.last_ready_chain, {peer}, session.spec.max_tokens, avoid={peer})
        except (NoRoute, NetworkError):
            return False
        return True

    async def should_replace(self, session: InferenceSession, peer: PeerId, slowdown: float) -> bool:
        """Whether a chain without `peer` is much quicker, now that iterations take `slowdown` times as long.

        Predicted costs are compared with each other and not with measured times: what both leave out cancels.
        """
        try:
            repair, _ = await self.router.plan_repair(
                session.last_ready_chain, {peer}, session.spec.max_tokens, avoid={peer}
            )
        except (NoRoute, NetworkError):
            return False
        return MIN_SPEEDUP * repair.chain.cost_ms <= slowdown * session.chain.cost_ms
