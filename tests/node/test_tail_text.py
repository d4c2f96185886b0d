"""The text as the tail sees it: under any drafts, misses and dropped steps it is the client's, and no row is lost."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from node_fakes import ROWS

from swarm.errors import ProtocolError
from swarm.messages import Step
from swarm.planner.generation.state_machine import (
    ChainReady,
    DiscardInFlight,
    DraftsProposed,
    Finish,
    GenerationRequest,
    GenerationState,
    RequestDrafts,
    SendStep,
    SpeculationPolicy,
    StepDone,
)
from swarm.types import LayerSpan
from swarm_client.session.session_messages import step_message
from swarm_hop.drafting.carried_taps import CarriedBuffer, joined, rows_of, taken_apart
from swarm_hop.drafting.tail_text import TailText
from swarm_hop.serving.session import HopSession
from swarm_hop.serving.token_history import TokenHistory

VOCAB = 50
SESSION = b"s" * 16


def following(text: list[int]) -> int:
    return (7 * sum(text[-3:]) + len(text)) % VOCAB


def row(position: int, token: int) -> tuple[bytes, ...]:
    return (bytes([position % 256, token]),)


class Tail:
    """Runs steps by the rules of a hop, and follows them."""

    def __init__(self, prompt: list[int], most: int) -> None:
        self.hop = HopSession(SESSION, 0, None, "c", "", LayerSpan(0, 8), replace(ROWS, vocab_size=VOCAB), most, None)  # type: ignore[arg-type]
        self.history = TokenHistory([], 0, most, VOCAB)
        self.text = TailText()
        self.rows: dict[int, tuple[bytes, ...]] = {}

    def run(self, step: Step) -> tuple[int, ...]:
        admitted = self.hop.admit(step)
        paths = [path.token_ids().tolist() for path in self.history.apply(admitted).paths]
        samples = [following(path) for path in paths]
        start = admitted.committed_before + len(admitted.commit_slots)
        causal = [row(start + i, token) for i, token in enumerate(admitted.tokens[: admitted.causal_rows])]
        drafts = [row(len(path) - 1, path[-1]) for path in paths[len(paths) - len(admitted.slots) :]]
        self.text.follow(admitted, samples, [*causal, *drafts] if step.sample else causal)
        return tuple(samples)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 3), st.integers(1, 6), st.floats(0.2, 1.0), st.integers(1, 12))
def test_the_tail_knows_the_client_s_text_and_gives_each_row_once(
    seed: int, in_flight: int, depth: int, rate: float, chunk: int
) -> None:
    rng = random.Random(seed)
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
    truth = list(prompt)
    for _ in range(40):
        truth.append(following(truth))
    request = GenerationRequest(tuple(prompt), 30, prefill_chunk=chunk, vocab_size=VOCAB, reserved_tree_slots=64)
    policy = SpeculationPolicy(max_tree_rows=8, max_depth_per_step=depth, max_steps_in_flight=in_flight)
    state, tail = GenerationState(request, policy), Tail(prompt, len(prompt) + 30 + 64)
    queue: deque[SendStep] = deque()
    results: deque[tuple[StepDone, int | None]] = deque()
    events = [ChainReady()]
    while events or queue or results:
        if events:
            for action in state.handle(events.pop()):
                match action:
                    case SendStep():
                        queue.append(action)
                    case RequestDrafts():
                        events.append(DraftsProposed(tuple(drafts(rng, truth, state, p, rate) for p in action.paths)))
                    case DiscardInFlight() if rng.random() < 0.7:  # the hop hears of it before their turn
                        queue = deque(step for step in queue if step.epoch >= action.epoch)
                    case Finish():
                        assert state.known == truth[: len(state.known)]
                        return
        elif results and (not queue or rng.random() < 0.5):
            result, drafted = results.popleft()
            current = result.epoch == state.epoch
            events = [result]
            if current and drafted is not None:
                told = len(state.preview(result))
                assert drafted == len(state.known) + told or not told
        else:
            action = queue.popleft()
            samples = tail.run(step_message(SESSION, action, forward_tokens=True))
            known = tail.text.take() if action.sample else None
            if known is not None:
                assert known.tokens == truth[: len(known.tokens)]
                for position, found in known.rows.items():
                    assert found == row(position, truth[position])
                tail.rows.update(known.rows)
                assert sorted(tail.rows) == list(range(len(known.tokens) - 1))
            results.append((StepDone(action.epoch, action.step, samples), len(known.tokens) if known else None))


def drafts(
    rng: random.Random, truth: list[int], state: GenerationState, path: tuple[int, ...], rate: float
) -> tuple[tuple[int, float], ...]:
    at = len(state.known) + len(path)
    right = [truth[at]] if at < len(truth) and rng.random() < rate else []
    tokens = list(dict.fromkeys([*right, rng.randrange(VOCAB), rng.randrange(VOCAB)]))
    rng.shuffle(tokens)
    return tuple((token, -0.5 - rng.random()) for token in tokens)


def step(committed: int, tokens: list[int], causal: int, **more: object) -> Step:
    return Step(SESSION, 0, 0, committed, causal, tokens=tokens, **more)  # type: ignore[arg-type]


def test_rows_beside_tokens_that_were_never_told_are_missing() -> None:
    text = TailText()
    text.follow(step(5, [], 3), [], [row(5 + i, 0) for i in range(3)])  # a replay after a cached prefix
    text.follow(step(8, [1, 2], 2), [9], [row(8, 1), row(9, 2)])
    known = text.take()
    assert known is not None
    assert known.tokens == [0] * 8 + [1, 2, 9]
    assert known.rows == {8: row(8, 1), 9: row(9, 2)}
    text.follow(step(9, [4], 1), [3], [row(9, 4)])  # a rollback, and another token
    known = text.take()
    assert known is not None
    assert known.tokens == [0] * 8 + [1, 4, 3]
    assert known.rows == {9: row(9, 4)}
    text.follow(step(10, [5], 0, parents=[-1], slots=[0], commit_slots=[77]), [1], [row(11, 5)])
    assert text.take() is None  # it does not know what was committed


def test_taps_of_all_hops_give_the_rows_that_all_of_them_have() -> None:
    three, two = (4, b"aabbcc"), (6, b"ddee")
    assert joined((three,), (two,), 2) == ((4, b"bbcc"), (6, b"ddee"))
    assert joined((), (three,), 2) == (three,)
    assert joined((three,), ((7, b""),), 2) == ()
    assert joined(tuple((i, b"aa") for i in range(9)), (), 2) == ()
    assert rows_of((three, two), (4, 6), 2, 4) == [None, None, (b"bb", b"dd"), (b"cc", b"ee")]
    assert rows_of((three,), (4, 6), 2, 3) == [None] * 3
    assert rows_of((three,), (4,), 2, 2) == [(b"bb",), (b"cc",)]
    assert taken_apart([1, 4], b"aabbccdd", 2, LayerSpan(5, 8)) == ((1, b"aabb"), (4, b"ccdd"))
    for layers, body in (([4, 1], b"aabb"), ([1, 1], b"aabb"), ([1, 5], b"aabb"), ([1, 4], b"aab"), ([1], b"aab")):
        with pytest.raises(ProtocolError):
            taken_apart(layers, body, 2, LayerSpan(5, 8))


def test_only_the_newest_taps_wait_for_their_steps() -> None:
    waiting = CarriedBuffer()
    for number in range(100):
        waiting.keep(number, ((1, bytes([number])),))
    assert waiting.take(35) == ()
    assert waiting.take(36) == ((1, bytes([36])),)
    assert waiting.take(99) == ((1, bytes([99])),)
    assert waiting.take(98) == ()
