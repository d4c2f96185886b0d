"""The tail's token history against a plain model of the protocol, and what it refuses."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from node_fakes import ROWS

from swarm.errors import ContextOverflow, ProtocolError
from swarm.messages import MAX_HISTORY, OpenSession, Step, WireSampling
from swarm_hop.serving import session as sessions
from swarm_hop.serving.session import HopSession
from swarm_hop.serving.token_history import StepTokens, TokenHistory

VOCAB = 200


class PlainHistory:
    """The same by the words of `messages.Step`: a list, and a dict of slot -> (parent slot, token)."""

    def __init__(self, known: list[int]) -> None:
        self.known, self.committed = list(known), 0
        self.tree: dict[int, tuple[int, int]] = {}

    def path(self, slot: int) -> list[int]:
        if slot < 0:
            return []
        parent, token = self.tree[slot]
        return [*self.path(parent), token]

    def follow(self, step: Step) -> list[list[int]]:
        if step.committed_before < self.committed:
            self.tree = {}
        text = self.known[: step.committed_before]
        for slot in step.commit_slots:
            parent, token = self.tree.pop(slot)
            assert parent == -1
            text.append(token)
            self.tree = {s: (-1 if p == slot else p, t) for s, (p, t) in self.tree.items() if self.descends(s, slot)}
        if step.causal_rows:
            self.tree = {}
            end = len(text) + step.causal_rows
            text += step.tokens[: step.causal_rows] if step.tokens else self.known[len(text) : end]
        self.known[: len(text)] = text
        self.committed = len(text)
        paths = [text] if step.causal_rows and step.sample else []
        for parent, slot, token in zip(step.parents, step.slots, step.tokens[step.causal_rows :], strict=True):
            self.tree[slot] = (parent, token)
            if step.sample:
                paths.append(text + self.path(slot))
        return paths

    def descends(self, slot: int, ancestor: int) -> bool:
        while slot in self.tree:
            slot = self.tree[slot][0]
            if slot == ancestor:
                return True
        return False


def random_steps(rng: random.Random, plain: PlainHistory) -> Iterator[Step]:
    """Steps that keep the rules: prefill, replays without tokens, trees, commits, rollbacks."""
    for number in range(rng.randrange(5, 40)):
        base, commits = plain.committed, []
        if base and rng.random() < 0.15:
            base = rng.randrange(base)
        elif plain.tree and rng.random() < 0.6:
            node = rng.choice(list(plain.tree))
            while node != -1:
                commits.insert(0, node)
                node = plain.tree[node][0]
        start = base + len(commits)
        causal = rng.choice([0, 0, 1, 3]) if start == plain.committed + len(commits) else rng.choice([1, 3])
        if start + causal <= len(plain.known) and causal and rng.random() < 0.3:
            yield Step(b"s" * 16, 0, number, base, causal, sample=False, commit_slots=commits)
            continue
        free = [slot for slot in range(30) if slot not in plain.tree]
        slots = rng.sample(free, rng.randrange(0 if causal else 1, 5))
        keeps = {s for s in plain.tree if not commits or plain.descends(s, commits[-1])} if not causal else set()
        if base < plain.committed:
            keeps = set()
        parents: list[int] = []
        for i in range(len(slots)):
            parents.append(rng.choice([-1, *keeps, *slots[:i]]))
        tokens = [rng.randrange(VOCAB) for _ in range(causal + len(slots))]
        sample = rng.random() < 0.8
        yield Step(b"s" * 16, 0, number, base, causal, sample, tokens, parents, slots, commits)


@pytest.mark.parametrize("seed", range(150))
def test_paths_are_those_of_the_plain_model(seed: int) -> None:
    rng = random.Random(seed)
    begun = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 10]))]
    prompt_tokens = rng.randrange(len(begun) + 1)
    plain, history = PlainHistory(begun), TokenHistory(begun, prompt_tokens, 1000, VOCAB)
    for step in random_steps(rng, plain):
        expected, tokens = plain.follow(step), history.apply(step)
        assert [path.token_ids().tolist() for path in tokens.paths] == expected
        start = step.committed_before + len(step.commit_slots)
        positions = range(start, start + step.causal_rows)
        assert tokens.prompt_targets.tolist() == [plain.known[p + 1] for p in positions if p + 1 < prompt_tokens]
        assert tokens.prompt_tokens == prompt_tokens
        if plain.tree and rng.random() < 0.2:
            victim = rng.choice(list(plain.tree))
            history.prune([victim, 4000])
            plain.tree = {s: n for s, n in plain.tree.items() if s != victim and not plain.descends(s, victim)}


def step(number: int = 0, base: int = 0, causal: int = 0, **fields: object) -> Step:
    return Step(b"s" * 16, 0, number, base, causal, **fields)  # type: ignore[arg-type]


def test_a_path_stays_what_it_was_though_its_slots_are_dropped_before_it_is_read() -> None:
    history = TokenHistory([7, 8], 2, 100, VOCAB)
    tokens = history.apply(step(causal=2, tokens=[7, 8, 1, 2], parents=[-1, 4], slots=[4, 5]))
    history.prune([4])
    assert [path.token_ids().tolist() for path in tokens.paths] == [[7, 8], [7, 8, 1], [7, 8, 1, 2]]
    with pytest.raises(ProtocolError, match="parent is unknown"):
        history.apply(step(1, 2, tokens=[3], parents=[5], slots=[6]))


def test_the_rest_of_the_prompt_is_known_before_its_chunk_comes() -> None:
    prompt = list(range(20, 30))
    history = TokenHistory(prompt, 10, 100, VOCAB)
    chunks = [history.apply(step(0, 0, 4, tokens=prompt[:4], sample=False))]
    chunks.append(history.apply(step(1, 4, 6, tokens=prompt[4:])))
    assert [c.prompt_targets.tolist() for c in chunks] == [prompt[1:5], prompt[5:]]
    assert np.array_equal(chunks[1].paths[0].committed, prompt)
    after: StepTokens = history.apply(step(2, 10, 1, tokens=[5]))
    assert after.prompt_targets.tolist() == []


BAD_STEPS = {
    "beyond the known text": step(0, 6, 1, tokens=[1]),
    "a replay beyond it": step(0, 3, 3, sample=False),
    "a sample without tokens": step(0, 0, 2),
    "tree rows without tokens": step(0, 0, 2, sample=False, parents=[-1], slots=[0]),
    "a commit of nothing": step(0, 0, 1, tokens=[1], commit_slots=[3]),
    "an unknown parent": step(0, 0, 1, tokens=[1, 2], parents=[9], slots=[0]),
    "its own parent": step(0, 0, 1, tokens=[1, 2], parents=[0], slots=[0]),
    "a slot in use": step(0, 0, 1, tokens=[1, 2, 3], parents=[-1, -1], slots=[0, 0]),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_what_a_step_may_not_do(name: str) -> None:
    with pytest.raises(ProtocolError):
        TokenHistory([1, 2, 3, 4], 4, 10, VOCAB).apply(BAD_STEPS[name])


def test_a_commit_out_of_order_is_refused() -> None:
    history = TokenHistory([1], 1, 10, VOCAB)
    history.apply(step(0, 0, 1, tokens=[1, 2, 3, 4], parents=[-1, 0, -1], slots=[0, 1, 2]))
    with pytest.raises(ProtocolError, match="slot 2"):
        history.apply(step(1, 1, 1, tokens=[5], commit_slots=[0, 2]))


def test_histories_that_cannot_be() -> None:
    for tokens, prompt, most in (([1] * 11, 1, 10), ([1, 2], 3, 10), ([1, VOCAB], 1, 10)):
        with pytest.raises(ProtocolError):
            TokenHistory(tokens, prompt, most, VOCAB)
    assert TokenHistory([], 0, 0, VOCAB).prompt_tokens == 0


def test_a_chain_of_thousands_of_drafts_is_followed() -> None:
    history = TokenHistory([1], 1, 5000, VOCAB)
    count = 1000
    history.apply(step(0, 0, 1, tokens=[1], sample=True))
    for block in range(4):
        slots = list(range(block * count, (block + 1) * count))
        tokens = history.apply(step(1, 1, tokens=[2] * count, parents=[s - 1 for s in slots], slots=slots))
    assert len(tokens.paths[-1].token_ids()) == 1 + 4 * count
    last = history.apply(step(2, 1, tokens=[3], parents=[-1], slots=[4000], commit_slots=list(range(4000))))
    assert last.paths[0].token_ids().tolist() == [1, *[2] * 4000, 3]


class NoLink:
    peer = "client"

    async def send(self, *message: object) -> None:
        raise AssertionError("nothing is sent")


def test_a_text_longer_than_the_context_is_refused_before_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = replace(ROWS, context_length=100)
    message = OpenSession(
        b"s" * 16, "toy", "hash", "fp32", 0, rows.num_layers, MAX_HISTORY,
        history=[1] * 101, sampling=WireSampling(repetition_penalty=1.5),
    )  # fmt: skip
    made = HopSession.of(message, NoLink(), 1, replace(rows, context_length=101))
    assert made.history is not None
    monkeypatch.setattr(sessions, "TokenHistory", None)
    monkeypatch.setattr(sessions, "validate_sampling", None)
    with pytest.raises(ContextOverflow, match="101 tokens for a context of 100"):
        HopSession.of(message, NoLink(), 1, rows)
