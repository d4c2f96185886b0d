"""The engine apart from any drafter's quality: drafts of set accuracy on a recorded answer, beside the forecast.

    PYTHONPATH=tests/e2e python benchmarks/bench_accuracy.py [--hops 2 4 8] [--rates .5 .7 .8 .9 .95] [--delay 20]
                                                             [--torn 1] [--real [--slower 8]]

In virtual time: the real engine over a chain whose hops take the times of `--layer-ms`, each on a machine of its own.
With `--real`: SmolLM2 on processes over emulated links, its own greedy answer recorded first; the forecast is then
made from the client's measured costs of the chain. Nodes are `--slower` times slower than this machine, asleep, so that
many of them fit into it: the forecast does not model cores shared by hops. `--rates` is the probability that a level's
candidates hold the right token, ranked first in `--first` of these; with `--torn` below 1 the drafter is uncertain at
that part of the positions only, and reports which, which a static tree cannot use.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import uvloop
from emulated_swarm import ShapedSwarm, equal_spans, far_client
from prompts import PROMPTS
from scripted_drafters import Oracle
from virtual_chain import simulate

from swarm.planner.costs.chain_costs import ChainCosts, Stage
from swarm.planner.speculation.controller import DEFAULT_POLICY, MAX_DEPTH
from swarm.planner.speculation.forecast import (
    DrafterProfile,
    Forecast,
    Strategy,
    pipedec,
    pipelined_tree,
    sequential,
    tree,
)
from swarm.types import CostCurve
from swarm_client.speculation.drafters.inline import InlineDrafter
from swarm_kernels.models.open import open_model

MODEL = "smollm2-135m"
LAYERS = 30
CURVE = CostCurve((1, 2, 4, 8, 16, 32, 64), (1.0, 1.04, 1.12, 1.27, 1.62, 2.4, 4.0))
VOCABULARY = 1000
PROMPT = 64  # tokens


@dataclass(frozen=True)
class Row:
    hops: int
    rate: float
    strategy: str
    tokens_per_s: float
    predicted: float
    plain: float

    def __str__(self) -> str:
        error = self.predicted / self.tokens_per_s - 1
        ratio = self.tokens_per_s / self.plain
        speeds = f"{self.tokens_per_s:.1f} | {self.predicted:.1f} | {error:+.0%} | {ratio:.2f}"
        return f"| {self.hops} | {self.rate:g} | {self.strategy} | {speeds} |"


@dataclass(frozen=True)
class Profile:
    """A drafter's accuracy: `first` of its right candidates rank first, the others in the `ranks` - 1 ranks behind.

    `torn`: the fraction of positions where it is uncertain.
    """

    first: float
    ranks: int
    torn: float

    def oracle(self, answer: Sequence[int], rate: float, vocab: int, strategy: Strategy) -> Oracle:
        """A static tree has one shape for all positions, so its drafter does not report its uncertainty."""
        frank = strategy is not Strategy.TREE
        return Oracle(
            answer,
            rate,
            self.first,
            vocab=vocab,
            ranks=self.ranks,
            torn=max(self.torn, 1 - rate * self.first),
            frank=frank,
        )


def predict(costs: ChainCosts, oracle: Oracle, strategy: Strategy, level_ms: float = 0.0) -> Forecast:
    """What `planner.speculation.forecast` predicts for a drafter of this accuracy."""
    drafter = DrafterProfile((oracle.row,) * MAX_DEPTH, level_ms, uncertain_fraction=oracle.torn)
    widths = DEFAULT_POLICY.widths
    forecasts: dict[Strategy, Callable[[], Forecast | None]] = {
        Strategy.SEQUENTIAL: lambda: sequential(costs),
        Strategy.TREE: lambda: tree(costs, drafter, widths),
        Strategy.PIPEDEC: lambda: pipedec(costs, drafter, widths),
        Strategy.PIPELINED_TREE: lambda: pipelined_tree(costs, drafter, widths),
    }
    made = forecasts[strategy]()
    assert made is not None  # an oracle always has candidates
    return made


def virtual(hops: int, rate: float, profile: Profile, delay_ms: float, layer_ms: float, tokens: int) -> list[Row]:
    edges = [round(i * LAYERS / hops) for i in range(hops + 1)]
    curve = CostCurve(CURVE.widths, tuple(ms * layer_ms for ms in CURVE.ms))
    stages = tuple(Stage(b - a, curve.ms_at(1), curve) for a, b in itertools.pairwise(edges))
    costs = ChainCosts(stages, (delay_ms,) * (hops + 1))
    rng = random.Random(hops)
    prompt, answer = ([rng.randrange(VOCABULARY) for _ in range(n)] for n in (PROMPT, tokens))
    plain = simulate(costs, prompt, answer, None).tokens_per_s
    rows = []
    for strategy in (Strategy.TREE, Strategy.PIPEDEC, Strategy.PIPELINED_TREE):
        oracle = profile.oracle(answer, rate, VOCABULARY, strategy)
        run = simulate(costs, prompt, answer, oracle, only=strategy)
        rows.append(Row(hops, rate, strategy, run.tokens_per_s, predict(costs, oracle, strategy).tokens_per_s, plain))
    return rows


async def real(
    hops: int, rates: Sequence[float], profile: Profile, delay_ms: float, slower: float, tokens: int
) -> list[Row]:
    config = open_model(MODEL).config
    oracles: list[Oracle] = []
    rows: list[Row] = []
    with ShapedSwarm(equal_spans(config.num_layers, hops), delay_ms, slower=slower) as swarm:
        async with far_client(swarm.address, delay_ms, make_drafter=lambda: InlineDrafter(oracles[-1])) as client:
            prompt = client.tokenizer.apply_chat_template([{"role": "user", "content": PROMPTS["free prose"]}])
            await client.generate(prompt, decoding="sequential", max_new_tokens=4)  # connections, caches
            plain = await client.generate(prompt, decoding="sequential", max_new_tokens=tokens)
            for rate in rates:
                for strategy in (Strategy.TREE, Strategy.PIPEDEC, Strategy.PIPELINED_TREE):
                    oracles.append(profile.oracle(plain.token_ids, rate, config.vocab_size, strategy))
                    stream = client.stream(prompt, decoding=strategy, max_new_tokens=tokens)
                    answer = await stream.read()
                    costs = stream.measured_costs
                    if answer.token_ids != plain.token_ids or costs is None:
                        raise RuntimeError(f"{strategy} changed the answer")
                    predicted = predict(costs, oracles[-1], strategy).tokens_per_s
                    speed = answer.tokens_per_second
                    rows.append(Row(hops, rate, strategy, speed, predicted, plain.tokens_per_second))
                    print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hops", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 0.6, 0.7, 0.8, 0.9, 0.95])
    parser.add_argument("--first", type=float, default=0.8, help="fraction of the right candidates that rank first")
    parser.add_argument("--ranks", type=int, default=3, help="ranks that the right token may have")
    parser.add_argument("--torn", type=float, default=1.0, help="fraction of positions where the drafter is uncertain")
    parser.add_argument("--delay", type=float, default=20.0, help="one way, ms")
    parser.add_argument("--layer-ms", type=float, default=0.5, help="a layer's time for one row, in virtual time")
    parser.add_argument("--tokens", type=int, default=2000, help="at .95 one token in 20 is rejected [2000]")
    parser.add_argument("--real", action="store_true", help="real processes in place of virtual time")
    parser.add_argument(
        "--slower", type=float, default=8.0, help="real nodes are slower than this machine by this factor"
    )
    args = parser.parse_args()
    profile = Profile(args.first, args.ranks, args.torn)
    print("| hops | accuracy of a level | strategy | tokens/s | predicted | error | over sequential |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for hops in args.hops:
        if args.real:
            uvloop.run(real(hops, args.rates, profile, args.delay, args.slower, args.tokens))
            continue
        for rate in args.rates:
            for row in virtual(hops, rate, profile, args.delay, args.layer_ms, args.tokens):
                print(row, flush=True)


if __name__ == "__main__":
    main()
