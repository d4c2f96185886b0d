"""The blocking API over SwarmClient: the same calls for programs without an event loop.

Owns one background thread that runs the loop; everything else is the async client's.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, TypeVar, Unpack

from swarm.config import ClientConfig
from swarm.errors import UsageError
from swarm.types import Grammar, Snapshot
from swarm_client.api.options import ChatMessage, GenerationKeywords
from swarm_client.api.results import GenerationResult, GenerationStream, TextChunk
from swarm_client.auditing.result import AuditResult
from swarm_client.client import SwarmClient

EXIT_TIMEOUT_S = 5.0  # an interpreter that ends waits no longer than this for the client to disconnect

_T = TypeVar("_T")


class SyncTextStream:
    """Iterate it for chunks; leaving the loop early and then the `with` block ends the generation on all hops."""

    def __init__(self, owner: SyncSwarmClient, stream: GenerationStream) -> None:
        self._owner = owner
        self._stream = stream

    def __iter__(self) -> Iterator[TextChunk]:
        chunks = aiter(self._stream)
        while True:
            chunk = self._owner.run(_next(chunks))
            if chunk is None:
                return
            yield chunk

    def __enter__(self) -> SyncTextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def cancel(self) -> None:
        self._owner.run(self._stream.cancel())

    @property
    def result(self) -> GenerationResult:
        return self._stream.result


class SyncSwarmClient:
    """`with SyncSwarmClient(peers=[...]) as client: client.chat([...])`. Arguments and errors as SwarmClient's.

    Without `with`, the first call connects; `close()` disconnects, or else the end of the program does. Every call
    after that raises UsageError. May be shared between threads.
    """

    def __init__(
        self,
        model: str | None = None,
        peers: Sequence[str] | None = None,
        *,
        config: ClientConfig | None = None,
        **internals: Any,
    ) -> None:
        self._client = SwarmClient(model, peers, config=config, **internals)
        self._lock = threading.Lock()  # of the fields below
        self._thread: _LoopThread | None = None  # None until the first call
        self._finalizer: weakref.finalize[Any, SyncSwarmClient] | None = None
        self._closed = False

    def __enter__(self) -> SyncSwarmClient:
        """Connect. Raises ModelError, UsageError, PeerUnreachable."""
        self._connected()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect; calls in progress in other threads raise UsageError. Idempotent."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            assert self._finalizer is not None
            self._finalizer.detach()
            thread.close()

    def stream(self, prompt: str | Sequence[int], **options: Unpack[GenerationKeywords]) -> SyncTextStream:
        self._connected()
        return SyncTextStream(self, self._client.stream(prompt, **options))

    def fork_streams(
        self, prompt: str | Sequence[int], n: int, **options: Unpack[GenerationKeywords]
    ) -> tuple[SyncTextStream, ...]:
        self._connected()
        return tuple(SyncTextStream(self, stream) for stream in self._client.fork_streams(prompt, n, **options))

    def chat_prompt(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        self._connected()
        return self._client.chat_prompt(messages, tools=tools, template_options=template_options)

    def chat_stream(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[GenerationKeywords],
    ) -> SyncTextStream:
        self._connected()
        stream = self._client.chat_stream(messages, tools=tools, template_options=template_options, **options)
        return SyncTextStream(self, stream)

    def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerationKeywords]) -> GenerationResult:
        return self.run(self._client.generate(prompt, **options))

    def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[GenerationKeywords],
    ) -> GenerationResult:
        work = self._client.chat(messages, tools=tools, template_options=template_options, **options)
        return self.run(work)

    def snapshot(self) -> Snapshot:
        return self.run(self._client.snapshot())

    def audit_findings(self) -> list[AuditResult]:
        """See `SwarmClient.audit_findings`."""

        async def findings() -> list[AuditResult]:
            return self._client.audit_findings()

        return self.run(findings())

    def check_grammar(self, grammar: Grammar) -> None:
        self.run(self._client.check_grammar(grammar))

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run one coroutine on the client's loop and wait; Ctrl-C cancels it there too."""
        try:
            future = self._connected().submit(work)
        except BaseException:
            work.close()
            raise
        try:
            return future.result()
        except CancelledError:
            raise UsageError("the client was closed during this call") from None
        except BaseException:
            future.cancel()
            raise

    def _connected(self) -> _LoopThread:
        """Raises UsageError after `close`, and what SwarmClient raises when it connects."""
        with self._lock:
            if self._closed:
                raise UsageError("this SyncSwarmClient is closed; make a new one")
            if self._thread is None:
                thread = _LoopThread(self._client)
                thread.open()
                self._finalizer = weakref.finalize(self, thread.abandon)  # runs at the interpreter's exit too
                self._thread = thread
            return self._thread


class _LoopThread:
    """A thread with an event loop in which one SwarmClient is open. Has no reference to the SyncSwarmClient, so that
    a forgotten one can be collected.
    """

    def __init__(self, client: SwarmClient) -> None:
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()  # open, or failed to open
        self._calls: set[Future[Any]] = set()
        self._lock = threading.Lock()  # of `_calls` and `_closing`
        self._closing = False
        self._serving = self._loop.create_task(self._serve(client))
        self._serving.add_done_callback(lambda _: self._ready.set())
        self._thread = threading.Thread(target=self._run, name="swarm-client", daemon=True)

    def open(self) -> None:
        """Raises what entering the client raises."""
        self._thread.start()
        try:
            self._ready.wait()
        except BaseException:  # Ctrl-C
            self._loop.call_soon_threadsafe(self._serving.cancel)
            self._thread.join()
            raise
        if self._serving.done():
            self._thread.join()
            self._serving.result()

    def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Raises UsageError while it closes."""
        with self._lock:
            if self._closing:
                raise UsageError("this SyncSwarmClient is closed; make a new one")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return future

    def close(self) -> None:
        """Raises what leaving the client raises."""
        self._request_stop()
        self._thread.join()
        self._serving.result()

    def abandon(self) -> None:
        """For a client that nobody closed: raises nothing, and waits a bounded time."""
        self._request_stop()
        if threading.current_thread() is not self._thread:
            self._thread.join(EXIT_TIMEOUT_S)

    def _request_stop(self) -> None:
        with self._lock:
            self._closing = True
            calls = list(self._calls)
        for call in calls:
            call.cancel()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._stop.set)

    async def _serve(self, client: SwarmClient) -> None:
        async with client:
            self._ready.set()
            await self._stop.wait()

    def _run(self) -> None:
        self._loop.run_until_complete(asyncio.wait({self._serving}))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


async def _next(chunks: Any) -> TextChunk | None:
    return await anext(chunks, None)
