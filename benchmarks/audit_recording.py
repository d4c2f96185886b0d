"""Rows at the edges of SmolLM2, and the tokens sampled from them, as many kinds of machine and of cheat compute them.

Owns what is recorded; `bench_audits` draws conclusions. Three hops; the cheats happen in the middle one, whose input is
the honest one, or in the sampling.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from swarm.types import LayerSpan, Sampling
from swarm_kernels.batch import AttentionMetadata
from swarm_kernels.device.device import DTYPES
from swarm_kernels.kvcache.cache import KVCacheManager, StepRequest
from swarm_kernels.models.config import ModelConfig
from swarm_kernels.models.source import ModelSource
from swarm_kernels.ops import dispatch
from swarm_kernels.runtime.hf_span import HfSpan
from swarm_kernels.runtime.load import load_span
from swarm_kernels.runtime.span import Span
from swarm_kernels.sampling.sampler import RowContext, sample_rows
from swarm_kernels.tokenizer.tokenizer import ChatTokenizer

EDGES = (10, 20, 30)
SAMPLING = Sampling(temperature=0.8, top_p=0.95, seed=1)
GREEDY = Sampling(seed=1)
ANSWER = 96  # tokens


@dataclass(frozen=True)
class Recording:
    """Of one text: `rows[edge] [answer, hidden]` in the wire's dtype, of the answer's positions, and the tokens that
    follow them, `sampled` and `greedy` `[answer]`."""

    rows: dict[int, torch.Tensor]
    sampled: torch.Tensor
    greedy: torch.Tensor


class DitheredSource:
    """A ModelSource whose matrices have lost the grid of the file's 4-bit format, as if they had never been quantized:
    noise of half a step is added, seeded by the tensor's name. Otherwise int4 would be free of errors here."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source

    def __getattr__(self, name: str) -> object:
        return getattr(self._source, name)

    @property
    def config(self) -> ModelConfig:
        return self._source.config

    def tensor(self, name: str) -> torch.Tensor:
        tensor = self._source.tensor(name)
        if tensor.ndim != 2 or "layers" not in name:
            return tensor
        blocks = tensor.float().reshape(-1, 32)
        step = (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / 15
        noise = torch.rand(blocks.shape, generator=torch.Generator().manual_seed(hash_of(name))) - 0.5
        return (blocks + step * noise).reshape(tensor.shape)


def hash_of(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")


def spans(source: ModelSource, dtype: str, *, isa: str = "best", transformers: bool = False) -> list[Span]:
    """The three hops of one kind of machine. `transformers`: its layers, whose residual stream is in `dtype` too, as on
    a GPU."""
    dispatch.select_isa(isa)
    parts = [LayerSpan(a, b) for a, b in zip((0, *EDGES), EDGES, strict=False)]
    if transformers:
        return [HfSpan.load(source, part, DTYPES[dtype], torch.device("cpu"), lambda fraction: None) for part in parts]
    return [load_span(source, part, DTYPES[dtype]) for part in parts]


def forward(span: Span, rows: torch.Tensor, start: int | None = None, end: int | None = None) -> torch.Tensor:
    """`rows [n, hidden]` as one prefill -> the span's output, in the dtype of the wire."""
    count = len(rows)
    cache = span.new_cache(count)
    cache.open(b"text", count)
    return span.forward(rows, cache.schedule([StepRequest(b"text", 0, count)]), cache, start, end).to(span.dtype)


Text = tuple[list[int], int]
"""Tokens, and how many of them are the prompt."""

Tamper = Callable[[int, torch.Tensor], torch.Tensor]
"""(edge, honest output rows) -> what is sent instead."""


def record(
    hops: Sequence[Span],
    tokens: Sequence[int],
    prompt: int,
    sampling: Sampling = SAMPLING,
    tamper: Tamper | None = None,
) -> Recording:
    """Teacher-forced on `tokens`, of which the first `prompt` are the prompt."""
    hidden, rows = hops[0].embed(tokens[:-1]), {}
    for edge, span in zip(EDGES, hops, strict=True):
        hidden = forward(span, hidden)
        hidden = tamper(edge, hidden) if tamper is not None else hidden
        rows[edge] = hidden[prompt - 1 :].clone()
    return sampled(hops[-1], rows, prompt, sampling)


def sampled(tail: Span, rows: dict[int, torch.Tensor], prompt: int, sampling: Sampling = SAMPLING) -> Recording:
    """What the tail samples from its last rows."""
    last = rows[EDGES[-1]]
    logits = tail.logits(last)
    contexts = [RowContext(sampling, prompt + i) for i in range(len(last))]
    plain = [RowContext(replace(GREEDY), prompt + i) for i in range(len(last))]
    return Recording(rows, torch.tensor(sample_rows(logits, contexts)), torch.tensor(sample_rows(logits, plain)))


def write_texts(
    hops: Sequence[Span], tokenizer: ChatTokenizer, questions: Sequence[str]
) -> list[tuple[list[int], int]]:
    """Answers as the honest swarm samples them -> (tokens, length of the prompt) of each."""
    texts = []
    for question in questions:
        tokens = list(tokenizer.apply_chat_template([{"role": "user", "content": question}]))
        prompt, caches = len(tokens), []
        for span in hops:
            caches.append(span.new_cache(prompt + ANSWER))
            caches[-1].open(b"text", prompt + ANSWER)
        held = 0
        while len(tokens) < prompt + ANSWER:
            hidden = hops[0].embed(tokens[held:])
            for span, cache in zip(hops, caches, strict=True):
                request = StepRequest(b"text", held, len(tokens) - held)
                hidden = span.forward(hidden, cache.schedule([request]), cache).to(span.dtype)
            held = len(tokens)
            tokens += sample_rows(hops[-1].logits(hidden[-1:]), [RowContext(SAMPLING, held)])
        texts.append((tokens, prompt))
    return texts


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


def record_drafted(hops: Sequence[Span], tokens: Sequence[int], prompt: int, drafts: int = 8) -> Recording:
    """As `record`, with the answer in steps of `drafts` + 1 tokens that come as drafts, all accepted."""
    room = len(tokens) + 64  # tree slots share the reservation
    caches = [span.new_cache(room) for span in hops]
    for cache in caches:
        cache.open(b"text", room)
    parts: dict[int, list[torch.Tensor]] = {edge: [] for edge in EDGES}

    def step(ids: Sequence[int], request: StepRequest) -> None:
        hidden = hops[0].embed(ids)
        for edge, span, cache in zip(EDGES, hops, caches, strict=True):
            hidden = span.forward(hidden, cache.schedule([request]), cache).to(span.dtype)
            parts[edge].append(hidden)

    step(tokens[: prompt - 1], StepRequest(b"text", 0, prompt - 1))
    at, held = prompt - 1, 0
    while at < len(tokens) - 1:
        ids = tokens[at : min(at + 1 + drafts, len(tokens) - 1)]
        slots = tuple(range(len(ids) - 1))
        step(ids, StepRequest(b"text", at - held, 1, tuple(slot - 1 for slot in slots), slots, tuple(range(held))))
        at, held = at + len(ids), len(slots)
    return sampled(hops[-1], {edge: torch.cat(rows)[prompt - 1 :] for edge, rows in parts.items()}, prompt)


def prefill_time(hops: Sequence[Span], text: Text) -> float:
    """Seconds a token of one prefill without logits."""
    tokens, _ = text
    times = []
    for _ in range(3):
        started = time.perf_counter()
        hidden = hops[0].embed(tokens)
        for span in hops:
            hidden = forward(span, hidden)
        times.append(time.perf_counter() - started)
    return min(times) / len(tokens)


def decode_time(hops: Sequence[Span], text: Text) -> float:
    """Seconds a token of decoding it one by one, logits included."""
    tokens, _ = text
    caches = [span.new_cache(len(tokens)) for span in hops]
    for cache in caches:
        cache.open(b"text", len(tokens))
    times = []
    for at, token in enumerate(tokens):
        started = time.perf_counter()
        hidden = hops[0].embed([token])
        for span, cache in zip(hops, caches, strict=True):
            hidden = span.forward(hidden, cache.schedule([StepRequest(b"text", at, 1)]), cache).to(span.dtype)
        hops[-1].logits(hidden)
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]
