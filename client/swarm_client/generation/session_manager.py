"""Chains for one generation: opens the session on the best one, mends it, says whether another would be quicker.

Owns what a session is opened with. The choice is the view's, the frames are `chain_session`'s, when to do what is the
driver's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.block_hash import block_hashes
from swarm.config import Limits
from swarm.errors import NetworkError, NoRoute
from swarm.planner.costs.chain_costs import ChainCosts
from swarm.planner.generation.state_machine import GenerationState
from swarm.planner.routing.prefix_affinity import prefer_cached_prefix
from swarm.types import Chain, PeerId, Sampling
from swarm_client.network.connection import ClientNetwork
from swarm_client.routing.blocklist import StragglerEvicted
from swarm_client.routing.prefill_chunks import prompt_chunks
from swarm_client.routing.prefix_locations import PrefixLocations
from swarm_client.routing.router import ChainRouter
from swarm_client.session.inference_session import HopFailed, InferenceSession
from swarm_client.session.session_messages import SessionSpec

MIN_SPEEDUP = 1.25  # a chain must promise to be so many times quicker before a working hop is left


@dataclass(frozen=True, slots=True)
class SessionManager:
    """All methods raise NoRoute when no chain covers the model, and NetworkError when there is no map to route on."""

    router: ChainRouter
    network: ClientNetwork
    limits: Limits
    model: str
    sampling: Sampling
    num_medusa_candidates: int = 0  # of each of the tail's heads, if it has any, with every token
    plan_chunks: bool = True  # cut prompts by the chain's costs
    prefix_locations: PrefixLocations = field(default_factory=PrefixLocations)  # of all generations of a client

    async def open(self, generation: GenerationState) -> InferenceSession:
        """A session on the best chain. Raises HopFailed when a hop of it refused; it is banned then."""
        quickest, snapshot = await self.router.route(generation.max_tokens)
        chain = self._prefer_cached_chain(quickest, generation)
        nodes = {n.peer: n for n in snapshot.nodes}
        first = nodes[chain.hops[0].peer]
        spec = SessionSpec(
            self.model, first.weight_hash, first.dtype, generation.max_tokens, self.sampling, self.num_medusa_candidates
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
            )
        except HopFailed as failed:
            self.router.block(failed.peer, failed.cause)
            raise
        self.prefix_locations.record(block_hashes(generation.known), chain)
        return session

    async def close(self, session: InferenceSession, generation: GenerationState) -> None:
        """The session's end, at every hop. What is known by now may be the beginning of the next one."""
        self.prefix_locations.record(block_hashes(generation.known), session.chain)
        await session.close(generation.known)

    def _prefer_cached_chain(self, quickest: Chain, generation: GenerationState) -> Chain:
        """The chain that holds the beginning of this text, where that ends sooner than the quickest one."""
        found = self.prefix_locations.longest_match(block_hashes(generation.known[:-1]))
        if found is None or found[0].hops == quickest.hops:
            return quickest
        usual, held = self.router.reprice(found[0], generation.max_tokens), found[1]
        tokens = generation.max_tokens - len(generation.known)
        if usual is None or not prefer_cached_prefix(
            held, tokens, usual.cost_ms, quickest.cost_ms, self.router.costs(quickest)
        ):
            return quickest
        return usual

    async def repair(self, session: InferenceSession, generation: GenerationState, settled: int) -> None:
        """Replace the session's lost hops. Raises HopFailed when that failed at another one."""
        slow = {peer for peer, cause in session.failed_hops.items() if isinstance(cause, StragglerEvicted)}
        chain, lost, tokens = session.last_ready_chain, session.failed_hops, session.spec.max_tokens
        try:
            repair, snapshot = await self.router.repair(chain, lost, tokens, avoid=slow)
        except NoRoute:  # better those than nobody
            repair, snapshot = await self.router.repair(chain, lost, tokens, include_unresponsive=True)
        nodes = {n.peer: n for n in snapshot.nodes}
        await session.repair(repair, nodes, generation.known, settled, generation.epoch)

    def chunks(self, chain: Chain, tokens: int) -> tuple[int, ...]:
        """How to cut the next `tokens`, which no hop holds; () for the plan's own chunks."""
        return prompt_chunks(tokens, self.router.costs(chain)) if self.plan_chunks else ()

    def costs(self, chain: Chain) -> ChainCosts:
        """What steps along `chain` cost by the live map."""
        return self.router.costs(chain)

    def block_lost(self, session: InferenceSession) -> None:
        session.drain_failures()
        for peer, cause in session.failed_hops.items():
            self.router.block(peer, cause)

    async def has_alternative(self, session: InferenceSession, peer: PeerId) -> bool:
        """Whether others can do what `peer` does in this session."""
        try:
            await self.router.repair(session.last_ready_chain, {peer}, session.spec.max_tokens, avoid={peer})
        except (NoRoute, NetworkError):
            return False
        return True

    async def should_replace(self, session: InferenceSession, peer: PeerId, slowdown: float) -> bool:
        """Whether the session would be much quicker without `peer`, now that its rounds take `slowdown` times as long.

        The map's costs are compared with each other and not with measured rounds: what both leave out cancels.
        """
        try:
            repair, _ = await self.router.repair(
                session.last_ready_chain, {peer}, session.spec.max_tokens, avoid={peer}
            )
        except (NoRoute, NetworkError):
            return False
        return MIN_SPEEDUP * repair.chain.cost_ms <= slowdown * session.chain.cost_ms
