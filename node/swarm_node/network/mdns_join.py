"""mDNS discovery of the nodes of the same swarm in the local network.

Owns when it is used: not by nodes that only this machine can dial, and not with --no-discovery. The protocol is in
`swarm.net.discovery.mdns`.
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
    """Without configured peers, use those of the same swarm found by mDNS; if there are none, a new swarm begins.

    `on_found(sentence, peers)` is called when there are any.
    """
    if config.peers or not _discovery_enabled(config):
        return config
    peers = await browse(await _tag(config))
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
    rebootstrap: Callable[[Sequence[str]], Awaitable[int]],
) -> AsyncIterator[None]:
    """Advertise this node while the block runs, and join the peers that appear: two new swarms become one."""
    advertised = [address for address in shareable(addresses) if not is_loopback(address)]
    if not advertised or not _discovery_enabled(config):
        yield
        return

    async def on_peers(others: tuple[str, ...]) -> None:
        try:
            await rebootstrap(others)
        except NetworkError as error:
            logger.info("cannot connect to a node in the local network: %s", error)

    try:
        service = await MdnsService.start(await _tag(config, secret), on_peers)
    except OSError as error:
        logger.info("mDNS is not available: %s", error)
        yield
        return
    try:
        await service.advertise(advertised)
        yield
    finally:
        await service.close()


def _discovery_enabled(config: NodeConfig) -> bool:
    return config.discovery and not all(map(is_loopback, config.listen))


async def _tag(config: NodeConfig, secret: SwarmSecret | None = None) -> SwarmTag:
    if config.secret and secret is None:
        secret = await asyncio.to_thread(SwarmSecret, config.secret)
    return SwarmTag.of(config.network, config.model, secret)
