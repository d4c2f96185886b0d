"""Hidden states of texts after some of a model's layers, as they would cross the wire to another machine.

Owns running the model for them. Knows no attack.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.runtime.span import Span

_SESSION = b"text"


@torch.inference_mode()
def states_of(span: Span, text: Sequence[int], depths: Collection[int]) -> dict[int, torch.Tensor]:
    """`span`: of the whole model. -> by depth d, `[len(text), hidden]` after layers `[0, d)`, in the wire's dtype."""
    cache = span.new_cache(len(text))
    cache.open(_SESSION, len(text))
    plan = cache.schedule([StepRequest(_SESSION, 0, len(text))])
    hidden = span.embed(text)
    found: dict[int, torch.Tensor] = {}
    done = 0
    for depth in sorted(depths):
        if depth > done:
            hidden = span.forward(hidden, plan, cache, done, depth)
        found[depth], done = hidden.to(span.dtype).cpu(), depth
    return found


def embeddings(span: Span) -> torch.Tensor:
    """What each token becomes before the first layer, `[vocab, hidden]`, fp32."""
    return torch.cat([span.embed(part).float().cpu() for part in _parts(range(span.config.vocab_size), 4096)])


def _parts(ids: range, size: int) -> Iterator[list[int]]:
    for start in range(0, len(ids), size):
        yield list(ids[start : start + size])
