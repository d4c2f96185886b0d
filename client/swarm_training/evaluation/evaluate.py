"""Evaluates drafters on recorded answers: hit rates by depth and rank, and tokens per step with a tree of some size.

The answers are the target's own, greedy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from swarm.errors import DrafterFailed
from swarm_client.speculation.drafters.base import Drafter, TokenPath
from swarm_client.speculation.drafters.bundled import find_bundled
from swarm_client.speculation.drafters.mixture import MixtureDrafter
from swarm_client.speculation.drafters.model import ModelDrafter
from swarm_client.speculation.drafters.ngram import NgramDrafter
from swarm_client.speculation.drafters.stored import StoredDrafter
from swarm_kernels.draft.continuation_store import ContinuationStore
from swarm_kernels.draft.dflash import open_dflash
from swarm_kernels.draft.eagle import open_eagle
from swarm_kernels.draft.file import read_card
from swarm_kernels.draft.folder import DFLASH, drafter_kind
from swarm_kernels.draft.models import open_draft
from swarm_kernels.draft.tapped import TappedDraft
from swarm_kernels.draft.tapped_draft import open_tapped_draft
from swarm_kernels.models.source import ModelSource
from swarm_kernels.tokenizer.tokenizer import load_tokenizer
from swarm_training.distill.greedy import greedy_answers
from swarm_training.distill.validation import RANKS
from swarm_training.evaluation.eval_prompts import PROMPTS
from swarm_training.evaluation.recorded_medusa import RecordedMedusa, run_heads
from swarm_training.evaluation.recorded_taps import RecordedTapsDrafter, record_taps

Answers = Sequence[tuple[Sequence[int], Sequence[int]]]
Opened = tuple[Callable[[], Drafter], ContinuationStore | None]

CONFIDENT = 0.9
"""Probability from which the first candidate counts as confident."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A prompt and the target's answer, as token ids."""

    prompt: Sequence[int]
    answer: Sequence[int]


def evaluate(
    source: ModelSource,
    draft: Path | None,
    heads: Path | None,
    tokens: int,
    depths: int,
    nodes: int,
    report: Callable[[str, float, str], None] = lambda phase, fraction, note: None,
) -> dict[str, Any]:
    """Evaluate the n-gram drafter, a draft, Medusa heads, and mixtures of these with n-grams, on the target's answers
    to `eval_prompts.PROMPTS`. -> metrics for JSON.

    `draft` None: the bundled one, unless there are `heads`. Raises ModelNotFound, CorruptModel,
    UnsupportedModel, DrafterFailed.
    """
    path = draft or (None if heads is not None else find_bundled(source))
    if path is None and heads is None:
        raise DrafterFailed(f"there is no bundled draft for {source.name}; make one with 'swarm-draft train'")
    opened = open_recorded(path, source) if path is not None else None
    records = record(source, tokens, report)
    everything = [record for kind in records.values() for record in kind]
    drafters: dict[str, Callable[[], Drafter]] = {"ngram": NgramDrafter}
    if opened is not None:
        make, store = opened([(record.prompt, record.answer) for record in everything])
        drafters["draft"] = make
        if store is not None:
            drafters["with_store"] = lambda: StoredDrafter(make(), store)
        drafters["combined"] = lambda: MixtureDrafter([NgramDrafter(), drafters.get("with_store", make)()])
    if heads is not None:
        recorded = run_heads(source, heads, [(record.prompt, record.answer) for record in everything], max(RANKS))
        drafters["heads"] = lambda: RecordedMedusa(recorded)
        drafters["combined_heads"] = lambda: MixtureDrafter([NgramDrafter(), RecordedMedusa(recorded)])
    figures: dict[str, Any] = {"answer_tokens": sum(len(record.answer) for record in everything)}
    for number, (name, create) in enumerate(drafters.items()):
        report("measuring", number / len(drafters), name)
        figures[name] = {
            "hit_rate_at_1_4_8": [
                [round(hit, 3) for hit in row] for row in hits_by_depth(create(), everything, depths)
            ],
            f"tokens_per_step_{nodes}": {
                kind: round(tokens_per_step(create(), records_of_kind, nodes, max(depths, 4)), 3)
                for kind, records_of_kind in records.items()
            },
            "confidence_accuracy": {
                kind: [round(fraction, 3) for fraction in confidence_accuracy(create(), records_of_kind)]
                for kind, records_of_kind in records.items()
            },
        }
    report("measuring", 1.0, "")
    return figures


def open_recorded(path: Path, source: ModelSource) -> Callable[[Answers], Opened]:
    """Of a draft's file, or the folder of a drafter: from answers to what makes a drafter of them, and its store."""
    if path.is_dir():
        folder: TappedDraft = open_dflash(path, source) if drafter_kind(path) == DFLASH else open_eagle(path, source)
        return partial(_tapped, folder, None, source)
    if read_card(path).taps:
        tapped = open_tapped_draft(path, source)
        return partial(_tapped, tapped, tapped.store, source)
    model = open_draft(path, source)
    return lambda answers: (lambda: ModelDrafter(model), model.store)


def _tapped(model: TappedDraft, store: ContinuationStore | None, source: ModelSource, answers: Answers) -> Opened:
    recorded = record_taps(source, answers, model.taps)
    return (lambda: RecordedTapsDrafter(model, recorded)), store


def record(
    source: ModelSource, tokens: int, report: Callable[[str, float, str], None] = lambda phase, fraction, note: None
) -> dict[str, list[Recorded]]:
    """The target's answers to the held-out prompts, by kind."""
    tokenizer = load_tokenizer(source)
    named = [(kind, prompt) for kind, prompts in PROMPTS.items() for prompt in prompts]
    ids = [tokenizer.apply_chat_template([{"role": "user", "content": prompt}]) for _, prompt in named]
    answers = greedy_answers(
        source,
        ids,
        tokens,
        tokenizer.eos_token_ids,
        lambda fraction: report("answering", fraction, f"{len(ids)} prompts"),
    )
    records: dict[str, list[Recorded]] = {kind: [] for kind in PROMPTS}
    for (kind, _), prompt, answer in zip(named, ids, answers, strict=True):
        records[kind].append(Recorded(prompt, answer))
    return records


def hits_by_depth(drafter: Drafter, records: Sequence[Recorded], depths: int, stride: int = 1) -> list[list[float]]:
    """`[depths][len(RANKS)]`: how often the target's token was among the first candidates at that depth.

    The path above it is the target's own text. Evaluated at every `stride`-th position.
    """
    hits = [[0] * len(RANKS) for _ in range(depths)]
    attempts = [0] * depths
    for record in records:
        drafter.reset(record.prompt)
        answer = tuple(record.answer)
        for position in range(0, len(answer), stride):
            paths = [answer[position : position + depth] for depth in range(min(depths, len(answer) - position))]
            for depth, candidates in enumerate(drafter.propose_many(paths, max(RANKS))):
                tokens = [candidate.token for candidate in candidates]
                attempts[depth] += 1
                for n, rank in enumerate(RANKS):
                    hits[depth][n] += answer[position + depth] in tokens[:rank]
            drafter.extend(answer[position : position + stride])
    return [[hit / max(1, count) for hit in row] for row, count in zip(hits, attempts, strict=True)]


def confidence_accuracy(drafter: Drafter, records: Sequence[Recorded]) -> tuple[float, float]:
    """-> (fraction of positions where the first candidate has probability `CONFIDENT` or more, its accuracy there)."""
    positions = confident = correct = 0
    for record in records:
        drafter.reset(record.prompt)
        for token in record.answer:
            candidates = drafter.propose_many([()], 1)[0]
            positions += 1
            if candidates and candidates[0].logprob >= math.log(CONFIDENT):
                confident, correct = confident + 1, correct + (candidates[0].token == token)
            drafter.extend([token])
    return confident / max(1, positions), correct / max(1, confident)


def tokens_per_step(drafter: Drafter, records: Sequence[Recorded], nodes: int, depth: int, width: int = 4) -> float:
    """Mean tokens committed per step when each verifies the `nodes` likeliest paths; 1 is no gain."""
    steps = tokens = 0
    for record in records:
        drafter.reset(record.prompt)
        answer = tuple(record.answer)
        while answer:
            paths = likeliest_paths(drafter, nodes, depth, width)
            accepted = 0
            while accepted < len(answer) - 1 and answer[: accepted + 1] in paths:
                accepted += 1
            committed, answer = answer[: accepted + 1], answer[accepted + 1 :]  # plus the target's own token
            drafter.extend(committed)
            tokens += len(committed)
            steps += 1
    return tokens / max(1, steps)


def likeliest_paths(drafter: Drafter, nodes: int, depth: int, width: int) -> frozenset[TokenPath]:
    """A tree of `nodes` paths grown level by level, `width` candidates a node; the prefixes of a path are among
    them."""
    level: dict[TokenPath, float] = {(): 0.0}
    kept: dict[TokenPath, float] = {}
    for _ in range(depth):
        proposed = drafter.propose_many(list(level), width)
        grown = {
            (*path, token): logprob + total
            for (path, total), made in zip(level.items(), proposed, strict=True)
            for token, logprob in made
        }
        level = dict(sorted(grown.items(), key=lambda item: -item[1])[:nodes])
        kept |= level
    return frozenset(sorted(kept, key=lambda path: (-kept[path], len(path)))[:nodes])
