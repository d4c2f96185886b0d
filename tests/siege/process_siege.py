"""One hostile process against a swarm of five real nodes, attack by attack: what became of an honest client's answers.

    python tests/siege/process_siege.py [--attack NAME ...] [--seconds 12] [--json FILE] [--strict]       (make siege)

Every machine has an address (`siege_streets`) and a processor (`siege_machines`) of its own: a fixed share of a core,
the attacker's too. In the quiet window before each attack a program that only burns takes its place, so that the ratio
of tokens/s (`siege_speed`) shows what the protocol gave away. Quiet and attacked windows take turns, but for attacks
whose effects last (on the map). Then nobody attacks for a while, with the burner again: how soon is everything as
before? Nodes have their proof of work before they start.

Where cgroups cannot be written the attacker has one core at a low weight instead, and all nodes share the cores: what
one has to do slows the others. It is said in the output.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from attacks import ATTACKS, Attack
from hostile import Target, Victim
from process_chaos import private_home
from process_swarm import ProcessSwarm, _die_with_parent
from siege_honest import HonestClient, Look, fresh_client, watch_map
from siege_machines import Machines, machines
from siege_report import BOUNDS, NODES, report
from siege_speed import Window
from siege_streets import enter_own_network
from siege_watch import NodeWatch, alive

from swarm.errors import SwarmError
from swarm.net.security.identity import Identity
from swarm.net.security.proof_of_work import OwnProof, ProofPolicy
from swarm.types import LayerSpan
from swarm_client import SwarmClient

SPANS = (LayerSpan(0, 10), LayerSpan(0, 10), LayerSpan(10, 20), LayerSpan(20, 30), LayerSpan(20, 30))
ROUNDS = 2  # quiet and attacked windows that take turns
SETTLE_S = 1.0  # before a quiet window
RECOVERY_S = 15.0  # at most, after it
RECOVERED = 0.85  # of the quiet window's tokens/s, two seconds long: windows differ that much without any attack
FRESH_WITHIN_S = 15.0
PREPARE_TIMEOUT_S = 180.0
HEAL_S = 40.0  # then the swarm is started anew


@dataclass
class Siege:
    """What one attack did. `None` where it was not measured."""

    attack: str
    quiet_tokens_s: float = 0.0
    tokens_s: float = 0.0
    ratio_low: float = 0.0  # between which the ratio may well be (`siege_speed.ratio_range`)
    ratio_high: float = 0.0
    quiet_times_s: tuple[float, float] = (0.0, 0.0)  # until the first token, and for each that follows
    times_s: tuple[float, float] = (0.0, 0.0)
    answers: int = 0
    failed: int = 0
    wrong: int = 0
    repairs: int = 0
    memory_mib: float = 0.0
    descriptors: int = 0
    back_after_s: float | None = None
    least_seen: int | None = None  # honest nodes, of five, by a reader while attacked
    fresh_client_s: float | None = None
    nodes_alive: bool = True
    errors: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return self.tokens_s / self.quiet_tokens_s if self.quiet_tokens_s else 0.0


class Grounds:
    """The swarm, the honest client and the readers that one attack after the other is tried on."""

    def __init__(
        self, home: Path, swarm: ProcessSwarm, honest: HonestClient, reader: SwarmClient, where: Machines
    ) -> None:
        self._home = home
        self.swarm = swarm
        self.honest = honest
        self._reader = reader
        self._machines = where
        self._watch = NodeWatch(swarm.nodes)

    async def besiege(self, name: str, attack: Attack, seconds: float, quiet_s: float) -> Siege:
        """`quiet_s`: how long the quiet windows are, all together, as `seconds` of the attacked ones."""
        result = Siege(name)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.honest.ask_on()), group.create_task(self._watch.run())]
            try:
                await self._besiege(name, attack, (quiet_s, seconds), result, tasks, group)
            finally:
                for task in tasks:
                    task.cancel()
        return result

    async def _besiege(
        self,
        name: str,
        attack: Attack,
        times_s: tuple[float, float],
        result: Siege,
        tasks: list[asyncio.Task[Any]],
        group: asyncio.TaskGroup,
    ) -> None:
        rounds = 1 if attack.on_map else ROUNDS
        quiet_s, seconds = (of_all / rounds for of_all in times_s)
        looks: list[Look] = []
        quiet: list[Window] = []
        attacked: list[Window] = []
        async with self._attacker(name) as attacker:
            for _ in range(rounds):
                async with self._burner():
                    await asyncio.sleep(SETTLE_S)
                    quiet.append(await _window(quiet_s))
                if attack.on_map:
                    peers = {node.peer for node in self.swarm.nodes}
                    for client in (self.honest.client, self._reader):
                        tasks.append(group.create_task(watch_map(client, peers, looks)))
                attacker.write(f"{seconds}\n")
                if attack.on_map:
                    fresh = group.create_task(self._fresh_client(seconds * 0.6))
                attacked.append(await _window(seconds))
                if attack.on_map:
                    result.fresh_client_s = await fresh
                done = await attacker.event("done")
                result.counts = done.get("counts", {}) if done else {"the attacker broke": 1}
        ended = time.monotonic()
        least = RECOVERED * self.honest.speed(quiet)
        async with self._burner():
            while time.monotonic() - ended < RECOVERY_S and result.back_after_s is None:
                await asyncio.sleep(0.5)
                result.back_after_s = self.honest.recovered_after(ended, least)
        self._judge(result, quiet, attacked, looks)

    async def _fresh_client(self, after_s: float) -> float:
        await asyncio.sleep(after_s)
        return await fresh_client(self.swarm.addresses[:1], FRESH_WITHIN_S)

    def _judge(self, result: Siege, quiet: list[Window], attacked: list[Window], looks: Sequence[Look]) -> None:
        begin, end = attacked[0][0], time.monotonic()
        result.quiet_tokens_s, result.tokens_s = self.honest.speed(quiet), self.honest.speed(attacked)
        result.quiet_times_s, result.times_s = self.honest.token_times_s(quiet), self.honest.token_times_s(attacked)
        result.ratio_low, result.ratio_high = self.honest.ratio_range(quiet, attacked)
        answers = [answer for answer in self.honest.answers if answer.ended >= begin]
        result.answers = len(answers)
        result.failed = sum(bool(answer.error) for answer in answers)
        result.errors = sorted({answer.error for answer in answers if answer.error})[:5]
        result.wrong = sum(not answer.right for answer in answers)
        result.repairs = sum(answer.repairs for answer in answers)
        result.memory_mib, result.descriptors = self._watch.growth(begin, end)
        if looks:
            least = min(looks, key=lambda look: look.honest)
            result.least_seen = least.honest
            result.errors += [f"a reader: {least.why}"] if least.honest < NODES else []
        result.nodes_alive = alive(self.swarm.nodes)

    async def target(self) -> Target:
        snapshot = await self.honest.client.snapshot()
        serving = [node for node in snapshot.serving() if node.peer in {n.peer for n in self.swarm.nodes}]
        config = self.honest.client._source.config  # type: ignore[union-attr]
        nodes = tuple(Victim(n.peer, n.addresses, n.span.start, n.span.end) for n in serving if n.span is not None)
        first = serving[0]
        return Target(
            snapshot.model,
            first.weight_hash,
            first.dtype,
            snapshot.num_layers,
            config.hidden_size,
            config.vocab_size,
            nodes,
            self._machines.attacker.address,
        )

    async def healed(self) -> bool:
        """Whether all nodes are on the map again and answers come."""
        peers = {node.peer for node in self.swarm.nodes}
        if not alive(self.swarm.nodes):
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEAL_S):
                while True:
                    with contextlib.suppress(SwarmError):
                        serving = {node.peer for node in (await self.honest.client.snapshot()).serving()}
                        if serving == peers:
                            await self.honest.client.chat(_HELLO, max_new_tokens=4, decoding="sequential")
                            return True
                    await asyncio.sleep(0.5)
        return False

    @contextlib.asynccontextmanager
    async def _attacker(self, name: str) -> AsyncIterator[AttackerProcess]:
        """Prepared, and waiting for how long it is to attack."""
        target = await self.target()
        self._machines.limit_attacker(False)
        with (self._home / f"attacker-{name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *self._command(name),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "SWARM_HOME": str(self._home)},
                preexec_fn=_die_with_parent,
                process_group=0,
            )
        attacker = AttackerProcess(process)
        try:
            attacker.write(msgspec.json.encode(target).decode() + "\n")
            async with asyncio.timeout(PREPARE_TIMEOUT_S):
                if await attacker.event("ready") is None:
                    raise RuntimeError(f"the attacker broke while it prepared; see {self._home}/attacker-{name}.log")
            self._machines.limit_attacker(True)
            yield attacker
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    @contextlib.asynccontextmanager
    async def _burner(self) -> AsyncIterator[None]:
        """A program in the attacker's place that only takes its share of the processor."""
        process = await asyncio.create_subprocess_exec(*self._command("burn"), preexec_fn=_die_with_parent)
        try:
            yield
        finally:
            process.kill()
            await process.wait()

    def _command(self, name: str) -> list[str]:
        program = [sys.executable, str(Path(__file__).with_name("attacker.py")), name]
        weight = [] if self._machines.own_processors else ["--low-weight"]
        return [*self._machines.attacker.enter, *program, *weight]


async def _window(seconds: float) -> Window:
    begin = time.monotonic()
    await asyncio.sleep(seconds)
    return begin, time.monotonic()


_HELLO = [{"role": "user", "content": "Hello"}]


class AttackerProcess:
    """Lines to and from it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())

    async def event(self, name: str) -> dict[str, Any] | None:
        """None if it ends before."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == name:
                return event
        return None


async def prove(home: Path) -> None:
    """Make the nodes' identities and proofs of work, which otherwise take a core during the first attacks."""
    for number in range(len(SPANS)):
        path = home / f"node{number}.key"
        proof = OwnProof(Identity.load_or_create(path).peer, path, ProofPolicy(start_after_s=0.0))
        proof.load()
        if not proof.current:
            making = asyncio.create_task(proof.run())
            await proof.found.wait()
            making.cancel()


@contextlib.asynccontextmanager
async def grounds(home: Path, where: Machines) -> AsyncIterator[Grounds]:
    flags = ("--no-discovery",)
    await prove(home)
    async with (
        ProcessSwarm(home, SPANS, replicas=1, places=where.node, more_flags=flags) as swarm,
        SwarmClient(peers=swarm.addresses) as client,
        SwarmClient(peers=swarm.addresses[-1:]) as reader,
    ):
        found = Grounds(home, swarm, HonestClient(client), reader, where)
        if not await found.healed():
            raise RuntimeError("the swarm did not start well")
        await found.honest.learn()
        yield found


def _details(result: Siege) -> str:
    (first, following), (slow_first, slow_following) = result.quiet_times_s, result.times_s
    times = f"first token {first:.2f} s, attacked {slow_first:.2f}; others {following:.3f} s, {slow_following:.3f}"
    return f"{times}; {result.counts} {result.errors or ''}"


async def run(home: Path, names: Sequence[str], seconds: float, quiet_s: float) -> list[Siege]:
    results: list[Siege] = []
    waiting = list(names)
    with machines(len(SPANS)) as where:
        if not where.own_processors:
            print("no cgroups can be written: the nodes share the processor, and slow each other", flush=True)
        while waiting:
            async with grounds(home, where) as on:
                while waiting:
                    name = waiting.pop(0)
                    try:
                        results.append(await on.besiege(name, ATTACKS[name], seconds, quiet_s))
                    except* (RuntimeError, TimeoutError) as errors:
                        print(f"{name}: not carried out: {errors.exceptions[0]}", flush=True)
                    else:
                        print(report(results[-1:], head=len(results) == 1), flush=True)
                        print(f"   {_details(results[-1])}", flush=True)
                    if waiting and not await on.healed():
                        print(f"   (the swarm did not come back within {HEAL_S:.0f} s: it is started anew)", flush=True)
                        break
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--attack", choices=ATTACKS, action="append", help="may be repeated [all]")
    parser.add_argument("--seconds", type=float, default=12.0, help="that each attack lasts [12]")
    parser.add_argument("--quiet", type=float, default=12.0, help="seconds of the quiet window before each [12]")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a bound is missed")
    parser.add_argument("--list", action="store_true", help="only say which attacks there are")
    parser.add_argument("--home", type=Path, help="an empty folder that keeps what nodes and attackers log [none]")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{name:20s} {attack.summary}" for name, attack in ATTACKS.items()))
        return 0
    with contextlib.ExitStack() as stack:
        home = private_home(args.home or Path(stack.enter_context(tempfile.TemporaryDirectory())))
        results = asyncio.run(run(home, args.attack or list(ATTACKS), args.seconds, args.quiet))
    print("\n" + report(results, head=True))
    if args.json is not None:
        args.json.write_text(json.dumps([{**asdict(r), "ratio": round(r.ratio, 3)} for r in results], indent=1))
    return int(args.strict and any(BOUNDS.missed(result) for result in results))


if __name__ == "__main__":
    if "--list" not in sys.argv:
        enter_own_network()
    raise SystemExit(main())
