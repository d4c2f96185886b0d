"""Answers on real processes while their nodes are killed, stopped or slowed: what became of the tokens, and how long
nothing came.

    python tests/chaos/process_chaos.py [--rounds 200] [--minutes 60] [--kind kill|stop|slow] [--json FILE]

Each round asks one of a few questions, strikes a random hop of the chain in use at a random token, compares the tokens
with those of an undisturbed run, and heals the swarm. Used by `make chaos`; `test_chaos_processes` runs a few rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import signal
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from process_swarm import NodeProcess, ProcessSwarm

from swarm.types import LayerSpan
from swarm_client import SwarmClient

SPANS = (LayerSpan(0, 10), LayerSpan(10, 20), LayerSpan(20, 30))
QUESTIONS = ("Why is the sky blue?", "Name five fruits.", "Write a short poem about the sea.")
TOKENS = 40
HEAL_TIMEOUT_S = 240.0
KINDS = ("kill", "stop", "slow")
CALM_S = 30.0  # in which nodes forget that they were slow
ALIKE = 3.0  # times the quickest node's time for a layer


@dataclass(frozen=True)
class Round:
    """`stall_s`: the longest time without a token after the strike. `healthy_ms`: a token before it, on average;
    `after_ms`: one from the fifth token after it on."""

    kind: str
    hop: int
    at: int
    same_tokens: bool
    stall_s: float
    healthy_ms: float
    after_ms: float
    repairs: int


class ChaosRun:
    """Rounds on one swarm."""

    def __init__(self, swarm: ProcessSwarm, client: SwarmClient, seed: int) -> None:
        self._swarm = swarm
        self._client = client
        self._rng = random.Random(seed)
        self._truth: dict[str, tuple[int, ...]] = {}

    async def learn(self) -> None:
        """The undisturbed answers."""
        for question in QUESTIONS:
            answer = await self._client.chat(_messages(question), max_new_tokens=TOKENS)
            while answer.repairs:  # a busy machine may have disturbed it
                answer = await self._client.chat(_messages(question), max_new_tokens=TOKENS)
            self._truth[question] = answer.token_ids

    async def round(self, kind: str) -> Round:
        question = self._rng.choice(QUESTIONS)
        expected = self._truth[question]
        at, hop = self._rng.randrange(6, len(expected) - 10), self._rng.randrange(len(SPANS))
        times: list[float] = []
        struck, struck_at = 0.0, 0.0
        async with contextlib.AsyncExitStack() as wounds:
            stream = self._client.chat_stream(_messages(question), max_new_tokens=TOKENS)
            async with stream:
                async for piece in stream:
                    times += [time.perf_counter()] * len(piece.token_ids)
                    if not struck and len(times) >= at:
                        assert stream.chain is not None
                        victim = self._swarm.node(stream.chain.peers[hop])
                        await wounds.enter_async_context(_strike(victim, kind))
                        struck, struck_at = time.perf_counter(), time.time()
            answer = stream.result
        if kind == "kill":
            await victim.start()
        await self.healed(struck_at)
        after = [b - max(a, struck) for a, b in itertools.pairwise(times) if b > struck]
        return Round(
            kind,
            hop,
            at,
            answer.token_ids == expected,
            round(max(after), 3),
            round(_mean_ms(times[:at]), 1),
            round(_mean_ms(times[at + 4 :]), 1),
            len(answer.repairs),
        )

    async def healed(self, since: float) -> None:
        """Until every node is on the map with news of itself from well after `since`, by the calendar, and for a while
        longer if one says that it is still slow."""
        async with asyncio.timeout(HEAL_TIMEOUT_S):
            while True:
                serving = (await self._client.snapshot()).serving()
                if sum(node.published_at > since + 3.0 for node in serving) == len(self._swarm.nodes):
                    layer_ms = [max(node.layer_ms) for node in serving]
                    if max(layer_ms) <= ALIKE * min(layer_ms) or time.time() > since + CALM_S:
                        return
                await asyncio.sleep(0.5)


@contextlib.asynccontextmanager
async def _strike(victim: NodeProcess, kind: str):  # type: ignore[no-untyped-def]
    """Until the end of the block, that is, of the answer."""
    if kind == "kill":
        await victim.kill()
        yield
    elif kind == "stop":
        victim.signal(signal.SIGSTOP)
        yield
        victim.signal(signal.SIGCONT)
    else:
        throttling = asyncio.create_task(victim.throttle(0.1))
        yield
        throttling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await throttling


def _mean_ms(times: list[float]) -> float:
    """Between one token and the next; several may come at once."""
    return (times[-1] - times[0]) / (len(times) - 1) * 1e3


def _messages(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def report(rounds: list[Round]) -> str:
    lines = []
    for kind in KINDS:
        mine = [r for r in rounds if r.kind == kind]
        if mine:
            stalls = [r.stall_s for r in mine]
            back = sum(r.after_ms < 2 * r.healthy_ms for r in mine)
            lines.append(
                f"{kind}: {sum(r.same_tokens for r in mine)} of {len(mine)} answers identical; longest pause p50 "
                f"{percentile(stalls, 0.5):.2f} s, p95 {percentile(stalls, 0.95):.2f} s, most {max(stalls):.2f} s; "
                f"a token {statistics.median(r.healthy_ms for r in mine):.0f} ms before, "
                f"{statistics.median(r.after_ms for r in mine):.0f} ms from the fifth after it on, under twice that in "
                f"{back} of {len(mine)} rounds"
            )
    return "\n".join(lines)


async def run(home: Path, rounds: int, minutes: float, kinds: tuple[str, ...], seed: int) -> list[Round]:
    done: list[Round] = []
    async with ProcessSwarm(home, SPANS) as swarm, SwarmClient(peers=swarm.addresses) as client:
        chaos = ChaosRun(swarm, client, seed)
        await chaos.healed(time.time())
        await chaos.learn()
        until = time.monotonic() + 60 * minutes
        while len(done) < rounds and time.monotonic() < until:
            done.append(await chaos.round(kinds[len(done) % len(kinds)]))
            print(f"{len(done):4d} {done[-1]}", flush=True)
        for node in swarm.nodes:
            for words in node.failed_starts:
                print(f"node {node.number} had to be started again: {words}")
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--home", type=Path, help="an empty folder that keeps what the nodes log [none]")
    args = parser.parse_args()
    kinds = tuple(args.kind or KINDS[:1])
    with contextlib.ExitStack() as stack:
        home = private_home(args.home or Path(stack.enter_context(tempfile.TemporaryDirectory())))
        rounds = asyncio.run(run(home, args.rounds, args.minutes, kinds, args.seed))
    print(report(rounds))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(r) for r in rounds], indent=1))
    return 0 if all(r.same_tokens for r in rounds) else 1


def private_home(folder: Path) -> Path:
    """A SWARM_HOME of its own that shares what takes long to make: the compiled kernels and the model."""
    from swarm.config import data_dir

    for name in ("kernels", "models"):
        if (data_dir() / name).exists():
            (folder / name).symlink_to(data_dir() / name)
    return folder


if __name__ == "__main__":
    raise SystemExit(main())
