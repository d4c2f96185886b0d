"""Chains for one generation: opens the session on the best one, mends it, says whether another would be quicker.

Owns what a session is opened with. The choice is the view's, the frames are `chain_session`'s, when to do what is the
driver's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.block_hash import digests
from swarm.config import Limits
from swarm.errors import NetworkError, NoRoute
from swarm.planner.costs.chain_costs import ChainCosts
from swarm.planner.generation.state_machine import Generation
from swarm.planner.routing.prefix_affinity import worth_returning
from swarm.types import Chain, PeerId, Sampling
from swarm_client.network.connection import Network
from swarm_client.routing.blocklist import TooSlow
from swarm_client.routing.prefill_chunks import prompt_chunks
from swarm_client.routing.prefix_locations import Beginnings
from swarm_client.routing.router import SwarmView
from swarm_client.session.inference_session import ChainSession, HopFailed
from swarm_client.session.session_messages import SessionSpec

WORTH = 1.25  # a chain must promise to be so many times quicker before a working hop is left


@dataclass(frozen=True, slots=True)
class ChainKeeper:
    """All methods raise NoRoute when no chain covers the model, and NetworkError when there is no map to route on."""

    view: SwarmView
    network: Network
    limits: Limits
    model: str
    sampling: Sampling
    guesses: int = 0  # of each of the tail's heads, if it has any, with every token
    plan_chunks: bool = True  # cut prompts by the chain's costs
    beginnings: Beginnings = field(default_factory=Beginnings)  # of all generations of a client

    async def open(self, generation: Generation) -> ChainSession:
        """A session on the best chain. Raises HopFailed when a hop of it refused; it is banned then."""
        quickest, snapshot = await self.view.route(generation.max_tokens)
        chain = self._returning(quickest, generation)
        nodes = {n.peer: n for n in snapshot.nodes}
        first = nodes[chain.hops[0].peer]
        spec = SessionSpec(
            self.model, first.weight_hash, first.dtype, generation.max_tokens, self.sampling, self.guesses
        )
        try:
            session = await ChainSession.open(
                chain,
                nodes,
                spec,
                generation.known,
                self.network.pool,
                self.network.inboxes,
                self.limits,
                generation.epoch,
            )
        except HopFailed as failed:
            self.view.ban(failed.peer, failed.cause)
            raise
        self.beginnings.note(digests(generation.known), chain)
        return session

    async def close(self, session: ChainSession, generation: Generation) -> None:
        """The session's end, at every hop. What is known by now may be the beginning of the next one."""
        self.beginnings.note(digests(generation.known), session.chain)
        await session.close(generation.known)

    def _returning(self, quickest: Chain, generation: Generation) -> Chain:
        """The chain that holds the beginning of this text, where that ends sooner than the quickest one."""
        found = self.beginnings.find(digests(generation.known[:-1]))
        if found is None or found[0].hops == quickest.hops:
            return quickest
        usual, held = self.view.again(found[0], generation.max_tokens), found[1]
        tokens = generation.max_tokens - len(generation.known)
        if usual is None or not worth_returning(
            held, tokens, usual.cost_ms, quickest.cost_ms, self.view.costs(quickest)
        ):
            return quickest
        return usual

    async def mend(self, session: ChainSession, generation: Generation, settled: int) -> None:
        """Replace the session's lost hops. Raises HopFailed when that failed at another one."""
        slow = {peer for peer, cause in session.lost.items() if isinstance(cause, TooSlow)}
        chain, lost, tokens = session.whole, session.lost, session.spec.max_tokens
        try:
            repair, snapshot = await self.view.repair(chain, lost, tokens, avoid=slow)
        except NoRoute:  # better those than nobody
            repair, snapshot = await self.view.repair(chain, lost, tokens, insist=True)
        nodes = {n.peer: n for n in snapshot.nodes}
        await session.repair(repair, nodes, generation.known, settled, generation.epoch)

    def chunks(self, chain: Chain, tokens: int) -> tuple[int, ...]:
        """How to cut the next `tokens`, which no hop holds; () for the plan's own chunks."""
        return prompt_chunks(tokens, self.view.costs(chain)) if self.plan_chunks else ()

    def costs(self, chain: Chain) -> ChainCosts:
        """What steps along `chain` cost by the live map."""
        return self.view.costs(chain)

    def ban_lost(self, session: ChainSession) -> None:
        session.note_losses()
        for peer, cause in session.lost.items():
            self.view.ban(peer, cause)

    async def replaceable(self, session: ChainSession, peer: PeerId) -> bool:
        """Whether others can do what `peer` does in this session."""
        try:
            await self.view.repair(session.whole, {peer}, session.spec.max_tokens, avoid={peer})
        except (NoRoute, NetworkError):
            return False
        return True

    async def worth_leaving(self, session: ChainSession, peer: PeerId, slowdown: float) -> bool:
        """Whether the session would be much quicker without `peer`, now that its rounds take `slowdown` times as long.

        The map's costs are compared with each other and not with measured rounds: what both leave out cancels.
        """
        try:
            repair, _ = await self.view.repair(session.whole, {peer}, session.spec.max_tokens, avoid={peer})
        except (NoRoute, NetworkError):
            return False
        return WORTH * repair.chain.cost_ms <= slowdown * session.chain.cost_ms
