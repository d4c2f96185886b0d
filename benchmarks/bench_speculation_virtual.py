"""`bench_speculation.py` in virtual time: every cell of hops and delays in minutes, without a machine's noise.

    python benchmarks/bench_speculation_virtual.py [--hops 2 4 8] [--delays 0 5 20 50] [--drafter bundled|ngram]

SmolLM2's own greedy answers (bf16) are written first. Then the real generation, speculation, tuner and drafters run
over hops that take the times below; `--cores` are shared by all hops, as when one machine runs them all.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable

from prompts import PROMPTS
from virtual_chain import simulate

from swarm.planner.costs.chain_costs import ChainCosts, Stage
from swarm.planner.speculation.forecast import Strategy
from swarm.types import CostCurve
from swarm_client.speculation.drafters.base import Drafter
from swarm_client.speculation.drafters.bundled import find_bundled
from swarm_client.speculation.drafters.mixture import MixtureDrafter
from swarm_client.speculation.drafters.model import ModelDrafter
from swarm_client.speculation.drafters.ngram import NgramDrafter
from swarm_kernels.draft.models import open_draft
from swarm_kernels.models.open import open_model
from swarm_kernels.models.source import ModelSource
from swarm_kernels.tokenizer.tokenizer import load_tokenizer
from swarm_training.distill.greedy import greedy_answers

MODEL = "smollm2-135m"
LAYER = CostCurve((1, 2, 4, 8, 16, 32, 64), (1.47, 1.5, 1.65, 2.0, 3.0, 4.6, 8.0))
"""A layer in fp32 on one thread of an AVX-512 machine, ms."""
HEAD_LAYERS = 9  # layers' time that the head takes on the tail
FRAME_MS = 0.5  # a link's own time
NGRAM_MS = 0.3  # a request to the n-gram drafter
LEVEL_MS, LEVEL_PATH_MS = 2.0, 0.17  # a request to the draft model, and per path
STRATEGIES = {"tree": Strategy.TREE, "pipedec": Strategy.PIPEDEC, "auto": None}


def chain_costs(layers: int, hops: int, delay_ms: float) -> ChainCosts:
    edges = [round(i * layers / hops) for i in range(hops + 1)]
    stages = []
    for a, b in itertools.pairwise(edges):
        share = 1 + (HEAD_LAYERS / (b - a) if b == layers else 0.0)
        curve = CostCurve(LAYER.widths, tuple(share * ms for ms in LAYER.ms))
        stages.append(Stage(b - a, curve.ms_at(1), curve))
    return ChainCosts(tuple(stages), (delay_ms + FRAME_MS,) * (hops + 1))


def drafters(source: ModelSource, name: str) -> tuple[Callable[[], Drafter], Callable[[int], float]]:
    """-> (a new drafter for each answer, ms of a request for so many paths)."""
    path = find_bundled(source) if name == "bundled" else None
    if path is None:
        return NgramDrafter, lambda paths: NGRAM_MS
    draft = open_draft(path, source)
    made = lambda: MixtureDrafter([NgramDrafter(), ModelDrafter(draft, name)])  # noqa: E731
    return made, lambda paths: LEVEL_MS + LEVEL_PATH_MS * paths


def record(source: ModelSource, tokens: int) -> dict[str, tuple[list[int], list[int]]]:
    """The requests' names -> (prompt, answer)."""
    tokenizer = load_tokenizer(source)
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in PROMPTS.values()]
    answers = greedy_answers(source, prompts, tokens)
    return {name: (list(a), b) for name, a, b in zip(PROMPTS, prompts, answers, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hops", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 5.0, 20.0, 50.0])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--drafter", default="bundled", choices=("bundled", "ngram"))
    parser.add_argument("--cores", type=int, default=2)
    args = parser.parse_args()
    source = open_model(MODEL)
    new_drafter, draft_ms = drafters(source, args.drafter)
    recorded = record(source, args.tokens)
    print(
        f"| hops | delay, ms | {' | '.join(PROMPTS)} | mean: auto, tree, pipedec "
        "| auto over the best fixed strategy, minimum |"
    )
    print("|---|---|" + "---|" * (len(PROMPTS) + 2))
    for hops, delay in itertools.product(args.hops, args.delays):
        costs = chain_costs(source.config.num_layers, hops, delay)
        ratios: dict[str, list[float]] = {name: [] for name in STRATEGIES}
        for prompt, answer in recorded.values():
            plain = simulate(costs, prompt, answer, None, cores=args.cores).tokens_per_s
            for name, only in STRATEGIES.items():
                run = simulate(costs, prompt, answer, new_drafter(), only=only, draft_ms=draft_ms, cores=args.cores)
                ratios[name].append(run.tokens_per_s / plain)
        means = ", ".join(f"{statistics.geometric_mean(ratios[name]):.2f}" for name in ("auto", "tree", "pipedec"))
        fixed = [max(1.0, a, b) for a, b in zip(ratios["tree"], ratios["pipedec"], strict=True)]
        least = min(auto / best for auto, best in zip(ratios["auto"], fixed, strict=True))
        cells = " | ".join(f"{ratio:.2f}" for ratio in ratios["auto"])
        print(f"| {hops} | {delay:g} | {cells} | {means} | {least:.2f} |", flush=True)


if __name__ == "__main__":
    main()
