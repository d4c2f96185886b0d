"""The nodes of a swarm in the local network, found over mDNS by a client without peers. Owns what is looked for."""

from __future__ import annotations

import asyncio

from swarm.config import ClientConfig


async def peers_nearby(config: ClientConfig) -> tuple[str, ...]:
    """Multiaddrs of nodes of the same network name, model and secret; none if nobody answers within 1.5 s."""
    from swarm.net.discovery.mdns import SwarmTag, browse  # zeroconf takes 0.1 s to import, and is rarely needed
    from swarm.net.security.swarm_secret import SwarmSecret

    secret = await asyncio.to_thread(SwarmSecret, config.secret) if config.secret else None
    return await browse(SwarmTag.of(config.network, config.model, secret))
