"""How good a drafter is on recorded answers: hits by depth and rank, and tokens a round with a tree of some size.

Owns the measuring. The answers are the target's own, greedy; whoever calls knows where they come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm.errors import DrafterFailed
from swarm_client.speculation.drafters.base import Drafter, TokenPath
from swarm_client.speculation.drafters.bundled import find_bundled
from swarm_client.speculation.drafters.mixture import MixtureDrafter
from swarm_client.speculation.drafters.model import ModelDrafter
from swarm_client.speculation.drafters.ngram import NgramDrafter
from swarm_kernels.draft.models import open_draft
from swarm_kernels.models.source import ModelSource
from swarm_kernels.tokenizer.tokenizer import load_tokenizer
from swarm_training.distill.greedy import greedy_answers
from swarm_training.evaluation.eval_prompts import PROMPTS
from swarm_training.evaluation.recorded_medusa import RecordedMedusa, run_heads

RANKS = (1, 4, 8)
CONFIDENT = 0.9


@dataclass(frozen=True, slots=True)
class Recorded:
    """A prompt and what the target said, as token ids."""

    prompt: Sequence[int]
    answer: Sequence[int]


def evaluate(
    source: ModelSource,
    draft: Path | None,
    heads: Path | None,
    tokens: int,
    depths: int,
    nodes: int,
    report: Callable[[str, float, str], None] = lambda phase, share, note: None,
) -> dict[str, Any]:
    """The look-up, a draft, the tail's heads, and each of these beside the look-up, on the target's answers to
    `held_out.PROMPTS`, as figures for JSON.

    `draft` None: the one that came with swarm, unless there are `heads`. Raises ModelNotFound, CorruptModel,
    UnsupportedModel, DrafterFailed.
    """
    path = draft or (None if heads is not None else find_bundled(source))
    if path is None and heads is None:
        raise DrafterFailed(f"no draft for {source.name} came with swarm; make one with 'swarm-draft train'")
    model = open_draft(path, source) if path is not None else None
    records = record(source, tokens, report)
    every = [one for kind in records.values() for one in kind]
    drafters: dict[str, Callable[[], Drafter]] = {"ngram": NgramDrafter}
    if model is not None:
        drafters["draft"] = lambda: ModelDrafter(model)
        drafters["combined"] = lambda: MixtureDrafter([NgramDrafter(), ModelDrafter(model)])
    if heads is not None:
        told = run_heads(source, heads, [(one.prompt, one.answer) for one in every], max(RANKS))
        drafters["heads"] = lambda: RecordedMedusa(told)
        drafters["combined_heads"] = lambda: MixtureDrafter([NgramDrafter(), RecordedMedusa(told)])
    figures: dict[str, Any] = {"answer_tokens": sum(len(one.answer) for one in every)}
    for number, (name, made) in enumerate(drafters.items()):
        report("measuring", number / len(drafters), name)
        figures[name] = {
            "hit_rate_at_1_4_8": [[round(hit, 3) for hit in row] for row in hits_by_depth(made(), every, depths)],
            f"tokens_per_step_{nodes}": {
                kind: round(tokens_per_step(made(), some, nodes, max(depths, 4)), 3) for kind, some in records.items()
            },
            "confidence_accuracy": {
                kind: [round(share, 3) for share in confidence_accuracy(made(), some)] for kind, some in records.items()
            },
        }
    report("measuring", 1.0, "")
    return figures


def record(
    source: ModelSource, tokens: int, report: Callable[[str, float, str], None] = lambda phase, share, note: None
) -> dict[str, list[Recorded]]:
    """The target's answers to the held-out prompts, by kind."""
    tokenizer = load_tokenizer(source)
    named = [(kind, prompt) for kind, prompts in PROMPTS.items() for prompt in prompts]
    ids = [tokenizer.apply_chat_template([{"role": "user", "content": prompt}]) for _, prompt in named]
    answers = greedy_answers(
        source, ids, tokens, tokenizer.eos_token_ids, lambda share: report("answering", share, f"{len(ids)} prompts")
    )
    records: dict[str, list[Recorded]] = {kind: [] for kind in PROMPTS}
    for (kind, _), prompt, answer in zip(named, ids, answers, strict=True):
        records[kind].append(Recorded(prompt, answer))
    return records


def hits_by_depth(drafter: Drafter, records: Sequence[Recorded], depths: int, stride: int = 1) -> list[list[float]]:
    """`[depths][len(RANKS)]`: how often the target's token was among the first guesses, so deep below certain text.

    All guesses above it were right. Asked at every `stride`-th place.
    """
    hits = [[0] * len(RANKS) for _ in range(depths)]
    asked = [0] * depths
    for record in records:
        drafter.reset(record.prompt)
        answer = tuple(record.answer)
        for place in range(0, len(answer), stride):
            paths = [answer[place : place + depth] for depth in range(min(depths, len(answer) - place))]
            for depth, guesses in enumerate(drafter.propose_many(paths, max(RANKS))):
                tokens = [guess.token for guess in guesses]
                asked[depth] += 1
                for n, rank in enumerate(RANKS):
                    hits[depth][n] += answer[place + depth] in tokens[:rank]
            drafter.extend(answer[place : place + stride])
    return [[hit / max(1, count) for hit in row] for row, count in zip(hits, asked, strict=True)]


def confidence_accuracy(drafter: Drafter, records: Sequence[Recorded]) -> tuple[float, float]:
    """-> (the part of all places where the first guess was called at least `CONFIDENT`, how often it was right there)."""
    places = sure = right = 0
    for record in records:
        drafter.reset(record.prompt)
        for token in record.answer:
            guesses = drafter.propose_many([()], 1)[0]
            places += 1
            if guesses and guesses[0].logprob >= math.log(CONFIDENT):
                sure, right = sure + 1, right + (guesses[0].token == token)
            drafter.extend([token])
    return sure / max(1, places), right / max(1, sure)


def tokens_per_step(drafter: Drafter, records: Sequence[Recorded], nodes: int, depth: int, width: int = 4) -> float:
    """Mean tokens settled by rounds that each verify the `nodes` likeliest paths; 1 is no gain."""
    rounds = tokens = 0
    for record in records:
        drafter.reset(record.prompt)
        answer = tuple(record.answer)
        while answer:
            paths = likeliest_paths(drafter, nodes, depth, width)
            accepted = 0
            while accepted < len(answer) - 1 and answer[: accepted + 1] in paths:
                accepted += 1
            settled, answer = answer[: accepted + 1], answer[accepted + 1 :]  # the target's own token comes on top
            drafter.extend(settled)
            tokens += len(settled)
            rounds += 1
    return tokens / max(1, rounds)


def likeliest_paths(drafter: Drafter, nodes: int, depth: int, width: int) -> frozenset[TokenPath]:
    """A tree of `nodes` paths grown level by level, `width` guesses a node; with a path come its beginnings."""
    level: dict[TokenPath, float] = {(): 0.0}
    kept: dict[TokenPath, float] = {}
    for _ in range(depth):
        proposed = drafter.propose_many(list(level), width)
        grown = {
            (*path, token): logprob + belief
            for (path, belief), made in zip(level.items(), proposed, strict=True)
            for token, logprob in made
        }
        level = dict(sorted(grown.items(), key=lambda item: -item[1])[:nodes])
        kept |= level
    return frozenset(sorted(kept, key=lambda path: (-kept[path], len(path)))[:nodes])
