"""The network between two halves of a swarm of real processes is cut, and whole again: what became of the answers.

    python tests/chaos/process_partition.py [--rounds 3] [--cut 30]

Each half is in a network of its own (a Linux network namespace; no root needed where users may have namespaces), joined
by one wire. While it is cut, packets are swallowed without a word and both halves run on. Used by `make chaos`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from process_chaos import QUESTIONS, SPANS, private_home
from process_swarm import Place, ProcessSwarm

from swarm.config import Limits
from swarm.errors import NetworkError, SwarmError
from swarm_client import SwarmClient

TOKENS = 40
STRIKE_AT = 8  # tokens that every answer under way has when the wire is cut
NEAR, FAR = "10.77.0.1", "10.77.0.2"
HALVES = {"our half has every layer": (1, 3, 5), "our half lacks layers": (4, 5)}  # the far nodes
NOWHERE = "02:00:00:00:00:01"
COVERED_WITHIN_S = 30.0
GIVE_UP_S = 120.0
LIMITS = Limits()


class Wire:
    """This process's network and another one, which `place` starts processes in, joined by a pair of devices."""

    def __init__(self) -> None:
        self._far = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self.place = Place(FAR, ("nsenter", "--target", str(self._far.pid), "--net"))
        self.here = Place(NEAR)

    def __enter__(self) -> Wire:
        ours = os.stat("/proc/self/ns/net").st_ino
        while os.stat(f"/proc/{self._far.pid}/ns/net").st_ino == ours:
            time.sleep(0.01)
        _ip("link", "set", "lo", "up")
        _ip("link", "add", "near", "type", "veth", "peer", "name", "far", "netns", str(self._far.pid))
        _ip("addr", "add", f"{NEAR}/24", "dev", "near")
        _ip("link", "set", "near", "up")
        self._far_ip("link", "set", "lo", "up")
        self._far_ip("addr", "add", f"{FAR}/24", "dev", "far")
        self._far_ip("link", "set", "far", "up")
        self._macs = _mac(()), _mac(self.place.enter)
        return self

    def __exit__(self, *error: object) -> None:
        self._far.kill()
        self._far.wait()

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Whatever is sent to the other half in this time goes to a device that does not exist."""
        self._send_to(NOWHERE, NOWHERE)
        yield
        self._send_to(*self._macs)

    def _send_to(self, near: str, far: str) -> None:
        _ip("neigh", "replace", FAR, "lladdr", far, "dev", "near", "nud", "permanent")
        self._far_ip("neigh", "replace", NEAR, "lladdr", near, "dev", "far", "nud", "permanent")

    def _far_ip(self, *words: str) -> None:
        subprocess.run([*self.place.enter, "ip", *words], check=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _mac(enter: Collection[str]) -> str:
    """Of the device that is not the loopback."""
    words = subprocess.run([*enter, "ip", "-o", "link"], check=True, capture_output=True, text=True).stdout.split()
    return words[words.index("link/ether") + 1]


@dataclass
class Outcome:
    """How an answer went; seconds. `waited_s`: from the first notice that there was no chain to the next token, or to
    the end; `pause_s`: the longest time without a token; `ended_s`: when it ended, after the cut."""

    ended: str = ""  # "right", "WRONG" or the error's code
    tokens: int = 0
    far: bool = False  # whether the wire was in its chain before the cut
    pause_s: float = 0.0
    waited_s: float = 0.0
    ended_s: float = 0.0
    reason: str = ""

    def __str__(self) -> str:
        far = "across the wire" if self.far else "on our side"
        waited = f", waited {self.waited_s:.1f} s ({self.reason})" if self.reason else ""
        return f"{self.ended} {self.ended_s:.1f} s after the cut, begun {far}, pause {self.pause_s:.1f} s{waited}"


@dataclass
class Round:
    running: list[Outcome]  # answers that were under way as the wire was cut
    during: list[Outcome]  # one that was asked for in that time
    covered_s: float  # from healing until all nodes are on the map with news of themselves
    after: Outcome

    def __str__(self) -> str:
        lines = [f"  under way: {outcome}" for outcome in self.running]
        lines += [f"  asked in that time: {outcome}" for outcome in self.during]
        news = f"  news of all nodes {self.covered_s:.1f} s after healing; the next answer: {self.after.ended}"
        return "\n".join([*lines, news])

    def sound(self, whole: bool) -> bool:
        """`whole`: our half has every layer."""
        ends = {"right"} if whole else {"right", "no_route"}
        return (
            all(o.ended in ends for o in (*self.running, *self.during))
            and all(o.pause_s <= LIMITS.repair_timeout_s + 1.0 for o in self.running)
            and all(o.waited_s <= LIMITS.route_timeout_s + 1.0 for o in self.during)
            and self.covered_s <= COVERED_WITHIN_S
            and self.after.ended == "right"
        )


class Partitions:
    """Rounds on one swarm."""

    def __init__(self, wire: Wire, swarm: ProcessSwarm, client: SwarmClient) -> None:
        self._wire, self._swarm, self._client = wire, swarm, client
        self._far = {node.peer for node in swarm.nodes if node.place is wire.place}
        self._truth: dict[str, tuple[int, ...]] = {}
        self._cut_at = 0.0  # loop time

    async def learn(self) -> None:
        """The undisturbed answers."""
        for question in QUESTIONS:
            answer = await self._client.chat(_messages(question), max_new_tokens=TOKENS)
            self._truth[question] = answer.token_ids

    async def round(self, cut_s: float) -> Round:
        await self._news_since(time.time())
        running, during, after = [Outcome() for _ in QUESTIONS], Outcome(), Outcome()
        async with asyncio.TaskGroup() as group:
            for number, outcome in enumerate(running):
                group.create_task(self._ask(number, outcome))
            while min(outcome.tokens for outcome in running) < STRIKE_AT:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            self._cut_at = time.monotonic()
            with self._wire.cut():
                await asyncio.sleep(cut_s / 3)
                group.create_task(self._ask(0, during))
                await asyncio.sleep(self._cut_at + cut_s - time.monotonic())
            covered_s = await self._news_since(time.time())
        await self._ask(0, after)
        return Round(running, [during], covered_s, after)

    async def _news_since(self, since: float) -> float:
        """Wait until all nodes are on the map with records from after `since`, by the calendar. -> how long after."""
        async with asyncio.timeout(GIVE_UP_S):
            while True:
                with contextlib.suppress(NetworkError):
                    serving = (await self._client.snapshot()).serving()
                    if sum(node.published_at > since for node in serving) == len(self._swarm.nodes):
                        return time.time() - since
                await asyncio.sleep(0.25)

    async def _ask(self, number: int, seen: Outcome) -> None:
        question = QUESTIONS[number]
        last, waiting_since = time.monotonic(), 0.0
        try:
            stream = self._client.chat_stream(_messages(question), max_new_tokens=TOKENS)
            async with stream:
                async for piece in stream:
                    now = time.monotonic()
                    if piece.waiting:
                        seen.reason, waiting_since = piece.waiting, waiting_since or now
                    if piece.token_ids:
                        assert stream.chain is not None
                        seen.tokens += len(piece.token_ids)
                        seen.far = seen.far or (not self._cut_at and not self._far.isdisjoint(stream.chain.peers))
                        seen.pause_s, last = max(seen.pause_s, now - last), now
                        seen.waited_s, waiting_since = max(seen.waited_s, now - (waiting_since or now)), 0.0
            seen.ended = "right" if stream.result.token_ids == self._truth[question] else "WRONG"
        except SwarmError as error:
            seen.ended, now = error.code, time.monotonic()
            seen.pause_s = max(seen.pause_s, now - last)
            seen.waited_s = max(seen.waited_s, now - (waiting_since or now))
        seen.ended_s = time.monotonic() - self._cut_at if self._cut_at else 0.0


def _messages(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


async def run(home: Path, far: Collection[int], rounds: int, cut_s: float) -> list[Round]:
    with Wire() as wire:
        places = [wire.place if number in far else wire.here for number in range(2 * len(SPANS))]
        async with ProcessSwarm(home, SPANS, places=places.__getitem__) as swarm:
            async with SwarmClient(peers=swarm.addresses) as client:
                partitions, done = Partitions(wire, swarm, client), []
                await partitions.learn()
                for _ in range(rounds):
                    done.append(await partitions.round(cut_s))
                    print(done[-1], flush=True)
                return done


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cut", type=float, default=30.0, help="seconds [30]")
    parser.add_argument("--inside", action="store_true", help="we are in a network namespace of our own")
    args = parser.parse_args()
    if not args.inside:
        alone = ["unshare", "--user", "--map-root-user", "--net", sys.executable, *sys.argv, "--inside"]
        os.execvp(alone[0], alone)
    sound = True
    for name, far in HALVES.items():
        print(f"{name}:", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            done = asyncio.run(run(private_home(Path(folder)), far, args.rounds, args.cut))
        sound &= all(one.sound(whole=len(far) == len(SPANS)) for one in done)
    print("as it must be" if sound else "NOT as it must be")
    return 0 if sound else 1


if __name__ == "__main__":
    raise SystemExit(main())
