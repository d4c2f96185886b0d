"""Rows at the edges of three hops, as a machine computes them in the ways that an answer or a replay may come about.

Owns the ways: token by token, as one prefill, in a batch with other answers, as drafts; and the cheats, which happen in
the middle hop, whose input is the honest one. `bench_audits` draws conclusions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from audit_machines import EDGES

from swarm.types import Sampling
from swarm_kernels.batch import AttentionMetadata
from swarm_kernels.kvcache.cache import KVCacheManager, StepRequest
from swarm_kernels.runtime.span import Span
from swarm_kernels.sampling.sampler import RowContext, sample_rows
from swarm_kernels.tokenizer.tokenizer import ChatTokenizer

SAMPLING = Sampling(temperature=0.8, top_p=0.95, seed=1)
ANSWER = 96  # tokens
PREFILL, SAMPLED = 256, 64  # rows of a step, as in a replay

Text = tuple[list[int], int]
"""Tokens, and how many of them are the prompt."""

Rows = dict[int, torch.Tensor]
"""Edge -> `[answer, hidden]` in the dtype of the wire: the rows after which the answer's tokens are sampled."""


class ChainOfHops:
    """All three hops with one cache each."""

    def __init__(self, hops: Sequence[Span], room: int) -> None:
        self.hops = hops
        self.caches = [span.new_cache(room) for span in hops]

    def open(self, session: bytes, tokens: int) -> None:
        for cache in self.caches:
            cache.open(session, tokens)

    def step(self, ids: Sequence[int], requests: Sequence[StepRequest]) -> Rows:
        """The rows of one batch at each edge."""
        hidden, rows = self.hops[0].embed(ids), {}
        for edge, span, cache in zip(EDGES, self.hops, self.caches, strict=True):
            hidden = span.forward(hidden, cache.schedule(list(requests)), cache).to(span.dtype)
            rows[edge] = hidden
        return rows


def _joined(parts: Sequence[Rows]) -> Rows:
    return {edge: torch.cat([rows[edge] for rows in parts]) for edge in EDGES}


def prefilled(hops: Sequence[Span], text: Text) -> Rows:
    """As a replay computes it."""
    tokens, prompt = text
    chain, parts, at = ChainOfHops(hops, len(tokens)), [], 0
    chain.open(b"text", len(tokens))
    while at < len(tokens) - 1:
        end = min(at + PREFILL, prompt - 1) if at < prompt - 1 else min(at + SAMPLED, len(tokens) - 1)
        parts.append(chain.step(tokens[at:end], [StepRequest(b"text", at, end - at)]))
        at = end
    return {edge: rows[prompt - 1 :].clone() for edge, rows in _joined(parts).items()}


def decoded(hops: Sequence[Span], text: Text) -> Rows:
    """The prompt as one prefill, then token by token."""
    tokens, prompt = text
    chain = ChainOfHops(hops, len(tokens))
    chain.open(b"text", len(tokens))
    chain.step(tokens[: prompt - 1], [StepRequest(b"text", 0, prompt - 1)])
    steps = range(prompt - 1, len(tokens) - 1)
    return _joined([chain.step(tokens[at : at + 1], [StepRequest(b"text", at, 1)]) for at in steps])


def batched(hops: Sequence[Span], texts: Sequence[Text]) -> list[Rows]:
    """All texts at once: prompts in chunks of unlike lengths, answers token by token in one batch."""
    chain = ChainOfHops(hops, sum(len(tokens) + 16 for tokens, _ in texts))
    for number, (tokens, prompt) in enumerate(texts):
        chain.open(bytes([number]), len(tokens))
        for at in range(0, prompt - 1, 5 + number):
            end = min(at + 5 + number, prompt - 1)
            chain.step(tokens[at:end], [StepRequest(bytes([number]), at, end - at)])
    parts: list[list[Rows]] = [[] for _ in texts]
    for i in range(ANSWER):
        places = [prompt - 1 + i for _, prompt in texts]
        ids = [tokens[at] for (tokens, _), at in zip(texts, places, strict=True)]
        rows = chain.step(ids, [StepRequest(bytes([number]), at, 1) for number, at in enumerate(places)])
        for number, part in enumerate(parts):
            part.append({edge: values[number : number + 1].clone() for edge, values in rows.items()})
    return [_joined(part) for part in parts]


def drafted(hops: Sequence[Span], text: Text, drafts: int = 8) -> Rows:
    """The answer in steps of `drafts` + 1 tokens that come as drafts, all accepted."""
    tokens, prompt = text
    chain = ChainOfHops(hops, len(tokens) + 64)  # tree slots share the reservation
    chain.open(b"text", len(tokens) + 64)
    chain.step(tokens[: prompt - 1], [StepRequest(b"text", 0, prompt - 1)])
    at, held, parts = prompt - 1, 0, []
    while at < len(tokens) - 1:
        ids = tokens[at : min(at + 1 + drafts, len(tokens) - 1)]
        slots = tuple(range(len(ids) - 1))
        parents = tuple(slot - 1 for slot in slots)
        parts.append(chain.step(ids, [StepRequest(b"text", at - held, 1, parents, slots, tuple(range(held)))]))
        at, held = at + len(ids), len(slots)
    return _joined(parts)


Tamper = Callable[[torch.Tensor], torch.Tensor]
"""Honest output rows of the middle hop -> what it sends instead."""


def tampered(hops: Sequence[Span], text: Text, tamper: Tamper) -> Rows:
    """As one prefill, which on our kernels has the bits of decoding."""
    tokens, prompt = text
    hidden, rows = hops[0].embed(tokens[:-1]), {}
    for edge, span in zip(EDGES, hops, strict=True):
        cache = span.new_cache(len(hidden))
        cache.open(b"text", len(hidden))
        hidden = span.forward(hidden, cache.schedule([StepRequest(b"text", 0, len(hidden))]), cache).to(span.dtype)
        hidden = tamper(hidden) if edge == EDGES[1] else hidden
        rows[edge] = hidden[prompt - 1 :].clone()
    return rows


def unchanged(rows: torch.Tensor) -> torch.Tensor:
    return rows


class SkippingSpan:
    """A span that leaves out layers `[start, end)`."""

    def __init__(self, span: Span, start: int, end: int) -> None:
        self._span, self._skipped = span, (start, end)

    def __getattr__(self, name: str) -> object:
        return getattr(self._span, name)

    def forward(
        self, rows: torch.Tensor, metadata: AttentionMetadata, cache: KVCacheManager, *_: object
    ) -> torch.Tensor:
        layers, (start, end) = self._span.layers, self._skipped
        hidden = self._span.forward(rows, metadata, cache, layers.start, start)
        return self._span.forward(hidden, metadata, cache, end, layers.end)


def write_text(hops: Sequence[Span], tokenizer: ChatTokenizer, question: str) -> Text:
    """An answer as the honest swarm samples it."""
    tokens = list(tokenizer.apply_chat_template([{"role": "user", "content": question}]))
    prompt, held = len(tokens), 0
    chain = ChainOfHops(hops, prompt + ANSWER)
    chain.open(b"text", prompt + ANSWER)
    while len(tokens) < prompt + ANSWER:
        rows = chain.step(tokens[held:], [StepRequest(b"text", held, len(tokens) - held)])
        held = len(tokens)
        tokens += sample_rows(hops[-1].logits(rows[EDGES[-1]][-1:]), [RowContext(SAMPLING, held)])
    return tokens, prompt
