"""Which swarm a client program uses: that of its flags, of an invitation, of this machine, of the local network. Owns
that order, and what is looked for over mDNS."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from swarm.config import DEFAULT_MODEL, ClientConfig, env_value, load, local_swarm
from swarm.errors import UsageError
from swarm.net.discovery.invite import parse

_Config = TypeVar("_Config", bound=ClientConfig)


def client_config(kind: type[_Config], given: Mapping[str, Any], invite: str | None, file: Path | None) -> _Config:
    """The config of flags (None: not given), the invite, the environment and the file, with peers. Raises UsageError.

    Blocks for up to 1.5 s, and runs an event loop of its own: for the start of a program.
    """
    return with_peers(given_config(kind, given, invite, file))


def given_config(kind: type[_Config], given: Mapping[str, Any], invite: str | None, file: Path | None) -> _Config:
    """The same, perhaps without peers."""
    invite = invite if invite is not None else env_value("invite") or None
    invited = parse(invite).settings() if invite is not None else {}
    flags = {name: value for name, value in given.items() if value is not None}
    return load(kind, {**invited, **flags}, file)


def with_peers(settings: _Config) -> _Config:
    """Without --peer, the swarm that `swarm-node local` runs on this machine, and its model unless one was named; then
    the swarm of this model in the local network.
    """
    if settings.peers:
        return settings
    try:
        model, peers = local_swarm()
    except UsageError:
        nearby = settings.discovery and asyncio.run(peers_nearby(settings))
        if not nearby:
            raise
        return replace(settings, peers=nearby)
    return replace(settings, peers=peers, model=model if settings.model == DEFAULT_MODEL else settings.model)


async def peers_nearby(config: ClientConfig) -> tuple[str, ...]:
    """Multiaddrs of nodes of the same network name, model and secret; none if nobody answers within 1.5 s."""
    from swarm.net.discovery.mdns import SwarmTag, browse  # zeroconf takes 0.1 s to import, and is rarely needed
    from swarm.net.security.swarm_secret import SwarmSecret

    secret = await asyncio.to_thread(SwarmSecret, config.secret) if config.secret else None
    return await browse(SwarmTag.of(config.network, config.model, secret))
