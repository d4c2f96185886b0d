"""A node whose frames take `--delay-ms` longer each way and leave at most at `--rate` MB/s: a volunteer far away.

    python benchmarks/emulated_node.py --layers 0:10 --delay-ms 20 [--peer ADDRESS] [--rate 12.5] [--dtype fp32]

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
from typing import Any

from swarm.config import DEFAULT_MODEL, NodeConfig
from swarm.errors import SwarmError
from swarm.testing.emulated_link import EmulatedTransport, LinkShape
from swarm.types import UNMEASURED, CostCurve
from swarm_hop.serving.executor import Compute, ScheduledStep, StepOutput
from swarm_hop.serving.span_engine import SpanEngine
from swarm_node.membership import hardware, profiler
from swarm_node.membership.profiler import Calibration
from swarm_node.network.connection import NodeNetwork, over_daemon
from swarm_node.node import join
from swarm_node.owner.event_log import JsonEventReporter


async def serve(config: NodeConfig, shape: LinkShape) -> None:
    @asynccontextmanager
    async def connect(node: NodeConfig) -> AsyncIterator[NodeNetwork]:
        async with over_daemon(node) as network:
            yield replace(network, transport=EmulatedTransport(network.transport, shape))

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await join(config, JsonEventReporter(time.time()), stop, connect)


def slow_down(times: float) -> None:
    """Emulate a machine that is slower by `times`, in its calibration and in its batches.

    It sleeps after its own computing, so that many slow machines fit into this one.
    """
    calibrate, prepare = profiler.calibrate, SpanEngine.prepare
    curve = UNMEASURED

    def measured(*args: Any) -> Calibration:
        nonlocal curve
        own = calibrate(*args)
        curve = CostCurve(own.cost.widths, tuple(times * ms for ms in own.cost.ms))
        return replace(own, cost=curve)

    def slower(self: SpanEngine, steps: Sequence[ScheduledStep]) -> Compute:
        compute, takes_s = prepare(self, steps), curve.ms_at(sum(w.rows for w in steps)) * len(steps[0].span) / 1e3

        def run() -> Sequence[StepOutput | SwarmError]:
            end = time.perf_counter() + takes_s
            result = compute()
            time.sleep(max(0.0, end - time.perf_counter()))
            return result

        return run

    hardware.calibrate = measured  # type: ignore[assignment, attr-defined]
    SpanEngine.prepare = slower  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", required=True)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--rate", type=float, default=math.inf, help="MB/s")
    parser.add_argument("--slower", type=float, default=1.0, help="a machine that takes so many times as long")
    args = parser.parse_args()
    config = NodeConfig(
        model=args.model,
        peers=tuple(args.peer),
        listen=("/ip4/127.0.0.1/tcp/0",),
        layers=args.layers,
        dtype=args.dtype,
        threads=1,
        join_timeout_s=60.0,
    )
    if args.slower > 1.0:
        slow_down(args.slower)
    asyncio.run(serve(config, LinkShape(send_delay_s=args.delay_ms / 1e3, send_rate=args.rate * 1e6)))


if __name__ == "__main__":
    main()
