"""Which swarms a gateway serves, and under which names: from its config to served models and ways to reach them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from swarm.config import GatewayConfig, SwarmEntry
from swarm.errors import UsageError
from swarm.net.discovery.invite import parse
from swarm_client import SwarmClient
from swarm_client.network.discovery import with_peers
from swarm_gateway.serving.admission import Admission, AdmissionPolicy
from swarm_gateway.serving.gateway import Gateway
from swarm_gateway.serving.metrics import GatewayMetrics
from swarm_gateway.serving.served_model import Connect, ServedModel


def swarms_of(
    config: GatewayConfig, find: Callable[[GatewayConfig], GatewayConfig] = with_peers
) -> dict[str, GatewayConfig]:
    """Model name -> the config of its client. `find`: adds the peers where none are named. Raises UsageError."""
    found: dict[str, GatewayConfig] = {}
    entries = [("", config)] if config.peers or not config.swarms else []
    for name, settings in [*entries, *(_of_entry(config, entry) for entry in config.swarms)]:
        settings = find(settings)
        name = name or model_name(settings.model)
        if name in found:
            raise UsageError(f"two swarms serve '{name}'; give each a `name` in [[swarm]] of the config file")
        found[name] = settings
    return found


def gateway_of(config: GatewayConfig, swarms: dict[str, GatewayConfig]) -> tuple[Gateway, dict[str, Connect]]:
    """The gateway with its models, and how to reach each one's swarm."""
    metrics = GatewayMetrics()
    policy = AdmissionPolicy(config.max_running, config.max_queued, config.queue_timeout_s)
    models = [
        ServedModel(
            name,
            admission=Admission(policy),
            metrics=metrics,
            default_max_tokens=config.default_max_tokens,
            max_tokens=config.max_tokens,
        )
        for name in swarms
    ]
    connect: dict[str, Connect] = {
        name: partial(
            SwarmClient,
            config=replace(settings, limits=replace(settings.limits, turn_timeout_s=config.queue_timeout_s)),
        )
        for name, settings in swarms.items()
    }
    return Gateway(models, config, metrics), connect


def model_name(model: str) -> str:
    """What callers call a model: a file's or folder's own name, or the name by which it is fetched."""
    path = Path(model)
    return path.name.removesuffix(".gguf") if model.endswith(".gguf") or path.exists() else model


def _of_entry(config: GatewayConfig, entry: SwarmEntry | str) -> tuple[str, GatewayConfig]:
    """(name or "", config). An entry's own settings come before those of its invitation."""
    if isinstance(entry, str):
        entry = SwarmEntry(invite=entry)
    settings = parse(entry.invite).settings() if entry.invite else {}
    own = {"model": entry.model, "peers": entry.peers, "secret": entry.secret, "network": entry.network}
    settings |= {name: value for name, value in own.items() if value}
    return entry.name, replace(config, **{"peers": (), **settings})
