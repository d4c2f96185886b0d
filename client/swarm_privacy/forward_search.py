"""Vocabulary matching by forward search: the attacker holds the model too, and tries tokens until the states agree.

Thomas et al., "Hidden No More: Attacking and Defending Private Third-Party LLM Inference" (2025). Token by token: with
those before it recovered, each candidate for the next one is run through the same layers, and the one whose state is
nearest to what was seen is taken. It needs no training; a ranking of the candidates only makes it quicker.

Owns the search. Candidates run together, as the children of one token of a draft tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.runtime.span import Span

_SESSION = b"search"
FIRST_BATCH, BATCH_GROWTH, MAX_BATCH = 16, 4, 1024  # candidates: the right one is mostly among the first


@dataclass(frozen=True, slots=True)
class ForwardSearchPolicy:
    """`match`: relative L2 distance below which a candidate is taken at once. `most`: candidates of one position; fewer
    make the search quicker and the attacker weaker."""

    match: float = 0.02
    most: int = 4096


@torch.inference_mode()
def forward_search(
    span: Span,
    seen: torch.Tensor,
    depth: int,
    ranked: torch.Tensor,
    policy: ForwardSearchPolicy = ForwardSearchPolicy(),
) -> list[int]:
    """The tokens of a text, from its states `seen [n, hidden]` after layers `[0, depth)` of the model in `span`.

    `ranked [n, vocab]`: all tokens for each position, in the order in which they are tried.
    """
    cache = span.new_cache(len(seen) + 2 * MAX_BATCH)
    cache.open(_SESSION, len(seen) + MAX_BATCH)
    recovered: list[int] = []
    for position, target in enumerate(seen.float()):
        best, distance = -1, float("inf")
        for batch in _batches(ranked[position, : policy.most]):
            slots = tuple(range(len(batch)))
            states = span.embed(batch.tolist())
            if depth:
                plan = cache.schedule([StepRequest(_SESSION, position, 0, (-1,) * len(batch), slots)])
                states = span.forward(states, plan, cache, 0, depth)
                cache.drop_tree(_SESSION)
            apart = (states.to(span.dtype).float().cpu() - target).norm(dim=1) / target.norm()
            at = int(apart.argmin())
            if float(apart[at]) < distance:
                best, distance = int(batch[at]), float(apart[at])
            if distance < policy.match:
                break
        recovered.append(best)
        if depth:
            plan = cache.schedule([StepRequest(_SESSION, position, 1)])
            span.forward(span.embed([best]), plan, cache, 0, depth)
    return recovered


def _batches(ranked: torch.Tensor) -> Iterator[torch.Tensor]:
    at, size = 0, FIRST_BATCH
    while at < len(ranked):
        yield ranked[at : at + size]
        at, size = at + size, min(MAX_BATCH, size * BATCH_GROWTH)
