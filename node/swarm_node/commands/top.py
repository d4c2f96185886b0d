"""`swarm-node top`: a swarm on the terminal, read anew every second. What it looks like is in `top_screen`.

Owns the loop and the keys. Sees what a client would see, and serves nothing.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.live import Live

from swarm.config import DEFAULT_MODEL, Libp2pImpl
from swarm.errors import NetworkError
from swarm.net.gossip.record_reader import RecordReader
from swarm.overview import SwarmOverview
from swarm_node.commands.status import known_here, name_of_model
from swarm_node.commands.top_screen import TopScreen
from swarm_node.network.swarm_reader import swarm_reader
from swarm_node.owner import control_socket
from swarm_node.owner.node_metrics import NodeMetrics

PERIOD_S = 1.0
PIPE_WIDTH = 140  # columns, where there is no terminal
_KEY = re.compile(rb"\x1b\[\d*[A-Za-z~]|.", re.DOTALL)

_KEYS = {b"\x1b[A": -1, b"k": -1, b"\x1b[B": 1, b"j": 1, b"\x1b[5~": -10, b"\x1b[6~": 10}  # -> lines to scroll


async def show(
    peers: tuple[str, ...],
    model: str | None,
    stop: asyncio.Event,
    once: bool = False,
    as_json: bool = False,
    secret: str = "",
    libp2p_impl: Libp2pImpl = "go",
) -> None:
    """Show the swarm of `model` that `peers` belong to until `stop` is set or q is pressed.

    Without peers: the swarm of the nodes on this machine. Raises UsageError, PeerUnreachable, NetworkError.
    """
    here = await _here(None)
    if not peers:
        peers, model = known_here(here, model)
    name = await asyncio.to_thread(name_of_model, model or DEFAULT_MODEL)
    async with swarm_reader(name, peers, secret, libp2p_impl) as reader:
        overview = await read(reader)
        if as_json:
            sys.stdout.write(msgspec.json.encode(overview).decode() + "\n")
            return
        screen = TopScreen()
        screen.look(overview, [node for node in here if node.model == name], time.monotonic())
        if once or not sys.stdout.isatty():
            console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
            console.print(screen)
        else:
            await watch(reader, screen, stop)


async def read(reader: RecordReader) -> SwarmOverview:
    """Raises NetworkError."""
    return SwarmOverview.of(await reader.snapshot(), time.time())


async def watch(reader: RecordReader, screen: TopScreen, stop: asyncio.Event) -> None:
    """Look every second and redraw, until `stop` is set."""
    console = Console(highlight=False)
    live = Live(screen, console=console, screen=True, auto_refresh=False)

    def redraw() -> None:
        screen.rows = console.size.height
        live.refresh()

    def on_key(key: bytes) -> None:
        if key in (b"q", b"Q", b"\x03"):
            stop.set()
        elif key == b"s":
            screen.next_sort()
        else:
            screen.scroll(_KEYS.get(key, 0))
        redraw()

    with _keys(on_key), live:  # keys first: what is typed at the first screen counts
        while not stop.is_set():
            redraw()
            await _pause(stop)
            try:
                overview, here = await read(reader), await _here(reader.book.model)
            except NetworkError as error:  # it is tried again in a second; the last look stays
                screen.problem = f"cannot read the swarm now: {error}"
                continue
            screen.look(overview, here, time.monotonic())


async def _here(model: str | None) -> list[NodeMetrics]:
    """The nodes of this user on this machine; None: of any model."""
    return [node.metrics for node in await control_socket.find() if model is None or node.metrics.model == model]


async def _pause(stop: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(PERIOD_S):
            await stop.wait()
    except TimeoutError:
        return


@contextmanager
def _keys(on_key: Callable[[bytes], None]) -> Iterator[None]:
    """Call `on_key` with each key pressed, an arrow's escape sequence as one; nothing where there are no keys."""
    try:
        import termios
        import tty
    except ImportError:  # Windows: Ctrl-C ends it
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    loop = asyncio.get_running_loop()
    tty.setcbreak(terminal, termios.TCSANOW)  # the default throws away what was typed

    def read_keys() -> None:
        typed = os.read(terminal, 64)
        if not typed:  # the terminal is gone
            loop.remove_reader(terminal)
        for key in _KEY.findall(typed):
            on_key(key)

    try:
        loop.add_reader(terminal, read_keys)
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
