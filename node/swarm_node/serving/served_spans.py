"""The spans this node has loaded: one, and during a move the old beside the new.

Owns which of them takes a session and keeps it to its end. Knows neither frames nor why a node moves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from swarm.block_hash import HASH_BLOCK_TOKENS
from swarm.errors import NodeBusy, NoRoute, OutOfMemory
from swarm.types import LayerSpan, PeerId
from swarm_node.serving.executor import Executor, StepEngine
from swarm_node.serving.prefix_cache import PrefixCache
from swarm_node.serving.session import ActivationSpec, HopSession


class SpanEngineApi(StepEngine, Protocol):
    """An engine together with what it serves and the pages of its sessions."""

    @property
    def span(self) -> LayerSpan: ...

    @property
    def rows(self) -> ActivationSpec: ...

    @property
    def capacity_tokens(self) -> int:
        """The largest reservation that an engine without sessions can take."""
        ...

    def admit(self, key: int, max_tokens: int) -> None:
        """Reserve pages. Raises OutOfMemory or ContextOverflow."""
        ...

    def fork(self, parent: int, key: int, max_tokens: int, length: int) -> None:
        """`admit`, with the first `length` tokens of another session, whose pages are shared."""
        ...

    def freeze_prefix(self, key: int, length: int) -> None:
        """Nothing more comes; keep the first `length` tokens for forks."""
        ...

    def release(self, key: int) -> None: ...

    def prune(self, key: int, slots: Sequence[int]) -> None: ...

    def rollback(self, key: int, length: int) -> None:
        """Forget the tree and the committed tokens from `length` on. Raises OutOfMemory."""
        ...

    @property
    def block_tokens(self) -> int: ...

    @property
    def block_bytes(self) -> int:
        """Of the keys and values of one page in one layer."""
        ...

    def import_blocks(self, key: int, tokens: int) -> None:
        """Count them as committed, before `fill` brings what was computed for them. Raises InvalidRequest."""
        ...

    def reader(self, key: int, tokens: int) -> Callable[[int, int, int], bytes]:
        """-> (layer, first page, pages) -> keys and values of the first `tokens`, to be called on the device.

        Raises InvalidRequest.
        """
        ...

    def writer(self, key: int, tokens: int) -> Callable[[int, int, bytes], None]:
        """-> (layer, first page, what a reader read), to be called on the device."""
        ...


@dataclass(slots=True, eq=False)
class ServedSpan:
    """A loaded span, what runs on it, and the keys of the sessions it took in. `open`: it takes more.

    `on_gone` is told of every key whose pages are given back: when a session ends, or later if it was kept for others.
    """

    engine: SpanEngineApi
    executor: Executor
    on_gone: Callable[[int], None] = lambda key: None
    open: bool = True
    keys: set[int] = field(default_factory=set)
    empty: asyncio.Event = field(default_factory=asyncio.Event)
    prefixes: PrefixCache = field(init=False)
    _computed: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.empty.set()
        self.prefixes = PrefixCache(self.engine.capacity_tokens, self._computed.__getitem__)

    def admit(self, session: HopSession, prefix: Sequence[bytes], retry_after_s: float) -> int:
        """Take a session in. -> the one whose first tokens it shares, -1 if none; it holds `session.committed` then.

        Raises ContextOverflow, OutOfMemory (it never fits) or NodeBusy (not now).
        """
        key, max_tokens = session.key, session.max_tokens
        parent, held = self.prefixes.find(session.client.peer, session.span, prefix[: max_tokens // HASH_BLOCK_TOKENS])
        while True:
            try:
                if held:
                    self.engine.fork(parent, key, max_tokens, held)
                else:
                    self.engine.admit(key, max_tokens)
                break
            except OutOfMemory as error:
                old = self.prefixes.evict_candidate()
                if max_tokens > self.engine.capacity_tokens:
                    raise
                if old is None:
                    text = f"no room for {max_tokens} tokens now: {error}"
                    raise NodeBusy(text, retry_after_s=retry_after_s) from None
                self._let_go(old)
                if old == parent:
                    parent, held = -1, 0
        session.start_from(held)
        self.prefixes.add(key, session.client.peer, session.span, prefix)
        self._computed[key] = held
        self.keys.add(key)
        self.empty.clear()
        return parent

    def computed(self, key: int, tokens: int) -> None:
        """So many of the session's tokens are behind it now."""
        self._computed[key] = tokens

    def release(self, key: int, prefix: Sequence[bytes] = ()) -> None:
        """The session is over; what `prefix` names of it may be kept for others."""
        kept, going = self.prefixes.retain(key, prefix) if prefix else (0, [])
        for old in going:
            self._let_go(old)
        if kept:
            self.engine.freeze_prefix(key, kept)
        else:
            self._let_go(key)
        self.executor.forget(key)
        self.keys.discard(key)
        if not self.keys:
            self.empty.set()

    def forget_client(self, peer: PeerId) -> None:
        """Keep nothing for a client that is gone."""
        for key in self.prefixes.of(peer):
            self._let_go(key)

    def forget_all(self) -> None:
        """Keep nothing."""
        while (key := self.prefixes.evict_candidate()) is not None:
            self._let_go(key)

    def _let_go(self, key: int) -> None:
        self.engine.release(key)
        self.prefixes.forget(key)
        self._computed.pop(key, None)
        self.on_gone(key)


class ServedSpans:
    """The newest first."""

    def __init__(self, on_gone: Callable[[int], None] = lambda key: None) -> None:
        self._homes: list[ServedSpan] = []
        self._on_gone = on_gone

    def add(self, engine: SpanEngineApi, executor: Executor) -> ServedSpan:
        """Sessions whose layers it holds are taken in here from now on."""
        home = ServedSpan(engine, executor, self._on_gone)
        self._homes.insert(0, home)
        return home

    def remove(self, home: ServedSpan) -> None:
        """Forget a home without sessions, and what it kept of those that have ended."""
        self._homes.remove(home)
        home.forget_all()

    def find(self, start: int, end: int) -> ServedSpan:
        """Where a session on layers `[start, end)` is to live. Raises NodeBusy while none is loaded, NoRoute."""
        if not self._homes:
            raise NodeBusy("this node is still loading its layers")
        held = [home for home in self._homes if home.open]
        for home in held:
            if home.engine.span.start <= start < end <= home.engine.span.end:
                return home
        spans = ", ".join(str(home.engine.span) for home in held) or "none now"
        raise NoRoute(f"this node serves layers {spans}, not {start}:{end}")

    def __iter__(self) -> Iterator[ServedSpan]:
        return iter(self._homes)

    def of(self, key: int) -> ServedSpan | None:
        """Where a session lives; None once it has been released."""
        return next((home for home in self._homes if key in home.keys), None)
