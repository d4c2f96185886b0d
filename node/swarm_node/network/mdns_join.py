"""This node and the others of its swarm in the local network: it joins them without being told of them, and they it.

Owns when that is done: not by nodes that only this machine can dial, and not with --no-discovery. How is
`swarm.net.discovery.mdns`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from swarm.config import NodeConfig
from swarm.errors import NetworkError
from swarm.net.base.tls_addresses import is_loopback
from swarm.net.discovery.mdns import MdnsService, SwarmTag, browse
from swarm.net.security.swarm_secret import SwarmSecret
from swarm_node.network.invite import shareable

logger = logging.getLogger(__name__)


async def peers_or_mdns(config: NodeConfig, on_found: Callable[[str, Sequence[str]], None]) -> NodeConfig:
    """Without peers, those of the same swarm nearby take their place; if there are none, a new swarm begins.

    `on_found(sentence, peers)` is called when there are some.
    """
    if config.peers or not _discovery_enabled(config):
        return config
    peers = await browse(await _group(config))
    if not peers:
        return config
    sentence = f"joining a swarm found in the local network, by {peers[0]}; --no-discovery begins one of your own"
    on_found(sentence, peers)
    return replace(config, peers=peers)


@asynccontextmanager
async def advertise(
    config: NodeConfig,
    secret: SwarmSecret | None,
    addresses: Sequence[str],
    meet: Callable[[Sequence[str]], Awaitable[int]],
) -> AsyncIterator[None]:
    """Be found by others while the block runs, and `meet` those that come: two that began at once become one swarm."""
    tellable = [address for address in shareable(addresses) if not is_loopback(address)]
    if not tellable or not _discovery_enabled(config):
        yield
        return

    async def heard(others: tuple[str, ...]) -> None:
        try:
            await meet(others)
        except NetworkError as error:
            logger.info("cannot meet a node nearby: %s", error)

    try:
        neighbourhood = await MdnsService.start(await _group(config, secret), heard)
    except OSError as error:
        logger.info("the local network is not told of us: %s", error)
        yield
        return
    try:
        await neighbourhood.advertise(tellable)
        yield
    finally:
        await neighbourhood.close()


def _discovery_enabled(config: NodeConfig) -> bool:
    return config.discovery and not all(map(is_loopback, config.listen))


async def _group(config: NodeConfig, secret: SwarmSecret | None = None) -> SwarmTag:
    if config.secret and secret is None:
        secret = await asyncio.to_thread(SwarmSecret, config.secret)
    return SwarmTag.of(config.network, config.model, secret)
