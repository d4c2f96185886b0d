"""The spans this node has loaded: one, and during a move the old beside the new.

Owns which of them takes a session and keeps it to its end. Knows neither frames nor why a node moves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from swarm.errors import NodeBusy, NoRoute, OutOfMemory
from swarm.types import LayerSpan
from swarm_node.executor import Engine, Executor
from swarm_node.sessions import Rows


class ServedEngine(Engine, Protocol):
    """An engine together with what it serves and the pages of its sessions."""

    @property
    def span(self) -> LayerSpan: ...

    @property
    def rows(self) -> Rows: ...

    @property
    def capacity_tokens(self) -> int:
        """The largest reservation that an engine without sessions can take."""
        ...

    def admit(self, key: int, max_tokens: int) -> None:
        """Reserve pages. Raises OutOfMemory or ContextOverflow."""
        ...

    def release(self, key: int) -> None: ...

    def prune(self, key: int, slots: Sequence[int]) -> None: ...

    def rollback(self, key: int, length: int) -> None:
        """Forget the tree and the committed tokens from `length` on. Raises OutOfMemory."""
        ...


@dataclass(slots=True, eq=False)
class Home:
    """A loaded span, what runs on it, and the keys of the sessions it took in. `open`: it takes more."""

    engine: ServedEngine
    executor: Executor
    open: bool = True
    keys: set[int] = field(default_factory=set)
    empty: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.empty.set()

    def admit(self, key: int, max_tokens: int, retry_after_s: float) -> None:
        """Take a session in. Raises ContextOverflow, OutOfMemory (it never fits) or NodeBusy (not now)."""
        try:
            self.engine.admit(key, max_tokens)
        except OutOfMemory as error:
            if max_tokens > self.engine.capacity_tokens:
                raise
            raise NodeBusy(f"no room for {max_tokens} tokens now: {error}", retry_after_s=retry_after_s) from None
        self.keys.add(key)
        self.empty.clear()

    def release(self, key: int) -> None:
        self.engine.release(key)
        self.keys.discard(key)
        if not self.keys:
            self.empty.set()


class Homes:
    """The newest first."""

    def __init__(self) -> None:
        self._homes: list[Home] = []

    def add(self, engine: ServedEngine, executor: Executor) -> Home:
        """Sessions whose layers it holds are taken in here from now on."""
        home = Home(engine, executor)
        self._homes.insert(0, home)
        return home

    def remove(self, home: Home) -> None:
        self._homes.remove(home)

    def find(self, start: int, end: int) -> Home:
        """Where a session on layers `[start, end)` is to live. Raises NodeBusy while none is loaded, NoRoute."""
        if not self._homes:
            raise NodeBusy("this node is still loading its layers")
        held = [home for home in self._homes if home.open]
        for home in held:
            if home.engine.span.start <= start < end <= home.engine.span.end:
                return home
        spans = ", ".join(str(home.engine.span) for home in held) or "none now"
        raise NoRoute(f"this node serves layers {spans}, not {start}:{end}")

    def of(self, key: int) -> Home | None:
        """Where a session lives; None once it has been released."""
        return next((home for home in self._homes if key in home.keys), None)
