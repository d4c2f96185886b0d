"""PipeDec's own setting in virtual time: 7, 14 and 21 stages of LLaMA3.1 70B, a 1B draft, and this engine.

    PYTHONPATH=tests/e2e python benchmarks/bench_pipedec.py [--rates .84 .9 .94] [--tokens 400]

The paper (§4.1-4.3) gives the stages (14 GPUs of about 20 GB of weights, 21 of about 13 GB), a level's 32 nodes, and
its speed over plain pipelining (4.46-7.79) and over static trees (2.2-2.69) with 14 stages; it gives no times and no
accuracy of a level. So a stage takes what reading its weights takes (RTX 3090: 936 GB/s), links within a server almost
nothing, the draft runs on a GPU of its own, and its accuracy is a parameter: `--rates` is the probability that its
candidates hold the right token, ranked first in `--first` of these. It is uncertain at a fraction of the positions only
(`--torn`) and reports which; PipeDec's dynamic tree can use that, a static one cannot.
"""

from __future__ import annotations

import argparse
import itertools
import random

from bench_accuracy import PROMPT, VOCABULARY, Profile
from virtual_chain import simulate

from swarm.planner.costs.chain_costs import ChainCosts, Stage
from swarm.planner.generation.state_machine import SpeculationPolicy
from swarm.planner.speculation.forecast import Strategy
from swarm.types import CostCurve

WEIGHTS_GB = 140.0
BANDWIDTH_GB_S = 936.0
LINK_MS = 0.5
DRAFT_MS = 8.0  # a level of the 1B draft, fp16, read and launched on an L40
LAYERS = 80
GROWTH = CostCurve((1, 8, 32, 64), (1.0, 1.01, 1.05, 1.12))  # decoding is bound by the weights up to there
WIDTH = 32  # PipeDec's


def costs_of(stages: int) -> ChainCosts:
    layer_ms = WEIGHTS_GB / LAYERS / BANDWIDTH_GB_S * 1e3
    curve = CostCurve(GROWTH.widths, tuple(ms * layer_ms for ms in GROWTH.ms))
    edges = [round(i * LAYERS / stages) for i in range(stages + 1)]
    hops = tuple(Stage(b - a, curve.ms_at(1), curve) for a, b in itertools.pairwise(edges))
    return ChainCosts(hops, (LINK_MS,) * (stages + 1))


def compare(stages: int, rate: float, profile: Profile, tokens: int) -> str:
    costs = costs_of(stages)
    rng = random.Random(stages)
    prompt, answer = ([rng.randrange(VOCABULARY) for _ in range(n)] for n in (PROMPT, tokens))

    def speed(strategy: Strategy | None, fixed: SpeculationPolicy | None = None) -> float:
        oracle = profile.oracle(answer, rate, VOCABULARY, strategy or Strategy.PIPELINED_TREE)
        run = simulate(costs, prompt, answer, oracle, only=strategy, fixed=fixed, draft_ms=lambda _: DRAFT_MS)
        return run.tokens_per_s

    plain = simulate(costs, prompt, answer, None).tokens_per_s
    static = speed(Strategy.TREE)
    # The draft's level and the first stage's work overlap, so one level more than there are stages is in flight.
    pipedec = speed(
        Strategy.PIPEDEC, SpeculationPolicy(max_tree_rows=WIDTH, max_depth_per_step=1, max_steps_in_flight=stages + 1)
    )
    auto = speed(None)
    ratios = f"{static / plain:.2f} | {pipedec / plain:.2f} | {pipedec / static:.2f} | {auto / plain:.2f}"
    return f"| {stages} | {rate:g} | {ratios} | {auto / static:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[7, 14, 21])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.84, 0.9, 0.94])
    parser.add_argument("--first", type=float, default=0.8)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--torn", type=float, default=0.4)
    parser.add_argument("--tokens", type=int, default=400)
    args = parser.parse_args()
    profile = Profile(args.first, args.ranks, args.torn)
    print(
        "| stages | accuracy of a level | static tree over plain | PipeDec's policy over plain | over static tree"
        " | auto over plain | over static tree |\n|---|---|---|---|---|---|---|",
        flush=True,
    )
    for stages in args.stages:
        for rate in args.rates:
            print(compare(stages, rate, profile, args.tokens), flush=True)


if __name__ == "__main__":
    main()
