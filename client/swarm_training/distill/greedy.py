"""Greedy answers of the whole model to many prompts in one batch: the reference that drafters are evaluated on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from swarm.types import LayerSpan
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.models.source import ModelSource
from swarm_kernels.runtime.load import load_span


def greedy_answers(
    source: ModelSource,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    ends: Collection[int] = (),
    progress: Callable[[float], None] = lambda fraction: None,
) -> list[list[int]]:
    """At most `tokens` for each prompt, up to and including the first of `ends`. Raises as `load_span`."""
    span = load_span(source, LayerSpan(0, source.config.num_layers), torch.bfloat16)
    cache = span.new_cache(sum(len(prompt) + tokens + 16 for prompt in prompts))
    keys = [number.to_bytes(4, "little") for number in range(len(prompts))]
    for key, prompt in zip(keys, prompts, strict=True):
        cache.open(key, len(prompt) + tokens)
    answers: list[list[int]] = [[] for _ in prompts]
    pending = {i: list(prompt) for i, prompt in enumerate(prompts)}
    for step in range(tokens):
        rows = [StepRequest(keys[i], cache.length(keys[i]), len(fresh)) for i, fresh in pending.items()]
        last_rows = torch.tensor([len(fresh) for fresh in pending.values()]).cumsum(0) - 1
        metadata = cache.schedule(rows)
        hidden = span.forward(span.embed([t for fresh in pending.values() for t in fresh]), metadata, cache)
        chosen = span.logits(hidden[last_rows]).argmax(-1).tolist()
        for i, token in zip(list(pending), chosen, strict=True):
            answers[i].append(token)
            pending[i] = [token]
            if token in ends:
                del pending[i]
        progress((step + 1) / tokens)
        if not pending:
            break
    return answers
