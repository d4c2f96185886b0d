"""An event loop whose time jumps to the next timer whenever all tasks wait.

    @virtual_time
    async def test_something(): ...        # an hour of `asyncio.sleep` takes no time, and always goes the same way

The decorated test is an ordinary function to pytest, so fixtures work, but async fixtures belong to another loop.
An error that no task expected, and a wait that nothing can end, fail the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import selectors
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

EPOCH = 1_700_000_000.0  # what `wall_clock` shows at loop time 0
REAL_GRACE_S = 1.0  # for threads, before a stall counts as a deadlock
MAX_VIRTUAL_S = 86_400.0  # a test still waiting after a day (pings go on for ever) waits for nothing


class _JumpingSelector:
    """Polls the real selector; where that would sleep, moves the loop's clock instead."""

    def __init__(self, loop: VirtualClockLoop, inner: selectors.BaseSelector) -> None:
        self._loop = loop
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = self._inner.select(0)
        if events or (timeout is not None and timeout <= 0):
            return events
        if self._loop.real_work:
            return self._inner.select(0.05)
        if timeout is not None:
            self._loop.advance(timeout)
            return []
        events = self._inner.select(REAL_GRACE_S)
        if not events:
            raise RuntimeError("every task waits and no timer is set: the test would never end")
        return events


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """`loop.time()` starts at 0 and moves only when nothing else can."""

    def __init__(self) -> None:
        self._now = 0.0
        self.real_work = 0
        self.errors: list[BaseException] = []
        super().__init__()
        self._selector = _JumpingSelector(self, self._selector)
        self.set_exception_handler(self._note)

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds
        if self._now > MAX_VIRTUAL_S:
            raise RuntimeError("a day of virtual time has passed: the test would never end")

    @contextlib.contextmanager
    def outside_work(self) -> Iterator[None]:
        """Hold the clock while a thread works."""
        self.real_work += 1
        try:
            yield
        finally:
            self.real_work -= 1

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        self.real_work += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._executor_done)
        return future

    def _executor_done(self, _: asyncio.Future[Any]) -> None:
        self.real_work -= 1

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.errors.append(error if isinstance(error, BaseException) else RuntimeError(context["message"]))


def wall_clock() -> float:
    """Seconds since the epoch, in virtual time: a clock to pass to code that takes one."""
    return EPOCH + asyncio.get_running_loop().time()


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run `main` in virtual time. Raises what it raises, or else what its forgotten tasks raised."""
    loops: list[VirtualClockLoop] = []

    def factory() -> VirtualClockLoop:
        loops.append(VirtualClockLoop())
        return loops[-1]

    with asyncio.Runner(loop_factory=factory) as runner:
        result = runner.run(main)
    if loops and loops[0].errors:
        raise loops[0].errors[0]
    return result


def virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def in_virtual_time(*args: Any, **kwargs: Any) -> None:
        run(test(*args, **kwargs))

    return in_virtual_time
