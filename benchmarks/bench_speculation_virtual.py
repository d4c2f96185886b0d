"""`bench_speculation.py` in virtual time: every cell of hops and delays in minutes, without a machine's noise.

    python benchmarks/bench_speculation_virtual.py [--hops 2 4 8] [--delays 0 5 20 50] [--drafters bundled ngram FILE]

SmolLM2's own greedy answers (bf16) are written first. Then the real generation, speculation, tuner and drafters run
over hops that take the times below; `--cores` are shared by all hops, as when one machine runs them all. Hidden states
are those of the same answers, and come with the results; their bytes take no time.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from fresh_prompts import FRESH_PROMPTS
from prompts import PROMPTS
from virtual_chain import simulate

from swarm.planner.costs.chain_costs import ChainCosts, Stage
from swarm.planner.speculation.forecast import Strategy
from swarm.types import CostCurve
from swarm_client.speculation.drafters.base import Drafter
from swarm_client.speculation.drafters.bundled import find_bundled
from swarm_client.speculation.drafters.mixture import MixtureDrafter
from swarm_client.speculation.drafters.ngram import NgramDrafter
from swarm_client.speculation.drafters.stored import StoredDrafter
from swarm_kernels.models.open import open_model
from swarm_kernels.models.source import ModelSource
from swarm_kernels.tokenizer.tokenizer import load_tokenizer
from swarm_training.distill.greedy import greedy_answers
from swarm_training.evaluation.evaluate import Recorded, open_recorded

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


def drafters(
    source: ModelSource, name: str, recorded: Sequence[Recorded]
) -> tuple[Callable[[], Drafter], Callable[[int], float]]:
    """-> (a new drafter for each answer, ms of a request for so many paths)."""
    path = find_bundled(source) if name == "bundled" else Path(name)
    if path is None or name == "ngram":
        return NgramDrafter, lambda paths: NGRAM_MS
    make, store = open_recorded(path, source)([(record.prompt, record.answer) for record in recorded])
    stored = make if store is None else lambda: StoredDrafter(make(), store)
    return lambda: MixtureDrafter([NgramDrafter(), stored()]), lambda paths: LEVEL_MS + LEVEL_PATH_MS * paths


def record(source: ModelSource, tokens: int, fresh: bool) -> list[tuple[str, Recorded]]:
    """(kind of request, prompt and answer)"""
    tokenizer = load_tokenizer(source)
    asked = [(kind, prompt) for kind, prompts in FRESH_PROMPTS.items() for prompt in prompts]
    named = asked if fresh else list(PROMPTS.items())
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for _, text in named]
    answers = greedy_answers(source, prompts, tokens, tokenizer.eos_token_ids)
    return [(kind, Recorded(p, a)) for (kind, _), p, a in zip(named, prompts, answers, strict=True)]


def spread(ratios: Sequence[float]) -> str:
    return f"{statistics.geometric_mean(ratios):.2f} / {statistics.median(ratios):.2f} / {min(ratios):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hops", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 5.0, 20.0, 50.0])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--drafters", nargs="+", default=["bundled"], help="bundled, ngram, or files and folders")
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--fresh", action="store_true", help="the prompts of fresh_prompts.py")
    parser.add_argument("--cores", type=int, default=2)
    args = parser.parse_args()
    source = open_model(MODEL)
    recorded = record(source, args.tokens, args.fresh)
    kinds = list(dict.fromkeys(kind for kind, _ in recorded))
    print("Over plain decoding, geometric mean / median / worst (tokens a step):\n")
    print(f"| hops | delay, ms | drafter | strategy | all | {' | '.join(kinds)} |\n" + "|---" * (len(kinds) + 5) + "|")
    for name in args.drafters:
        new_drafter, draft_ms = drafters(source, name, [record for _, record in recorded])
        for hops, delay, strategy in itertools.product(args.hops, args.delays, args.strategies):
            costs = chain_costs(source.config.num_layers, hops, delay)
            ratios: dict[str, list[float]] = {kind: [] for kind in kinds}
            steps: dict[str, list[float]] = {kind: [] for kind in kinds}
            for kind, one in recorded:
                text = list(one.prompt), list(one.answer)
                plain = simulate(costs, *text, None, cores=args.cores).tokens_per_s
                only = STRATEGIES[strategy]
                run = simulate(costs, *text, new_drafter(), only=only, draft_ms=draft_ms, cores=args.cores)
                ratios[kind].append(run.tokens_per_s / plain)
                steps[kind].append(len(one.answer) / max(1, run.generation.stats.steps))
            every = [list(itertools.chain(*ratios.values())), *(ratios[kind] for kind in kinds)]
            means = [statistics.fmean(itertools.chain(*steps.values())), *(statistics.fmean(steps[k]) for k in kinds)]
            cells = [f"{spread(part)} ({mean:.2f})" for part, mean in zip(every, means, strict=True)]
            print(f"| {hops} | {delay:g} | {Path(name).name} | {strategy} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
