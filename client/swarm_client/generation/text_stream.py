"""One running generation as the user sees it: an async iterator of text that ends in a GenerationResult.

Owns decoding tokens to text, stop strings and the timing figures. GenerationLoop generates the tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from swarm.planner.costs.chain_costs import ChainCosts
from swarm.planner.generation.state_machine import EmitTokens, Finish, FinishReason, StopRequested
from swarm.planner.speculation.forecast import Strategy
from swarm.types import Chain, TokenLogprobs
from swarm_client.api.results import GenerationResult, GenerationStream, TextChunk
from swarm_client.auditing.result import AuditResult
from swarm_client.generation.generation_loop import GenerationLoop, Waiting
from swarm_client.generation.shared_prefill import SharedPrefill
from swarm_client.generation.stop_strings import StopStrings
from swarm_client.home.exposure import exposure

Trace = tuple[tuple[float, float], ...]


class TextDecoder(Protocol):
    """Turns token ids into text as they come, holding back incomplete characters."""

    def push(self, token: int) -> str: ...

    def finish(self) -> str: ...


@dataclass(slots=True)
class GenerationTiming:
    """When tokens came, by an injected clock in seconds, and where their time went."""

    clock: Callable[[], float]
    started: float = field(init=False)
    first: float | None = field(init=False, default=None)
    last: float = field(init=False, default=0.0)
    tokens: int = field(init=False, default=0)
    decode_traces: list[Trace] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.started = self.clock()

    def record(self, tokens: int, trace: Trace) -> None:
        self.last = self.clock()
        self.tokens += tokens
        if self.first is None:
            self.first = self.last
        else:
            self.decode_traces.append(trace)

    @property
    def time_to_first_token_s(self) -> float:
        return (self.first if self.first is not None else self.clock()) - self.started

    @property
    def tokens_per_second(self) -> float:
        """Over the tokens after the first; 0 when there were none."""
        span = self.last - (self.first or 0.0)
        return (self.tokens - 1) / span if self.tokens > 1 and span > 0 else 0.0

    def hop_ms(self, hops: int) -> Trace:
        """Mean (queue, compute) of each hop over the decoded tokens."""
        traces = [t for t in self.decode_traces if len(t) == hops]
        if not traces:
            return ()
        return tuple(
            (sum(t[h][0] for t in traces) / len(traces), sum(t[h][1] for t in traces) / len(traces))
            for h in range(hops)
        )

    def network_ms(self) -> float:
        """Mean time of a step outside the hops: links, codecs, and the client itself."""
        if not self.decode_traces or self.first is None:
            return 0.0
        inside = sum(queue + compute for trace in self.decode_traces for queue, compute in trace)
        return max(0.0, ((self.last - self.first) * 1e3 - inside) / len(self.decode_traces))


class TextStream(GenerationStream):
    """One generation along chains of hops."""

    def __init__(
        self,
        loop: GenerationLoop,
        decoder: TextDecoder,
        stops: StopStrings,
        clock: Callable[[], float],
        *,
        seed: int,
        explain: Callable[[Chain], str],
        prefill: SharedPrefill | None = None,
        redo: Callable[[Sequence[int]], TextStream] | None = None,
    ) -> None:
        """`prefill`: of the streams that continue the same prompt. `redo`: makes a stream of the same request whose
        answer begins with these tokens."""
        self._loop = loop
        self._decoder = decoder
        self._stops = stops
        self._timing = GenerationTiming(clock)
        self._seed = seed
        self._explain = explain
        self._redo = redo
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        super().__init__(self._run() if prefill is None else prefill.fork(self._run()))

    async def cancel(self) -> None:
        """End the generation where it is; what was shown so far is the answer. Idempotent."""
        await self._stop_reading()
        if self._reason is None:
            self._reason = FinishReason.CANCELLED
            self._loop.generation.handle(StopRequested(self._reason))

    @property
    def chain(self) -> Chain | None:
        """The hops in use; None before the first chain is open."""
        return self._loop.chain

    @property
    def result(self) -> GenerationResult:
        """Raises RuntimeError before the stream has ended."""
        if self._reason is None:
            raise RuntimeError("the generation has not ended; read the stream to its end, or cancel it")
        generation, chain = self._loop.generation, self._loop.chain or Chain(())
        return GenerationResult(
            text="".join(self._text),
            token_ids=tuple(self._tokens),
            prompt_token_ids=generation.request.prompt,
            finish_reason=self._reason,
            tokens_per_second=self._timing.tokens_per_second,
            time_to_first_token_s=self._timing.time_to_first_token_s,
            chain=chain,
            strategy=self._strategy(),
            seed=self._seed,
            explanation=self._explanation(chain),
            repairs=tuple(self._loop.repairs),
            hop_ms=self._timing.hop_ms(len(chain)),
            network_ms=self._timing.network_ms(),
            cached_prompt_tokens=self._loop.cached_tokens,
            speculation=self.speculation,
            stop_string=self._stops.hit,
            logprobs=tuple(self._logprobs),
            prompt_logprobs=generation.prompt_logprobs,
            exposure=exposure(chain, self._loop.sessions.model, self._loop.sessions.trusted),
        )

    def _explanation(self, chain: Chain) -> str:
        """Why this chain, and this drafter."""
        if not chain.hops:
            return "no chain was opened"
        speculation = self._loop.speculation
        choice = speculation.choice if speculation is not None else ""
        return f"{self._explain(chain)}; {choice}" if choice else self._explain(chain)

    async def audited(self) -> AuditResult | None:
        """Wait for the audit of the answer, which goes on beside other work; None if it is not audited."""
        task = self._loop.audit
        return await asyncio.shield(task) if task is not None else None

    def redone(self, audit: AuditResult | None) -> TextStream | None:
        """The answer again, from the last token that audits, of it or of another answer while it was written, left
        standing; None if it need not, or cannot, be."""
        standing = [self._loop.spoiled_from] if self._loop.spoiled_from is not None else []
        if audit is not None and audit.liars:
            standing.append(max(0, audit.position + 1 - len(self._loop.generation.request.prompt)))
        return self._redo(self._tokens[: min(standing)]) if standing and self._redo is not None else None

    @property
    def speculation(self) -> dict[str, Any] | None:
        """Speculative decoding's figures, for people and programs; None without it."""
        speculation = self._loop.speculation
        return speculation.to_json() if speculation is not None else None

    @property
    def measured_costs(self) -> ChainCosts | None:
        """What a step along the chain takes, as measured by this generation; None without speculation."""
        speculation = self._loop.speculation
        return speculation.measured_costs if speculation is not None else None

    def _strategy(self) -> str:
        """The strategy in use at the end."""
        return str((self.speculation or {}).get("strategy", Strategy.SEQUENTIAL))

    async def _run(self) -> AsyncGenerator[TextChunk, None]:
        async with aclosing(_begun(self._loop)) as actions:
            async for action in actions:
                match action:
                    case EmitTokens():
                        text, count = self._show(action)
                        tokens, logprobs = action.tokens[:count], action.logprobs[:count]
                        self._timing.record(count, action.trace)
                        self._tokens += tokens
                        self._logprobs += logprobs
                        yield TextChunk(text, tokens, action.trace, logprobs=logprobs)
                        if self._stops.hit is not None:
                            self._reason = FinishReason.STOP
                            self._loop.generation.handle(StopRequested(self._reason))
                            return
                    case Waiting():
                        yield TextChunk("", (), (), waiting=action.reason)
                    case Finish():
                        rest = self._stops.push(self._decoder.finish()) + self._stops.flush()
                        self._text.append(rest)
                        self._reason = action.reason
                        if rest:
                            yield TextChunk(rest, (), ())

    def _show(self, action: EmitTokens) -> tuple[str, int]:
        """-> the text that can be shown now, and how many tokens of the answer these are: those after a stop string
        are not, however many came with it."""
        eos, count, text = self._loop.generation.request.eos_ids, 0, ""
        for token in action.tokens:
            count += 1
            text += self._stops.push(self._decoder.push(token)) if token not in eos else ""
            if self._stops.hit is not None:
                break
        self._text.append(text)
        return text, count


async def _begun(loop: GenerationLoop) -> AsyncGenerator[EmitTokens | Waiting | Finish, None]:
    """`loop.run()`, after the tokens that were known before."""
    if loop.generation.generated:
        yield EmitTokens(loop.generation.generated, ())
    async with aclosing(loop.run()) as actions:
        async for action in actions:
            yield action
