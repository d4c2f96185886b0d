"""Churn in virtual time: real servers and clients on the in-memory transport, nodes that crash, vanish, slow down and
come back by a seed, and the invariants that must hold.

    PYTHONPATH=tests:tests/e2e:tests/kernels python tests/chaos/virtual_chaos.py
        [--seeds 100] [--first 0] [--nodes 100] [--seconds 300] [--once]

Invariants: an answer that ends has the tokens of an undisturbed run; one that fails names the missing layers (or lack
of room), within its deadline; afterwards no live node holds a session, a KV block or a logged row. The same seed gives
the same trace, byte for byte: each is run twice, unless `--once`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

from memory_swarm import MemorySwarm, memory_swarm
from tiny_models import ModelTensors, hf_greedy, tiny_model
from virtual_clock import run

from swarm.config import Limits
from swarm.errors import SwarmError
from swarm.testing.memory_network import LinkModel
from swarm.types import LayerSpan, PeerId
from swarm_client import SwarmClient

LAYERS = 6
TOKENS = 16
PROMPTS = 6
LIMITS = Limits(
    route_timeout_s=3.0, repair_timeout_s=8.0, open_timeout_s=6.0, dial_timeout_s=3.0, publish_interval_s=3.0
)
MARGIN_S = 25.0  # repairs that follow each other, each within its deadline


@cache
def model() -> Any:
    return tiny_model("llama")


@cache
def question(number: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """-> (prompt, the tokens of an undisturbed run)."""
    rng = random.Random(number)
    prompt = [rng.randrange(2, 131) for _ in range(rng.randrange(4, 40))]
    return tuple(prompt), tuple(hf_greedy(model(), prompt, TOKENS))


@dataclass
class Churn:
    """One run. `trace`: what happened, one line an event; `answers`: how they ended."""

    swarm: MemorySwarm
    rng: random.Random
    spans: Sequence[LayerSpan]
    trace: list[str] = field(default_factory=list)
    answers: dict[str, int] = field(default_factory=dict)
    repairs: int = 0
    dead: set[int] = field(default_factory=set)
    seeds: dict[PeerId, int] = field(default_factory=dict)

    def note(self, what: str) -> None:
        self.trace.append(f"{asyncio.get_running_loop().time():.6f} {what}")

    async def begin(self) -> None:
        for seed in range(len(self.spans)):
            await self._bear(seed)

    async def _bear(self, seed: int) -> None:
        self.seeds[await self.swarm.add_node(self.spans[seed], seed=seed)] = seed

    async def strike(self) -> None:
        """One thing that happens to the swarm: every other time, if it can, to somebody who is at work."""
        alive = [peer for peer, seed in self.seeds.items() if seed not in self.dead]
        busy = [peer for peer in alive if self.swarm.nodes[peer].service.sessions]
        peer = self.rng.choice(busy if busy and self.rng.random() < 0.5 else alive)
        seed, fate = self.seeds[peer], self.rng.random()
        if fate < 0.4 and self.dead:
            back = self.rng.choice(sorted(self.dead))
            self.dead.discard(back)
            self.note(f"node {back} is back")
            await self._bear(back)
        elif fate < 0.9 and len(alive) > len(self.spans) // 2:
            silent = self.rng.random() < 0.3
            self.note(f"node {seed} {'vanishes' if silent else 'dies'}")
            self.dead.add(seed)
            self.swarm.kill(peer, silent)
        else:
            device = self.swarm.nodes[peer].device
            device.delay_s = self.rng.choice([0.002, 0.02])
            self.note(f"node {seed} takes {device.delay_s} s a batch")

    async def ask(self, client: SwarmClient, name: int, until: float, pause_s: float) -> None:
        """One question after the other. Raises AssertionError when an answer is not what it must be."""
        loop, rng = asyncio.get_running_loop(), random.Random(self.rng.random())
        while loop.time() < until:
            number = rng.randrange(PROMPTS)
            prompt, expected = question(number)
            begun = loop.time()
            try:
                answer = await client.generate(prompt, max_new_tokens=TOKENS)
                outcome = "right" if answer.token_ids == expected else "WRONG"
                detail = f"{len(answer.repairs)} repairs"
                self.repairs += len(answer.repairs)
            except SwarmError as error:
                outcome, detail = error.code, str(error)
            self.note(f"client {name}: question {number} {outcome} ({detail})")
            self.answers[outcome] = self.answers.get(outcome, 0) + 1
            assert outcome != "WRONG", self.trace[-1]
            assert loop.time() - begun < LIMITS.repair_timeout_s + MARGIN_S, self.trace[-1]
            await asyncio.sleep(rng.expovariate(1.0 / pause_s))


async def churn(seed: int, nodes: int, seconds: float, clients: int, every_s: float, pause_s: float) -> Churn:
    """`nodes` nodes, `clients` that rest for `pause_s` between their questions, a strike every `every_s`, both on
    average. Checks the invariants."""
    rng = random.Random(seed)
    cuts = [(0, 2), (2, 4), (4, 6), (0, 3), (3, 6), (1, 4)]
    spans = [LayerSpan(*cuts[i % len(cuts)]) for i in range(nodes)]
    async with memory_swarm(ModelTensors(model()), (), LinkModel(delay_s=0.005), seed=seed, limits=LIMITS) as swarm:
        run = Churn(swarm, rng, spans)
        await run.begin()
        async with AsyncExitStack() as stack:
            until = asyncio.get_running_loop().time() + seconds
            opened = [await stack.enter_async_context(swarm.client(name)) for name in range(clients)]
            async with asyncio.TaskGroup() as asking:
                for name, client in enumerate(opened):
                    asking.create_task(run.ask(client, name, until, pause_s))
                while asyncio.get_running_loop().time() < until:
                    await asyncio.sleep(rng.expovariate(1.0 / every_s))
                    await run.strike()
            await asyncio.sleep(LIMITS.dial_timeout_s + 20.0)  # the connections to those that vanished are given up
            alive = [node for peer, node in swarm.nodes.items() if run.seeds[peer] not in run.dead]
            assert [leak for node in alive if (leak := node.leaks())] == []
        return run


def one(seed: int, nodes: int, seconds: float, clients: int = 4, every_s: float = 1.0, pause_s: float = 1.0) -> Churn:
    """A run of its own in virtual time; what is random in it comes from the seed."""
    ids = random.Random(seed)
    with mock.patch("os.urandom", lambda count: ids.randbytes(count)):
        result: Churn = run(churn(seed, nodes, seconds, clients, every_s, pause_s))
    return result


def digest(result: Churn) -> str:
    return hashlib.sha256("\n".join(result.trace).encode()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--pause", type=float, default=5.0, help="seconds that a client rests between questions [5]")
    parser.add_argument("--once", action="store_true", help="do not run each seed again to compare the traces")
    args = parser.parse_args()
    total: dict[str, int] = {}
    repairs = events = 0
    for seed in range(args.first, args.first + args.seeds):
        begun = time.process_time()
        options = {"clients": args.clients, "pause_s": args.pause}
        result = one(seed, args.nodes, args.seconds, **options)
        name = digest(result)
        assert args.once or digest(one(seed, args.nodes, args.seconds, **options)) == name, f"seed {seed} differs"
        for outcome, count in result.answers.items():
            total[outcome] = total.get(outcome, 0) + count
        repairs, events = repairs + result.repairs, events + len(result.trace)
        again = "" if args.once else ", the same again"
        took_s = time.process_time() - begun
        print(
            f"seed {seed}: {len(result.trace)} events, {result.repairs} repairs, answers {result.answers}, "
            f"trace {name[:12]}{again} ({took_s:.0f} s)",
            flush=True,
        )
    print(f"in all {events} events, {repairs} repairs, answers {total}; no invariant broken")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
