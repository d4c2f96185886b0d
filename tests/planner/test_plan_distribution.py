"""Speculative sampling has the model's own distribution (Pearson's chi-square, fixed seeds)."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from functools import cache

import pytest
import torch
from toy_chain import ToyChain

from swarm.planner.generation.state_machine import (
    Action,
    ChainReady,
    DiscardInFlight,
    DraftsProposed,
    Event,
    GenerationRequest,
    GenerationState,
    RequestDrafts,
    SendStep,
    SpeculationPolicy,
)
from swarm.types import Sampling
from swarm_kernels.sampling.sampler import sample

pytestmark = pytest.mark.slow

VOCAB = 5
PROMPT = (3, 1)
TOKENS = 4  # nothing is drafted before the first
ANSWERS = 600

Words = tuple[int, ...]

POLICIES = {
    "sequential": SpeculationPolicy(),
    "tree": SpeculationPolicy(max_tree_rows=8, max_depth_per_step=3),
    "pipedec": SpeculationPolicy(max_tree_rows=3, max_depth_per_step=1, max_steps_in_flight=4),
    "pipelined-tree": SpeculationPolicy(
        max_tree_rows=6,
        max_depth_per_step=2,
        max_steps_in_flight=3,
        min_node_prob=0.05,
        min_path_prob=0.1,
        min_mass_blocking=0.3,
        min_mass_idle=0.1,
    ),
}


@cache
def logits(text: Words) -> torch.Tensor:
    """A model of five words that looks at the last two."""
    rng = random.Random(f"{text[-2:]}")
    return torch.tensor([rng.gauss(0, 1.2) for _ in range(VOCAB)])


def exact() -> dict[Words, float]:
    """P of every answer."""
    chances: dict[Words, float] = {(): 1.0}
    for _ in range(TOKENS):
        chances = {
            (*words, token): chance * p
            for words, chance in chances.items()
            for token, p in enumerate(logits((*PROMPT, *words)).double().softmax(-1).tolist())
        }
    return chances


def propose(text: Words, width: int) -> list[tuple[int, float]]:
    """The model's probabilities with noise: sometimes right, sometimes wrong."""
    rng = random.Random(f"{text}")
    odds = [(token, value + rng.gauss(0, 1)) for token, value in enumerate(logits(text).log_softmax(-1).tolist())]
    return [(token, min(0.0, value)) for token, value in sorted(odds, key=lambda o: -o[1])[: min(width, 3)]]


def draw(policy: SpeculationPolicy, seed: int) -> tuple[Words, int]:
    """-> (an answer, how many of its tokens had been drafted)"""
    sampling = Sampling(temperature=1.0, seed=seed)
    chain = ToyChain.of(3, random.Random(seed), lambda text: sample(logits(tuple(text[-2:])), sampling, len(text)))
    generation = GenerationState(GenerationRequest(PROMPT, TOKENS, reserved_tree_slots=64), policy)
    event: Event | None = ChainReady()
    while event is not None:
        actions: list[Action] = generation.handle(event)
        event = None
        for action in actions:
            match action:
                case SendStep():
                    chain.send(action)
                case DiscardInFlight():
                    chain.drop(action.epoch)
                case RequestDrafts(paths=paths, width=width, use_model=use_model):
                    made = [tuple(propose((*generation.known, *path), width)) for path in paths]
                    event = (
                        DraftsProposed(tuple(made))
                        if use_model
                        else DraftsProposed(((),) * len(made), (1.0,) * len(made))
                    )
        event = event or chain.next_result()
    return generation.generated, generation.stats.accepted


def chi_square(seen: Counter[Words], chances: dict[Words, float]) -> tuple[float, int]:
    """-> (statistic, degrees of freedom). Answers expected less than five times are counted together."""
    often = {words: p for words, p in chances.items() if p * ANSWERS >= 5}
    cells = [(seen[words], p * ANSWERS) for words, p in often.items()]
    cells.append((ANSWERS - sum(n for n, _ in cells), ANSWERS * (1 - math.fsum(often.values()))))
    return math.fsum((n - expected) ** 2 / expected for n, expected in cells), len(cells) - 1


@pytest.mark.parametrize("policy", POLICIES)
def test_samples_have_the_models_own_distribution(policy: str) -> None:
    first = ANSWERS * list(POLICIES).index(policy)  # seeds of their own, or the answers would be the same
    drawn = [draw(POLICIES[policy], seed) for seed in range(first, first + ANSWERS)]
    statistic, freedom = chi_square(Counter(words for words, _ in drawn), exact())
    assert freedom > 10
    assert statistic < freedom + 3 * math.sqrt(2 * freedom), "a chance of about one in a thousand"
    assert (sum(hits for _, hits in drawn) > ANSWERS / 2) == (policy != "sequential")


def test_the_test_notices_another_distribution() -> None:
    """Draft tokens accepted without being sampled would show."""
    chances = exact()
    drafted = {words: propose((*PROMPT, *words[:-1]), 1)[0][0] == words[-1] for words in chances}
    bent = [p * (2.0 if drafted[words] else 1.0) for words, p in chances.items()]
    seen = Counter(random.Random(1).choices(list(chances), bent, k=ANSWERS))
    statistic, freedom = chi_square(seen, chances)
    assert statistic > freedom + 3 * math.sqrt(2 * freedom)
    assert len(set(itertools.chain.from_iterable(chances))) == VOCAB
