"""The hostile process: prepares one attack, says so, and carries it out when told to.

    python tests/siege/attacker.py NAME [--low-weight] < target.json      (started by process_siege.py)

Reads the target (one line of JSON), prints `{"event": "ready"}`, reads how many seconds to attack (one line), attacks,
prints `{"event": "done", "counts": {...}}`, and so on until there are no more lines. With `burn` in place of a name it
only keeps its core busy until it is killed. `--low-weight`: there is no share of a core for it alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from contextlib import AsyncExitStack

import msgspec
import psutil

NICE = 10  # of 1024, a weight of 110: it gets what the nodes leave


def confine() -> None:
    """This process and those it has started to one core, by a low weight: it attacks by what it sends, not by taking
    the processor away. What prepares the attack is not confined."""
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            for thread in process.threads():
                os.setpriority(os.PRIO_PROCESS, thread.id, NICE)
                os.sched_setaffinity(thread.id, {max(os.sched_getaffinity(0))})


async def attack(name: str, low_weight: bool) -> None:
    from attacks import ATTACKS
    from hostile import Siege, Target

    loop = asyncio.get_running_loop()
    target = msgspec.json.decode(await loop.run_in_executor(None, sys.stdin.readline), type=Target)
    siege = Siege(target, AsyncExitStack())
    try:
        run = await ATTACKS[name].prepare(siege)
        _tell(event="ready")
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            seconds = float(line)
            if low_weight and ATTACKS[name].confined:
                confine()
            siege.run_until = time.monotonic() + seconds
            try:
                async with asyncio.timeout(seconds + 2.0):
                    await run()
            except TimeoutError:
                siege.counts["had to be stopped"] += 1
            await siege.close_links()
            _tell(event="done", counts=dict(siege.counts))
    finally:
        await siege.close()


def _tell(**event: object) -> None:
    print(json.dumps(event), flush=True)


def main() -> None:
    name, low_weight = sys.argv[1], "--low-weight" in sys.argv
    if name != "burn":
        return asyncio.run(attack(name, low_weight))
    if low_weight:
        confine()
    while True:
        pass


if __name__ == "__main__":
    main()
