"""What the last nodes of a swarm offer to draft with, by their records. Which drafter is taken is decided elsewhere."""

from __future__ import annotations

from contextlib import suppress

from swarm.errors import NetworkError
from swarm.planner.speculation.drafter_place import TailOffer, find_tail_offer
from swarm_client.routing.router import ChainRouter


async def tail_offer(router: ChainRouter, weight_hash: str) -> TailOffer | None:
    """None also while nobody can be asked."""
    with suppress(NetworkError):
        return find_tail_offer(await router.snapshot(), weight_hash)
    return None
