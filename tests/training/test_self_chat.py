"""Chats that a tiny model writes with itself, and whole training runs on them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import ModelTensors, tiny_model

from swarm.errors import CorruptModel, Infeasible, UnsupportedModel
from swarm.types import LayerSpan, tapped_row_bytes
from swarm_kernels.draft.file import DraftWeights, read_card
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.runtime.load import load_span
from swarm_kernels.runtime.span import Span
from swarm_training.distill import run, self_chat
from swarm_training.distill.corpus import ANSWER, GIVEN, USER, Corpus, RecordedChat
from swarm_training.distill.greedy import greedy_answers
from swarm_training.distill.policy import ChatPolicy
from swarm_training.distill.recipes import LayersRecipe, Recipe, TappedRecipe
from swarm_training.distill.run import TrainingPlan, train
from swarm_training.distill.self_chat import ChatGenerator
from swarm_training.distill.whole_prompts import whole_prompt

pytestmark = pytest.mark.slow

END = 2
SEEDED = ChatPolicy(whole_prompt_prob=0.0)


class TinyTokenizer:
    """A token a character, ids 3 to 130; a template of letters."""

    eos_token_ids = (END,)
    rewrites = False

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [END if c == "$" else 3 + ord(c) % 128 for c in text]

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        if self.rewrites:
            return "all the same"
        return "".join(f"<{m['role'][0]}>{m['content']}$" for m in messages) + "<a>"


@pytest.fixture(scope="module")
def source() -> ModelTensors:
    return ModelTensors(tiny_model("llama", tie_word_embeddings=True, max_position_embeddings=1024))


@pytest.fixture(scope="module")
def span(source: ModelTensors) -> Span:
    return load_span(source, LayerSpan(0, 6), torch.bfloat16)


@pytest.fixture(scope="module")
def chats(span: Span) -> list[RecordedChat]:
    return list(itertools.islice(ChatGenerator(span, TinyTokenizer(), 6, "seed", SEEDED).write(), 12))


def test_turns_follow_the_template(chats: list[RecordedChat]) -> None:
    tokenizer = TinyTokenizer()
    opening, answer = tokenizer.encode("<u>"), tokenizer.encode("$<a>")
    for chat in chats:
        tokens, origin = chat.tokens.tolist(), chat.origin.tolist()
        assert len(chat) <= 640 + 192
        assert set(origin) == {GIVEN, USER, ANSWER}
        pairs = zip(tokens, origin, strict=True)
        runs = [(who, [t for t, _ in part]) for who, part in itertools.groupby(pairs, lambda x: x[1])]
        assert [who for who, _ in runs[:4]] == [GIVEN, USER, GIVEN, ANSWER]
        assert any(runs[0][1][i : i + len(opening)] == opening for i in range(len(runs[0][1])))
        assert runs[2][1] == answer
        for who, tokens_of_turn in runs:
            assert who == GIVEN or len(tokens_of_turn) <= {USER: 160, ANSWER: 224}[who]
            assert who != USER or END not in tokens_of_turn
            assert who != ANSWER or END not in tokens_of_turn[:-1]


def test_what_the_teacher_expected_is_what_a_plain_pass_expects(span: Span, chats: list[RecordedChat]) -> None:
    chat = max(chats, key=len)
    cache = span.new_cache(len(chat) + 16)
    cache.open(b"plain", len(chat))
    tokens = chat.tokens.tolist()
    hidden = span.forward(span.embed(tokens), cache.schedule([StepRequest(b"plain", 0, len(tokens))]), cache)
    expected = span.logits(hidden).log_softmax(-1)
    for position in range(1, len(tokens)):
        if chat.origin[position] == GIVEN:
            assert not chat.top_ids[position].any()
        else:
            found = expected[position - 1][chat.top_ids[position].long()]
            torch.testing.assert_close(chat.top_logprobs[position].float(), found, atol=0.05, rtol=0)


def test_the_same_seed_writes_the_same_chats(span: Span, chats: list[RecordedChat]) -> None:
    again = list(itertools.islice(ChatGenerator(span, TinyTokenizer(), 6, "seed", SEEDED).write(), 3))
    for found, expected in zip(again, chats, strict=False):
        assert torch.equal(found.tokens, expected.tokens)


def test_whole_requests_are_asked_as_they_are(span: Span) -> None:
    policy = ChatPolicy(whole_prompt_prob=1.0, second_turn_prob=0.0, max_answer_tokens=8)
    made = list(itertools.islice(ChatGenerator(span, TinyTokenizer(), 4, "seed", policy, (2, 6)).write(), 6))
    tokenizer = TinyTokenizer()
    opening, answer = tokenizer.encode("<u>"), tokenizer.encode("$<a>")
    for chat in made:
        given = [t for t, o in zip(chat.tokens.tolist(), chat.origin.tolist(), strict=True) if o == GIVEN]
        assert given[:3] == opening
        assert given[-4:] == answer
        assert len(given) > 20
        assert set(chat.origin.tolist()) == {GIVEN, ANSWER}
        assert chat.taps.shape == (len(chat), 2 * tapped_row_bytes(span.config.hidden_size, 8))


def test_requests_differ_and_name_what_their_lists_have() -> None:
    rng = random.Random(1)
    made = {whole_prompt(rng) for _ in range(400)}
    assert len(made) > 300
    assert not any("{" in prompt or "}" in prompt for prompt in made)


def test_a_loop_is_detected() -> None:
    assert self_chat._loops([1, 2, 3] * 20, 48)
    assert not self_chat._loops([1, 2, 3] * 8, 48)
    assert not self_chat._loops(list(range(60)), 48)


def test_a_template_that_rewrites_messages_cannot_be_used(span: Span) -> None:
    tokenizer = TinyTokenizer()
    tokenizer.rewrites = True
    with pytest.raises(UnsupportedModel, match="chat template rewrites messages"):
        ChatGenerator(span, tokenizer, 2, "seed")


class Clock:
    """A second passes each time it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def plan_in(folder: Path, **changes: Any) -> TrainingPlan:
    values: dict[str, Any] = {"minutes": 1.5, "tokens": 1000, "vocabulary": 100, "batch": 6, "save_every_s": 20.0}
    return TrainingPlan(out=folder / "tiny.draft", **{"work": folder / "work", **values, **changes})


@pytest.mark.parametrize("recipe", [LayersRecipe(), TappedRecipe(levels=2)], ids=["draft", "eagle3"])
def test_a_run_writes_learns_exports_and_resumes(
    recipe: Recipe, source: ModelTensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "load_tokenizer", lambda source: TinyTokenizer())
    short = ChatPolicy(max_user_tokens=10, max_answer_tokens=20)
    phases: list[str] = []

    def report(phase: str, fraction: float, note: str) -> None:
        assert fraction >= 0
        phases.append(phase)

    card = train(source, plan_in(tmp_path, chat_policy=short, recipe=recipe), report, Clock())
    assert list(dict.fromkeys(phases)) == ["loading", "writing", "preparing", "learning", "measuring"]
    assert card.evaluation["held_out_places"] > 0
    assert card.seen_tokens > 0
    assert read_card(tmp_path / "tiny.draft") == card
    assert len(DraftWeights.load(tmp_path / "tiny.draft").vocabulary) == 100
    phases.clear()
    assert len(card.evaluation["loss_by_seen_tokens"]) > 4
    assert card.taps == recipe.taps(6)
    assert len(DraftWeights.load(tmp_path / "tiny.draft").texts) > 100
    later = train(source, plan_in(tmp_path, chat_policy=short, recipe=recipe), report, Clock())
    assert "writing" not in phases
    assert later.seen_tokens > card.seen_tokens


def test_too_little_time_and_foreign_work(
    source: ModelTensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "load_tokenizer", lambda source: TinyTokenizer())
    with pytest.raises(Infeasible, match="more --minutes"):
        train(source, plan_in(tmp_path, minutes=0.01), lambda *_: None, Clock())
    Corpus(tmp_path / "other", "b" * 32).append(
        [RecordedChat(*(torch.zeros(4, 1, dtype=torch.uint8) for _ in range(5)))]
    )
    with pytest.raises(CorruptModel, match="another model"):
        train(source, plan_in(tmp_path, work=tmp_path / "other"), lambda *_: None, Clock())


def test_greedy_answers_are_those_of_one_prompt_alone(source: ModelTensors) -> None:
    prompts = [[5, 6, 7], [9], [100, 3, 3, 8]]
    together = greedy_answers(source, prompts, 12)
    assert together == [greedy_answers(source, [prompt], 12)[0] for prompt in prompts]
    ended = greedy_answers(source, prompts, 12, ends=[together[0][3]])
    assert ended[0] == together[0][: together[0].index(together[0][3]) + 1]
