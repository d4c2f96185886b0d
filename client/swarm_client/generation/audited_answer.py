"""An answer that waits for its audit, and is redone where a hop lied. Does not know how audits work."""

from __future__ import annotations

from dataclasses import replace

from swarm_client.api.results import GenerationResult, GenerationStream
from swarm_client.generation.text_stream import TextStream

MAX_REDONE = 4  # times, each without the hop that lied


async def read_audited(stream: GenerationStream, *, wait: bool) -> GenerationResult:
    """Read `stream` to its end. With `wait`, its answer was confirmed, or written again without the hops that failed;
    without it, it is written again only where a hop was found out meanwhile, by the audit of another answer.
    `GenerationResult.repairs` says so. An outline is returned as it is."""
    result = await stream.read()
    lost: list[str] = []
    for _ in range(MAX_REDONE):
        if not isinstance(stream, TextStream):
            break
        audit = await stream.audited() if wait else None
        again = stream.redone(audit)
        if again is None:
            break
        if audit is not None:
            why = f"failed an audit ({audit.reason}); redone from token {audit.position}"
            lost += [f"{peer}: {why}" for peer in audit.liars]
        lost += [repair for repair in result.repairs if repair not in lost]
        stream, result = again, await again.read()
    return replace(result, repairs=(*lost, *result.repairs)) if lost else result
