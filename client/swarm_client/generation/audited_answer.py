"""An answer that waits for its audit, and is redone where a hop lied. Does not know how audits work."""

from __future__ import annotations

from dataclasses import replace

from swarm_client.api.results import GenerationResult, GenerationStream
from swarm_client.generation.text_stream import TextStream

MAX_REDONE = 4  # times, each without the hop that lied


async def read_audited(stream: GenerationStream, *, wait: bool) -> GenerationResult:
    """Read `stream` to its end. With `wait`, its answer was confirmed, or written again without the hops that failed;
    `GenerationResult.repairs` says so. An outline is returned as it is."""
    result = await stream.read()
    lost: list[str] = []
    for _ in range(MAX_REDONE if wait else 0):
        audit = await stream.audited() if isinstance(stream, TextStream) else None
        again = stream.redone(audit) if isinstance(stream, TextStream) and audit is not None else None
        if audit is None or again is None:
            break
        why = f"failed an audit ({audit.reason}); redone from token {audit.position}"
        lost += [f"{peer}: {why}" for peer in audit.liars]
        stream, result = again, await again.read()
    return replace(result, repairs=(*lost, *result.repairs)) if lost else result
