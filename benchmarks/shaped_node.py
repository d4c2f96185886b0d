"""A node whose frames take `--delay-ms` longer each way and leave at most at `--rate` MB/s: a volunteer far away.

    python benchmarks/shaped_node.py --layers 0:10 --delay-ms 20 [--peer ADDRESS] [--rate 12.5] [--dtype fp32]

Prints the events of `swarm-node join --json`. The DHT itself is not delayed.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from swarm.config import DEFAULT_MODEL, NodeConfig
from swarm.errors import SwarmError
from swarm.net.shaped import Shape, ShapedCarrier
from swarm_node.daemon import join
from swarm_node.engine import SpanEngine
from swarm_node.executor import Compute, Output, Work
from swarm_node.network import Network, over_daemon
from swarm_node.report import JsonReporter


async def serve(config: NodeConfig, shape: Shape) -> None:
    @asynccontextmanager
    async def connect(node: NodeConfig) -> AsyncIterator[Network]:
        async with over_daemon(node) as network:
            yield replace(network, carrier=ShapedCarrier(network.carrier, shape))

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await join(config, JsonReporter(time.time()), stop, connect)


def slow_down(row_s: float) -> None:
    """Every batch takes `row_s` longer a row. Asleep, so that many slow machines fit into this one."""
    prepare = SpanEngine.prepare

    def slower(self: SpanEngine, works: Sequence[Work]) -> Compute:
        compute, rows = prepare(self, works), sum(work.rows for work in works)

        def run() -> Sequence[Output | SwarmError]:
            time.sleep(rows * row_s)
            return compute()

        return run

    SpanEngine.prepare = slower  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", required=True)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--rate", type=float, default=math.inf, help="MB/s")
    parser.add_argument("--row-ms", type=float, default=0.0, help="a slower machine: so much longer for each row")
    args = parser.parse_args()
    config = NodeConfig(
        model=args.model,
        peers=tuple(args.peer),
        listen=("/ip4/127.0.0.1/tcp/0",),
        layers=args.layers,
        dtype=args.dtype,
        threads=1,
        wait_s=60.0,
    )
    if args.row_ms:
        slow_down(args.row_ms / 1e3)
    asyncio.run(serve(config, Shape(send_delay_s=args.delay_ms / 1e3, send_rate=args.rate * 1e6)))


if __name__ == "__main__":
    main()
