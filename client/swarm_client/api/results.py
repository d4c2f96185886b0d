"""The result types: TextChunks while it streams, a GenerationResult at the end. Owns their fields and JSON."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from swarm.planner.generation.state_machine import FinishReason
from swarm.types import Chain, TokenLogprobs
from swarm_client.api.outline_report import OutlineReport


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Text that one step committed. `trace`: (queue ms, compute ms) of each hop for that step; `text` may be empty
    while a character or a possible stop string is incomplete.

    `waiting`: why there is no chain now; such a chunk has no text. `logprobs`: of each of `token_ids`, if asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    trace: tuple[tuple[float, float], ...]
    waiting: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """One finished generation. `tokens_per_second` counts from the first token on (the prompt is not in it)."""

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: FinishReason
    tokens_per_second: float
    time_to_first_token_s: float
    chain: Chain
    strategy: str
    seed: int
    explanation: str
    repairs: tuple[str, ...] = ()
    hop_ms: tuple[tuple[float, float], ...] = ()  # mean (queue, compute) of each hop over the decoded tokens
    network_ms: float = 0.0  # mean time of a token outside the hops
    cached_prompt_tokens: int = 0  # of the prompt, found in the prefix caches of all hops
    speculation: dict[str, Any] | None = None  # see `ClientSpeculation.to_json`; None without speculative decoding
    outline: OutlineReport | None = None  # of an answer that was requested as an outline, or became one
    stop_string: str | None = None  # the one that ended it
    logprobs: tuple[TokenLogprobs, ...] = ()  # of each token, if asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of each token of the prompt after the first, if asked for
    exposure: str = ""  # who saw what of the text, a sentence

    def to_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "prompt_token_ids": list(self.prompt_token_ids),
            "finish_reason": str(self.finish_reason),
            "tokens_per_second": round(self.tokens_per_second, 3),
            "time_to_first_token_s": round(self.time_to_first_token_s, 4),
            "chain": [{"peer": h.peer, "start": h.start, "end": h.end} for h in self.chain.hops],
            "strategy": self.strategy,
            "seed": self.seed,
            "explanation": self.explanation,
            "exposure": self.exposure,
            "repairs": list(self.repairs),
            "hop_ms": [{"queue": round(q, 3), "compute": round(c, 3)} for q, c in self.hop_ms],
            "network_ms": round(self.network_ms, 3),
            "cached_prompt_tokens": self.cached_prompt_tokens,
            "speculation": self.speculation,
            "outline": self.outline.to_json() if self.outline is not None else None,
            **({"stop_string": self.stop_string} if self.stop_string is not None else {}),
            **({"logprobs": _logprobs_json(self.logprobs)} if self.logprobs else {}),
            **({"prompt_logprobs": _logprobs_json(self.prompt_logprobs)} if self.prompt_logprobs else {}),
        }


def _logprobs_json(logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    return [
        {
            "token": entry.token,
            "logprob": entry.logprob,
            "top": [{"token": token, "logprob": logprob} for token, logprob in entry.top],
        }
        for entry in logprobs
    ]


class GenerationStream(ABC):
    """`async for chunk in stream`, then `stream.result`. Leaving it early, or `cancel()`, ends it on all hops.

    Use as an async context manager so that an exception in the loop also ends it. Another task than the one that reads
    it may cancel it: the reader's loop ends. Subclasses set `_reason` when they have read to the end.
    """

    def __init__(self, chunks: AsyncGenerator[TextChunk, None]) -> None:
        self._reason: FinishReason | None = None
        self._chunks = self._read(chunks)
        self._reader: asyncio.Task[Any] | None = None  # the task that waits for the next chunk
        self._cancelled = False  # `cancel` was called
        self._ended = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[TextChunk]:
        return self._chunks

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.cancel()

    async def read(self) -> GenerationResult:
        """Read to the end."""
        async with self:
            async for _ in self:
                pass
        return self.result

    @abstractmethod
    async def cancel(self) -> None:
        """Stop it; the text shown so far is the answer. Idempotent."""

    async def _stop_reading(self) -> None:
        """End the chunks, and what they are made from."""
        if not self._cancelled and not self._ended.is_set():
            self._cancelled = True
            if self._reader is None:
                await self._chunks.aclose()
                self._ended.set()
            elif self._reason is None:
                self._reader.cancel()
        await self._ended.wait()

    async def _read(self, chunks: AsyncGenerator[TextChunk, None]) -> AsyncGenerator[TextChunk, None]:
        """`chunks`, whose reader `_stop_reading` can interrupt."""
        self._reader = asyncio.current_task()
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    self._reader = None
                    yield chunk
                    self._reader = asyncio.current_task()
        except asyncio.CancelledError:
            if not self._cancelled or self._reader is None or self._reader.uncancel():
                raise
        finally:
            self._reader = None
            self._ended.set()

    @property
    @abstractmethod
    def chain(self) -> Chain | None:
        """The hops of what is shown now; None before the first chain is open."""

    @property
    @abstractmethod
    def result(self) -> GenerationResult:
        """Raises RuntimeError before the stream has ended."""
