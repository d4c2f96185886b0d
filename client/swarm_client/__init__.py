"""Talk to a swarm: `SwarmClient`, its synchronous face and the terminal client. Never imports the node.

The names below are imported when first used: `swarm-chat --help` should not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarm_client.api.options import GenerationOptions
    from swarm_client.api.results import GenerationResult, TextChunk
    from swarm_client.client import SwarmClient
    from swarm_client.generation.text_stream import TextStream
    from swarm_client.sync import SyncSwarmClient

_HOMES = {
    "GenerationOptions": "api.options",
    "GenerationResult": "api.results",
    "SwarmClient": "client",
    "SyncSwarmClient": "sync",
    "TextChunk": "api.results",
    "TextStream": "generation.text_stream",
}

__all__ = ["GenerationOptions", "GenerationResult", "SwarmClient", "SyncSwarmClient", "TextChunk", "TextStream"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
