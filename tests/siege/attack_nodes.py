"""Attacks by a node that joins and serves, and lies: about its speed, its computing or its tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from hostile import Siege

Run = Callable[[], Awaitable[None]]
START_TIMEOUT_S = 120.0


async def none(siege: Siege) -> Run:
    """Nobody attacks: how much two windows differ anyway."""

    async def nothing() -> None:
        while siege.running:
            sum(range(20_000))  # a busy core, as the attacker's is in the quiet window
            await asyncio.sleep(0)

    return nothing


async def black_hole(siege: Siege) -> Run:
    """A node for the middle layers with the best advertised speed, which opens sessions and answers no step."""
    return await _lying_node(siege, "swallow", whole=False)


async def slow(siege: Siege) -> Run:
    """A node that advertises a hundredth of its time for a layer, and takes thirty times as long."""
    return await _lying_node(siege, "slow", whole=False)


async def inventing_tail(siege: Siege) -> Run:
    """A node for all layers with the best advertised speed that makes tokens up."""
    return await _lying_node(siege, "invent", whole=True)


async def wrong_hop(siege: Siege) -> Run:
    """A node for the middle layers with the best advertised speed that passes on what it was given, nearly."""
    return await _lying_node(siege, "noise", whole=False)


async def _lying_node(siege: Siege, lie: str, whole: bool) -> Run:
    """`whole`: with all layers, so that it is a chain of its own, else with those of the node in the middle."""
    target = siege.target
    middle = target.chain[len(target.chain) // 2]
    span = f"0:{target.num_layers}" if whole else f"{middle.start}:{middle.end}"
    command = [sys.executable, str(Path(__file__).with_name("hostile_node.py")), "--lie", lie]
    command += ["--layers", span, "--model", target.model, "--dtype", target.dtype]
    command += ["--listen", f"/ip4/{target.own_address}/tcp/0"]
    for node in target.nodes:
        command += ["--peer", node.addresses[0]]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, env=dict(os.environ))
    siege.stack.push_async_callback(process.wait)
    siege.stack.callback(_kill, process)
    assert process.stdout is not None
    go = asyncio.Event()

    async def read() -> None:
        async for line in process.stdout or ():
            event = json.loads(line)
            if event["event"] == "ready-to-serve":
                go.set()

    siege.start(read())
    async with asyncio.timeout(START_TIMEOUT_S):
        await go.wait()

    async def run() -> None:
        process.send_signal(10)  # SIGUSR1: join now
        await siege.over()
        siege.counts["still running"] = int(process.returncode is None)

    return run


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
