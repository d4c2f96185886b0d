"""A node that joins and lies: it publishes the best speed there is, and `--lie` says what it does with the work.

    python tests/siege/hostile_node.py --lie swallow|slow|invent|noise --layers 10:20 --peer ADDRESS ...

It loads its layers at once, and is on the map from SIGUSR1 on. Prints `{"event": "ready-to-serve"}` before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from swarm import records
from swarm.config import NodeConfig
from swarm.errors import SwarmError
from swarm.net.base.transport import Directory
from swarm.types import PeerId
from swarm_hop.serving.executor import ScheduledStep, StepOutput
from swarm_hop.serving.session_server import SessionServer
from swarm_hop.serving.span_engine import SpanEngine
from swarm_node.network.connection import NodeNetwork, over_daemon
from swarm_node.node import join
from swarm_node.owner.event_log import JsonEventReporter

SLOW_S = 0.3  # more, for each batch
rng = random.Random(18)


class LyingDirectory:
    """Publishes nothing until `go`, and then that this node is the quickest."""

    def __init__(self, directory: Directory, sign: records.Sign, go: asyncio.Event) -> None:
        self._directory = directory
        self._sign = sign
        self._go = go

    async def publish(self, record: bytes, model: str, expires_at: float) -> None:
        if self._go.is_set():
            await self._directory.publish(boasting(record, self._sign), model, expires_at)

    async def read(self, model: str) -> dict[PeerId, bytes]:
        return await self._directory.read(model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._directory, name)


def boasting(record: bytes, sign: records.Sign) -> bytes:
    """The same record with the best speed, and no load."""
    honest = records._decode_record(records._decode_signed(record).payload)
    links = dict.fromkeys(honest.links, 0.01)
    changes = {"layer_us": (1,), "cost_w": (1, 64), "cost_us": (1, 2), "links": links, "sessions": 0}
    return records._pack(msgspec.structs.replace(honest, **changes), sign)


def swallow() -> None:
    """Sessions are opened, pings answered; steps vanish."""
    SessionServer._on_step = lambda *args: None  # type: ignore[method-assign]


def slow() -> None:
    _change_outputs(lambda scheduled, output: output, SLOW_S)


def invent() -> None:
    """Whatever the tokens are, others are sent."""
    _change_outputs(
        lambda scheduled, output: replace(output, tokens=tuple(rng.randrange(40_000) for _ in output.tokens))
    )


def noise() -> None:
    """Every hidden state off by about a tenth."""

    def off(scheduled: ScheduledStep, output: StepOutput) -> StepOutput:
        kind = np.float32 if scheduled.session.rows.element_bytes == 4 else np.uint16
        rows = np.frombuffer(bytes(output.body), kind).copy()
        if kind is np.float32:
            rows *= 1.0 + 0.3 * np.random.default_rng(18).standard_normal(rows.shape, np.float32)
        return replace(output, body=rows.tobytes())

    _change_outputs(off)


def _change_outputs(change: Callable[[ScheduledStep, StepOutput], StepOutput], delay_s: float = 0.0) -> None:
    honest = SpanEngine.outputs

    def changed(
        self: SpanEngine, steps: Sequence[ScheduledStep], hidden: Any, plan: Any
    ) -> Sequence[StepOutput | SwarmError]:
        time.sleep(delay_s)
        return [
            change(scheduled, output) if isinstance(output, StepOutput) else output
            for scheduled, output in zip(steps, honest(self, steps, hidden, plan), strict=True)
        ]

    SpanEngine.outputs = changed  # type: ignore[method-assign]


LIES = {"swallow": swallow, "slow": slow, "invent": invent, "noise": noise}


class Reporter(JsonEventReporter):
    """Its own events, and when it could serve."""

    def event(self, name: str, sentence: str, **fields: Any) -> None:
        if name == "serving":
            print(json.dumps({"event": "ready-to-serve"}), flush=True)


async def serve(config: NodeConfig) -> None:
    go, stop = asyncio.Event(), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, go.set)

    @asynccontextmanager
    async def connect(node: NodeConfig) -> AsyncIterator[NodeNetwork]:
        async with over_daemon(node) as network:
            yield replace(network, directory=LyingDirectory(network.directory, network.sign, go))

    await join(config, Reporter(time.time()), stop, connect)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lie", choices=LIES, required=True)
    parser.add_argument("--layers", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--listen", default="/ip4/127.0.0.1/tcp/0")
    parser.add_argument("--peer", action="append", default=[])
    args = parser.parse_args()
    LIES[args.lie]()
    config = NodeConfig(
        model=args.model,
        peers=tuple(args.peer),
        listen=(args.listen,),
        layers=args.layers,
        dtype=args.dtype,
        threads=1,
        join_timeout_s=60.0,
    )
    asyncio.run(serve(config))


if __name__ == "__main__":
    main()
