"""How long a client that is new to a swarm waits for its first token, phase by phase.

    PYTHONPATH=tests/chaos:tests/e2e python benchmarks/bench_first_token.py [--rounds 9] [--before FOLDER]

Five real nodes on this machine (SmolLM2-135M, fp32, a thread each, layers 0:10 twice, 10:20 once, 20:30 twice). Each
round starts a client process that knows nobody but one address. `--before`: another checkout of this repository, whose
client takes turns with this one's, round by round, the first of them in turn.

`process`: from the process's start to its first token, imports included; `client`: from `SwarmClient(...)`, when all is
imported. The other columns are when each phase of the latter ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SPANS = ((0, 10), (0, 10), (10, 20), (20, 30), (20, 30))
ROOT = Path(__file__).parent.parent
PACKAGES = (".", "client", "node", "kernels")
TIMEOUT_S = 60.0


# In a client's process ------------------------------------------------------------------------------------------------


class Stamps:
    """When each phase ended, in seconds from the beginning."""

    def __init__(self) -> None:
        self.begun = time.perf_counter()
        self.ended: dict[str, float] = {}

    def wrap(self, owner: Any, name: str, phase: str) -> None:
        """Note the end of the first call of `owner.name`."""
        real = getattr(owner, name)

        def note(result: Any) -> Any:
            self.ended.setdefault(phase, time.perf_counter() - self.begun)
            return result

        if asyncio.iscoroutinefunction(real):

            async def later(*args: Any, **named: Any) -> Any:
                return note(await real(*args, **named))

            setattr(owner, name, later)
        else:
            setattr(owner, name, lambda *args, **named: note(real(*args, **named)))


async def ask(address: str, begun_process: float) -> dict[str, float]:
    """Seconds, by phase."""
    from swarm.net.dht import directory
    from swarm.net.gossip.record_reader import RecordReader
    from swarm.net.transports import multi
    from swarm_client import SwarmClient, client
    from swarm_client.routing.contacts import PeerContacts
    from swarm_client.session.inference_session import InferenceSession

    stamps = Stamps()
    stamps.wrap(client, "open_model", "model")
    stamps.wrap(client, "load_tokenizer", "tokenizer")
    stamps.wrap(multi.MultiTransport, "start", "daemon")
    stamps.wrap(directory.DhtDirectory, "start", "DHT")
    stamps.wrap(SwarmClient, "__aenter__", "entered")
    stamps.wrap(RecordReader, "snapshot", "snapshot")
    stamps.wrap(PeerContacts, "reach", "pings")
    stamps.wrap(InferenceSession, "open", "opened")
    imported = time.time() - begun_process
    stamps.begun = time.perf_counter()
    async with SwarmClient(peers=[address]) as fresh:
        stream = fresh.chat_stream([{"role": "user", "content": "Why is the sky blue?"}], max_new_tokens=2)
        async with stream:
            async for piece in stream:
                if piece.token_ids:
                    break
        took = time.perf_counter() - stamps.begun
    return {**stamps.ended, "client": took, "imports": imported, "process": imported + took}


# The comparison -------------------------------------------------------------------------------------------------------


def client_process(code: Path, address: str) -> dict[str, float]:
    """Raises RuntimeError with its last words."""
    with tempfile.TemporaryDirectory() as home:
        share_models(Path(home))
        environment = {**os.environ, "SWARM_HOME": home, "PYTHONPATH": ":".join(str(code / part) for part in PACKAGES)}
        command = [sys.executable, __file__, "--ask", address, "--begun", str(time.time())]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def share_models(home: Path) -> None:
    from process_chaos import private_home

    private_home(home)


@contextmanager
def table(names: list[str]) -> Iterator[Callable[[str, list[dict[str, float]]], None]]:
    print("| client |" + "".join(f" {name} |" for name in names))
    print("|---|" + "---|" * len(names))

    def row(label: str, rounds: list[dict[str, float]]) -> None:
        medians = [statistics.median(one[name] for one in rounds if name in one) for name in names]
        print(f"| {label} |" + "".join(f" {value:.2f} |" for value in medians))

    yield row


async def compare(codes: dict[str, Path], rounds: int) -> dict[str, list[dict[str, float]]]:
    from process_chaos import private_home
    from process_swarm import ProcessSwarm

    from swarm.types import LayerSpan

    found: dict[str, list[dict[str, float]]] = {label: [] for label in codes}
    with tempfile.TemporaryDirectory() as folder:
        spans = [LayerSpan(*span) for span in SPANS]
        async with ProcessSwarm(private_home(Path(folder)), spans, replicas=1, more_flags=("--no-discovery",)) as swarm:
            await asyncio.sleep(3.0)
            for number in range(rounds + 1):
                order = list(codes) if number % 2 else list(reversed(codes))
                for label in order:
                    one = await asyncio.to_thread(client_process, codes[label], swarm.addresses[0])
                    if number:  # the first round fills the caches of the system
                        found[label].append(one)
                        print(f"{label}: client {one['client']:.2f} s, process {one['process']:.2f} s", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    parser.add_argument("--begun", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ask:
        print(json.dumps(asyncio.run(ask(args.ask, args.begun))))
        return 0
    codes = {"this": ROOT} if args.before is None else {"before": args.before, "this": ROOT}
    found = asyncio.run(compare(codes, args.rounds))
    names = list(found["this"][0])
    with table(names) as row:
        for label, rounds in found.items():
            row(f"{label}, median", rounds)
    if args.before is not None:
        for name in ("client", "process"):
            ratios = [a[name] / b[name] for a, b in zip(found["this"], found["before"], strict=True)]
            worst = f"{max(ratios):.2f} at worst"
            print(f"{name}: {statistics.median(ratios):.2f} of before (median of {len(ratios)} pairs, {worst})")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
