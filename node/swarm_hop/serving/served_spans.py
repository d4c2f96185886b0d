"""The spans this node has loaded: one, and during a move the old beside the new.

Owns which of them admits a session and keeps it to its end. Uses neither frames nor the reason of a move.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from swarm.block_hash import HASH_BLOCK_TOKENS
from swarm.errors import NodeBusy, NoRoute, OutOfMemory
from swarm.planner.scheduling.fair_shares import Share
from swarm.types import Grammar, LayerSpan, PeerId
from swarm_hop.drafting.tail_drafts import TailDrafts
from swarm_hop.serving.executor import Executor, StepEngine
from swarm_hop.serving.prefix_cache import PrefixCache
from swarm_hop.serving.session import ActivationSpec, HopSession
from swarm_hop.serving.token_history import StepTokens
from swarm_kernels.sampling.grammar import GrammarState, TokenMask


class UnitWriter(Protocol):
    """Takes what a reader of another node returned."""

    def __call__(self, layer: int, first: int, body: bytes) -> None:
        """`first`: the first unit in `body`. Call it on the device. Raises InvalidRequest."""
        ...

    def finish(self) -> None:
        """Every unit has come. Raises InvalidRequest."""
        ...


class SpanEngineApi(StepEngine, Protocol):
    """An engine, the layers it serves and the KV blocks of its sessions."""

    @property
    def span(self) -> LayerSpan: ...

    @property
    def rows(self) -> ActivationSpec: ...

    @property
    def capacity_tokens(self) -> int:
        """The largest reservation that an engine without sessions can take."""
        ...

    @property
    def session_capacity(self) -> int:
        """The most sessions whose recurrent states fit."""
        ...

    @property
    def tail_drafts(self) -> TailDrafts | None:
        """Of a tail that holds a drafter."""
        ...

    async def compile_grammar(self, grammar: Grammar, share: Share) -> GrammarState:
        """`share`: on whose account. Raises InvalidRequest, NodeBusy when it takes too much here, ModelError when the
        model's tokenizer cannot be read."""
        ...

    async def grammar_masks(self, state: GrammarState, tokens: StepTokens, peer: PeerId) -> Sequence[TokenMask | None]:
        """What the grammar allows after each row that is sampled from. Raises InvalidRequest."""
        ...

    def admit(self, key: int, max_tokens: int) -> None:
        """Reserve blocks. Raises OutOfMemory or ContextOverflow."""
        ...

    def fork(self, parent: int, key: int, max_tokens: int, length: int) -> None:
        """`admit`, with the first `length` tokens of another session, whose blocks are shared."""
        ...

    def freeze_prefix(self, key: int, length: int) -> None:
        """The session has ended; retain its first `length` tokens for forks."""
        ...

    def shrink(self, key: int, max_tokens: int) -> None:
        """Reserve only so many tokens from now on; the session may hold more while there are free blocks."""
        ...

    def release(self, key: int) -> None: ...

    def prune(self, key: int, slots: Sequence[int]) -> None: ...

    def rollback(self, key: int, length: int) -> None:
        """Drop the tree and the committed tokens from `length` on. Raises OutOfMemory."""
        ...

    def reusable(self, key: int, length: int, multiple: int) -> int:
        """How many of the first `length` tokens of a session can be forked, a multiple of `multiple`."""
        ...

    def transfer_units(self, layer: int, tokens: int) -> int:
        """In how many units what a layer holds of so many tokens is transferred: blocks of keys and values, or parts of
        a recurrent state."""
        ...

    def unit_bytes(self, layer: int) -> int: ...

    def distinct_layers(self, layers: LayerSpan) -> Sequence[int]:
        """Those whose units are all that `layers` hold of a session: the others share theirs."""
        ...

    def import_blocks(self, key: int, tokens: int) -> None:
        """Count them as committed, before a `writer` fills their blocks. Raises InvalidRequest."""
        ...

    def reader(self, key: int, tokens: int) -> Callable[[int, int, int], bytes]:
        """-> (layer, first unit, number of units) -> what the layer holds of the first `tokens`. Call it on the device.

        Raises InvalidRequest, or ActivationLogEvicted if it is not kept any more.
        """
        ...

    def writer(self, key: int, tokens: int, layers: LayerSpan) -> UnitWriter: ...


@dataclass(slots=True, eq=False)
class ServedSpan:
    """A loaded span, its executor, and the keys of its sessions. `open`: it admits more.

    `on_released` is called with every key whose blocks are freed: when a session ends, or later if it was retained.
    """

    engine: SpanEngineApi
    executor: Executor
    on_released: Callable[[int], None] = lambda key: None
    open: bool = True
    keys: set[int] = field(default_factory=set)
    empty: asyncio.Event = field(default_factory=asyncio.Event)
    prefixes: PrefixCache = field(init=False)
    _computed: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.empty.set()
        self.prefixes = PrefixCache(self.engine.capacity_tokens, self._computed.__getitem__)

    def admit(
        self,
        session: HopSession,
        prefix: Sequence[bytes],
        retry_after_s: float,
        make_room: Callable[[], bool] | None = None,
    ) -> int:
        """Admit a session. -> the one whose first `session.committed` tokens it shares, -1 if none.

        `make_room()`: take back memory of others, if that is enough.

        Raises ContextOverflow, OutOfMemory (it never fits) or NodeBusy (not now).
        """
        key, max_tokens = session.key, session.max_tokens
        parent, cached = self.prefixes.find(
            session.client.peer, session.span, prefix[: max_tokens // HASH_BLOCK_TOKENS]
        )
        if cached:
            cached = self.engine.reusable(parent, cached, HASH_BLOCK_TOKENS)
        while True:
            try:
                if cached:
                    self.engine.fork(parent, key, max_tokens, cached)
                else:
                    self.engine.admit(key, max_tokens)
                break
            except OutOfMemory as error:
                old = self.prefixes.evict_candidate()
                if max_tokens > self.engine.capacity_tokens:
                    raise
                if old is None and make_room is not None and make_room():
                    make_room = None  # once
                    continue
                if old is None:
                    text = f"no room for {max_tokens} tokens now: {error}"
                    raise NodeBusy(text, retry_after_s=retry_after_s) from None
                self._free(old)
                if old == parent:
                    parent, cached = -1, 0
        parent = parent if cached else -1
        session.start_from(cached)
        self.prefixes.add(key, session.client.peer, session.span, prefix)
        self._computed[key] = cached
        self.keys.add(key)
        self.empty.clear()
        return parent

    def computed(self, key: int, tokens: int) -> None:
        """So many of the session's tokens are in the KV cache now."""
        self._computed[key] = tokens

    def release(self, key: int, prefix: Sequence[bytes] = ()) -> None:
        """The session is over; the blocks that hash to `prefix` may be retained for others."""
        if prefix:
            computed = min(self._computed[key], len(prefix) * HASH_BLOCK_TOKENS)
            prefix = prefix[: self.engine.reusable(key, computed, HASH_BLOCK_TOKENS) // HASH_BLOCK_TOKENS]
        retained, evicted = self.prefixes.retain(key, prefix) if prefix else (0, [])
        for old in evicted:
            self._free(old)
        if retained:
            self.engine.freeze_prefix(key, retained)
        else:
            self._free(key)
        self.executor.forget(key)
        self.keys.discard(key)
        if not self.keys:
            self.empty.set()

    def forget_client(self, peer: PeerId) -> None:
        """Free what is retained for a client that disconnected."""
        for key in self.prefixes.of(peer):
            self._free(key)

    def forget_all(self) -> None:
        """Free all that is retained."""
        while (key := self.prefixes.evict_candidate()) is not None:
            self._free(key)

    def _free(self, key: int) -> None:
        self.engine.release(key)
        self.prefixes.forget(key)
        self._computed.pop(key, None)
        self.on_released(key)


class ServedSpans:
    """The newest first."""

    def __init__(self, on_released: Callable[[int], None] = lambda key: None) -> None:
        self._spans: list[ServedSpan] = []
        self._on_released = on_released

    def add(self, engine: SpanEngineApi, executor: Executor) -> ServedSpan:
        """Sessions on its layers are admitted here from now on."""
        served_span = ServedSpan(engine, executor, self._on_released)
        self._spans.insert(0, served_span)
        return served_span

    def remove(self, served_span: ServedSpan) -> None:
        """Remove a span without sessions, and free what it retained of those that have ended."""
        self._spans.remove(served_span)
        served_span.forget_all()

    def find(self, start: int, end: int) -> ServedSpan:
        """The span that admits a session on layers `[start, end)`. Raises NodeBusy while none is loaded, NoRoute."""
        if not self._spans:
            raise NodeBusy("this node is still loading its layers")
        opened = [served_span for served_span in self._spans if served_span.open]
        for served_span in opened:
            span = served_span.engine.span
            if span.start <= start <= end <= span.end and (start < end or not len(span)):
                return served_span
        spans = ", ".join(str(served_span.engine.span) for served_span in opened) or "none now"
        raise NoRoute(f"this node serves layers {spans}, not {start}:{end}")

    def __iter__(self) -> Iterator[ServedSpan]:
        return iter(self._spans)

    def of(self, key: int) -> ServedSpan | None:
        """The span of a session; None once it has been released."""
        return next((served_span for served_span in self._spans if key in served_span.keys), None)
