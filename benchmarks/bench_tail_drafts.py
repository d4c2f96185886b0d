"""One EAGLE-3 drafter at the client over taps and at the tail: rounds, time and bytes, in virtual time.

    python benchmarks/bench_tail_drafts.py [--hops 4] [--delay-ms 20] [--level-ms 2]

The real client, nodes and drafter over emulated links, with a tiny model and a head that is right about every second
time on its answer. A batch takes 2 ms of virtual time, a tree at the tail as well; at the client each level of a tree
takes `--level-ms`. Tokens are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path += [str(TESTS), str(TESTS / "e2e"), str(TESTS / "kernels")]

from memory_swarm import cut, memory_swarm  # noqa: E402
from scripted_tails import opened  # noqa: E402
from test_eagle import LAYERS, PROMPT, accurate_head, model  # noqa: E402
from tiny_models import ModelTensors, hf_greedy  # noqa: E402
from virtual_clock import virtual_time  # noqa: E402

from swarm.testing.memory_network import LinkModel  # noqa: E402
from swarm_client.speculation.drafters.base import Candidate  # noqa: E402
from swarm_client.speculation.drafters.inline import InlineDrafter  # noqa: E402
from swarm_client.speculation.drafters.mixture import MixtureDrafter  # noqa: E402
from swarm_client.speculation.drafters.ngram import NgramDrafter  # noqa: E402
from swarm_client.speculation.drafters.tapped import TappedDrafter  # noqa: E402
from swarm_kernels.draft.eagle import open_eagle  # noqa: E402

TOKENS = 48


class SlowInline(InlineDrafter):
    """A request of the head takes time."""

    level_s = 0.0

    async def propose_many(self, paths: Sequence[Sequence[int]], width: int) -> list[list[Candidate]]:
        await asyncio.sleep(self.level_s)
        return await super().propose_many(paths, width)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hops", type=int, default=4)
    parser.add_argument("--delay-ms", type=float, default=20.0)
    parser.add_argument("--level-ms", type=float, default=2.0)
    options = parser.parse_args()
    made = model()
    source, truth = ModelTensors(made), hf_greedy(made, PROMPT, TOKENS)
    folder = accurate_head(made, truth, Path(tempfile.mkdtemp()))
    head = open_eagle(folder, source)
    SlowInline.level_s = options.level_ms / 1e3
    borders = [round(i * LAYERS / options.hops) for i in range(1, options.hops)]
    makers = {
        "n-grams": lambda: InlineDrafter(NgramDrafter()),
        "client": lambda: SlowInline(MixtureDrafter([NgramDrafter(), TappedDrafter(head)])),
        "tail": None,
    }

    found: list[dict[str, Any]] = []

    @virtual_time  # type: ignore[untyped-decorator]  # a part of the tests
    async def run(kind: str, decoding: str) -> None:
        async with (
            memory_swarm(
                source, cut(LAYERS, *borders), LinkModel(delay_s=options.delay_ms / 1e3), drafter=opened(head)
            ) as swarm,
            swarm.client(make_drafter=makers[kind], drafter="ngram" if makers[kind] else "tail") as client,
        ):
            stream = client.stream(PROMPT, max_new_tokens=TOKENS, decoding=decoding)
            first, seen = 0.0, []
            async for piece in stream:
                first = first or asyncio.get_running_loop().time()
                seen += piece.token_ids
            took_s = asyncio.get_running_loop().time() - first
            assert seen == truth, "another text"
            assert stream.chain is not None
            peers = list(stream.chain.peers)
            own = next(a for a, _ in swarm.network.sent if a not in peers)
            sent = swarm.network.sent
            between = sum(n for (a, b), n in sent.items() if a in peers and b in peers)
            to_client = sum(n for (a, b), n in sent.items() if a in peers and b == own)
            stats = stream.result.speculation or {}
        counts = {name: stats[name] for name in ("steps", "rows", "hits")}
        sizes = {"kB between hops": between / 1e3, "kB to the client": to_client / 1e3}
        found.append({**counts, "s": round(took_s, 3), **sizes, "tail": stats.get("tail")})

    print(f"{options.hops} hops, {options.delay_ms:g} ms a link, {TOKENS} tokens")
    for decoding in ("tree", "pipelined-tree", "auto"):
        for kind in makers:
            run(kind, decoding)
            print(f"{decoding:15} {kind:8} {found[-1]}")


if __name__ == "__main__":
    main()
