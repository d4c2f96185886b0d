"""Recurrent states of sessions: any order of steps, drafts, rollbacks, forks and transfers gives what transformers
gives on the plain text; memory is counted, and bytes from strangers are checked."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import ModelTensors, hf_logits
from zoo.compare import distance
from zoo.shrink import tiny_config
from zoo.weights import random_model

from swarm.errors import ActivationLogEvicted, InvalidRequest, OutOfMemory
from swarm.types import LayerSpan
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.kvcache.layer_transfer import STATE_UNIT, LayerTransfer
from swarm_kernels.kvcache.recurrent_states import MAX_SEGMENTS, MAX_TREE_ROWS
from swarm_kernels.kvcache.stateful_cache import StatefulCache
from swarm_kernels.runtime.hf_span import HfSpan
from swarm_kernels.runtime.hf_states import StateMixer
from swarm_kernels.runtime.load import load_span

TOLERANCES = {"qwen3_next": 5e-3}  # its chunks and single steps round differently: transformers' own differ by 1e-3
SPAN = LayerSpan(0, 4)


def loaded(kind: str) -> tuple[Any, HfSpan]:
    """Without experts: rounding may choose another one, where two are as good."""
    dense = {"num_experts": 1, "num_experts_per_tok": 1} if kind == "jamba" else {}
    model = random_model(tiny_config(kind, **dense))
    span = load_span(ModelTensors(model), SPAN, torch.float32)
    assert isinstance(span, HfSpan)
    return model, span


@pytest.fixture(scope="module")
def lfm2() -> tuple[Any, HfSpan]:
    return loaded("lfm2")


def mixers(span: HfSpan) -> list[StateMixer]:
    modules = [span.attention_module(layer) for layer in span.layers if span.has_state(layer)]
    found = [module.forward for module in modules if isinstance(module.forward, StateMixer)]
    assert found
    return found


def stateful(span: HfSpan, sessions: int, tokens: int = 4096) -> StatefulCache:
    cache = span.cache_for(tokens, sessions)
    assert isinstance(cache, StatefulCache)
    return cache


class Text:
    """What a session should hold: its committed tokens, and of each draft slot its parent and token."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.tree: dict[int, tuple[int, int]] = {}

    def path(self, slot: int) -> list[int]:
        slots: list[int] = []
        while slot >= 0:
            slots.insert(0, slot)
            slot = self.tree[slot][0]
        return slots

    def descends(self, slot: int, ancestor: int) -> bool:
        return ancestor in self.path(slot)

    def cut(self, keep: Callable[[int], bool]) -> None:
        self.tree = {slot: node for slot, node in self.tree.items() if keep(slot)}


class Random:
    """Random steps of a few sessions on one span, each row of which is compared with transformers' on its text."""

    def __init__(self, kind: str, seed: int, by_levels: bool) -> None:
        """`by_levels`: transformers' modules run and tree level by level, as without compiled kernels."""
        self.model, self.span = loaded(kind)
        for mixer in mixers(self.span):
            assert (mixer.one_call is None) == (kind == "jamba")
            if by_levels:
                mixer.one_call = None
        self.tolerance = TOLERANCES.get(kind, 3e-4)
        self.rng = random.Random(seed)
        self.cache = stateful(self.span, 8)
        self.texts: dict[bytes, Text] = {}
        self.names = (str(i).encode() for i in range(1000))
        self.done: dict[str, int] = {}

    def count(self, what: str) -> None:
        self.done[what] = self.done.get(what, 0) + 1

    def open(self) -> None:
        name = next(self.names)
        self.cache.open(name, 200)
        self.texts[name] = Text([])

    def close(self, name: bytes) -> None:
        self.cache.close(name)
        del self.texts[name]

    def step(self, names: list[bytes]) -> None:
        """A batch with a step of each of these sessions."""
        requests, tokens, paths = [], [], []
        for name in names:
            request, new, rows = self._request(name, self.texts[name])
            requests.append(request)
            tokens += new
            paths += rows
        hidden = self.span.embed(tokens)
        plan = self.cache.schedule(requests)
        for layer in SPAN:
            hidden = self.span.forward(hidden, plan, self.cache, layer, layer + 1)
        logits = self.span.logits(hidden)
        for row, path in zip(logits, paths, strict=True):
            assert distance(row, hf_logits(self.model, path)[-1]) <= self.tolerance, (self.done, requests)

    def _request(self, name: bytes, text: Text) -> tuple[StepRequest, list[int], list[list[int]]]:
        rng, before = self.rng, len(text.tokens)
        commit = text.path(rng.choice(list(text.tree))) if text.tree and rng.random() < 0.6 else []
        commit = commit[: rng.randint(0, len(commit))]
        text.tokens += [text.tree[slot][1] for slot in commit]
        if commit:
            text.cut(lambda slot: text.descends(slot, commit[-1]) and slot != commit[-1])
            text.tree = {
                slot: (-1 if parent == commit[-1] else parent, token) for slot, (parent, token) in text.tree.items()
            }
        causal = rng.choice((0, 1, 1, 1, 2, 7, 12, 33, 40) if before < 120 else (0, 1))
        new = [rng.randrange(3, 250) for _ in range(causal)]
        paths = [[*text.tokens, *new[: i + 1]] for i in range(causal)]
        text.tokens += new
        if causal:
            text.tree = {}
        free = [slot for slot in range(40) if slot not in text.tree]
        slots = rng.sample(free, rng.randint(0 if causal or commit else 1, 6))
        parents = []
        for slot in slots:
            parents.append(rng.choice([-1, *text.tree, *text.tree]))
            text.tree[slot] = (parents[-1], rng.randrange(3, 250))
            new.append(text.tree[slot][1])
            paths.append([*text.tokens, *(text.tree[s][1] for s in text.path(slot))])
        self.count("commits" if commit else "steps")
        return StepRequest(name, before, causal, parents, slots, commit), new, paths

    def disturb(self, name: bytes) -> None:
        text, choice = self.texts[name], self.rng.random()
        if choice < 0.3 and text.tree:
            dropped = self.rng.choice(list(text.tree))
            self.cache.prune(name, [dropped])
            text.cut(lambda slot: not text.descends(slot, dropped))
        elif choice < 0.6:
            self._roll_back(name, text)
        elif choice < 0.75:
            self._fork(name, text)
        elif choice < 0.85:
            self._transfer(name, text)

    def _roll_back(self, name: bytes, text: Text) -> None:
        length = self.rng.randint(max(0, len(text.tokens) - 50), len(text.tokens))
        if not self.cache.states_of(name).reachable(length):
            with pytest.raises(ActivationLogEvicted):
                self.cache.rollback(name, length)
            self.count("refused")
            return
        self.cache.rollback(name, length)
        self.texts[name] = Text(text.tokens[:length])
        self.count("rollbacks")

    def _fork(self, name: bytes, text: Text) -> None:
        length = self.cache.reusable(name, self.rng.randint(0, len(text.tokens)), self.rng.choice((1, 16)))
        if length:
            if self.rng.random() < 0.5:
                self.cache.freeze_prefix(name, length)
                del self.texts[name]
            child = next(self.names)
            self.cache.fork(name, child, 200, length)
            self.texts[child] = Text(text.tokens[:length])
            if name not in self.texts:
                self.cache.close(name)
            self.count("forks")

    def _transfer(self, name: bytes, text: Text) -> None:
        tokens = len(text.tokens) - self.rng.choice((0, 0, 1))
        if tokens <= 0 or not self.cache.states_of(name).reachable(tokens):
            return
        transfer, heir = LayerTransfer(self.cache, SPAN), next(self.names)
        read = transfer.reader(name, tokens)
        self.cache.open(heir, 200)
        self.cache.import_blocks(heir, tokens)
        write = transfer.writer(heir, tokens, SPAN)
        units = [(layer, unit) for layer in SPAN for unit in range(transfer.units(layer, tokens))]
        self.rng.shuffle(units)
        for layer, unit in units:
            write(layer, unit, read(layer, unit, 1))
        write.finish()
        self.texts[heir] = Text(text.tokens[:tokens])
        self.close(name)
        self.count("transfers")


@pytest.mark.slow
@pytest.mark.parametrize("by_levels", [False, True], ids=["one call", "by levels"])
@pytest.mark.parametrize(
    ("kind", "seed"), [("lfm2", 0), ("lfm2", 1), ("qwen3_next", 0), ("bamba", 0), ("jamba", 1), ("minimax", 0)]
)
def test_any_order_of_steps_gives_what_transformers_gives(kind: str, seed: int, by_levels: bool) -> None:
    run = Random(kind, seed, by_levels)
    for _ in range(30):
        while len(run.texts) < 3:
            run.open()
        names = run.rng.sample(list(run.texts), run.rng.randint(1, 3))
        run.step(names)
        if run.rng.random() < 0.5:
            run.disturb(run.rng.choice(list(run.texts)))
        for name in [name for name, text in run.texts.items() if len(text.tokens) > 150]:
            run.close(name)
        run.cache.check_integrity()
    assert {"commits", "steps", "rollbacks"} <= set(run.done)


def test_a_long_session_goes_back_as_far_as_states_are_kept(lfm2: tuple[Any, HfSpan]) -> None:
    _, span = lfm2
    cache = stateful(span, 1)
    cache.open(b"a", 2000)
    for done in range(600):
        span.forward(torch.randn(1, 64), cache.schedule([StepRequest(b"a", done)]), cache)
    states = cache.states_of(b"a")
    assert len(states.segments) == MAX_SEGMENTS
    assert all(states.reachable(length) for length in (0, *range(600 - 128, 601)))
    assert not states.reachable(300)
    with pytest.raises(ActivationLogEvicted, match="after 300 of 600 tokens"):
        cache.rollback(b"a", 300)
    assert cache.length(b"a") == 600
    assert cache.reusable(b"a", 320, 32) == 0
    assert cache.reusable(b"a", 599, 32) == 576
    cache.rollback(b"a", 0)
    assert cache.length(b"a") == 0


def test_memory_of_states_is_counted(lfm2: tuple[Any, HfSpan]) -> None:
    _, span = lfm2
    cache = stateful(span, 3, tokens=64)
    assert cache.state_bytes == 3 * cache.session_bytes
    for name in (b"a", b"b", b"c"):
        assert cache.free_tokens
        cache.open(name, 16)
    assert cache.free_tokens == 0
    with pytest.raises(OutOfMemory, match="recurrent states"):
        cache.open(b"d", 1)
    span.forward(torch.randn(8, 64), cache.schedule([StepRequest(b"a", 0, 8)]), cache)
    cache.freeze_prefix(b"a", 8)
    assert cache.free_tokens  # a cached prefix makes way
    with pytest.raises(OutOfMemory, match="recurrent states"):
        cache.fork(b"a", b"d", 16)
    cache.close(b"b")
    cache.fork(b"a", b"d", 16)
    for name in (b"a", b"c", b"d"):
        cache.close(name)
    cache.check_integrity()
    assert cache.free_tokens == 64


def test_what_a_session_keeps_is_within_what_is_counted(lfm2: tuple[Any, HfSpan]) -> None:
    _, span = lfm2
    cache = stateful(span, 1)
    cache.open(b"a", 2000)
    rng, done = random.Random(3), 0
    while done < 1200:
        rows = rng.choice((1, 1, 1, 31, 64, 100))
        slots = range(rng.randint(0, 20))
        request = StepRequest(b"a", done, rows, [-1] * len(slots), slots)
        span.forward(torch.randn(request.rows, 64), cache.schedule([request]), cache)
        done += rows
        states = cache.states_of(b"a")
        snapshots = {id(s): s for s in (states.head, *(segment.start for segment in states.segments))}.values()
        rows_kept = [*states.tree.values(), *(row for segment in states.segments for row in segment.rows)]
        tensors = [t for s in snapshots for state in s.layers.values() for t in state.values()]
        tensors += [t for row in rows_kept for t in row.layers.values()]
        assert sum(t.nbytes for t in tensors) <= cache.session_bytes
    slots = range(MAX_TREE_ROWS + 1)
    too_many = StepRequest(b"a", done, 0, [-1] * len(slots), slots)
    with pytest.raises(InvalidRequest, match="draft rows"):
        cache.schedule([too_many])


# --- bytes from strangers -------------------------------------------------------------------------------------------


@pytest.fixture
def incoming(lfm2: tuple[Any, HfSpan]) -> tuple[StatefulCache, LayerTransfer, dict[int, bytearray]]:
    """A cache with an empty session "b" of 40 imported tokens, and the states of layers that "a" would send."""
    _, span = lfm2
    cache = stateful(span, 2)
    cache.open(b"a", 64)
    cache.open(b"b", 64)
    for start, rows in ((0, 37), (37, 3)):
        span.forward(torch.randn(rows, 64), cache.schedule([StepRequest(b"a", start, rows)]), cache)
    cache.import_blocks(b"b", 40)
    transfer = LayerTransfer(cache, SPAN)
    read = transfer.reader(b"a", 40)
    return cache, transfer, {layer: bytearray(read(layer, 0, transfer.units(layer, 40))) for layer in cache.states}


def test_a_state_that_was_transferred_is_the_same(incoming: Any, lfm2: tuple[Any, HfSpan]) -> None:
    cache, transfer, bodies = incoming
    write = transfer.writer(b"b", 40, SPAN)
    read = transfer.reader(b"a", 40)
    for layer in SPAN:
        write(layer, 0, bytes(bodies[layer]) if layer in bodies else read(layer, 0, transfer.units(layer, 40)))
    write.finish()
    row = torch.randn(1, 64)
    ours = [lfm2[1].forward(row, cache.schedule([StepRequest(name, 40)]), cache) for name in (b"a", b"b")]
    assert distance(ours[1], ours[0]) < 1e-5


def spoil(body: bytearray, what: str) -> bytearray:
    match what:
        case "too many rows":
            body[:4] = (97).to_bytes(4, "little")
        case "most rows":
            body[:4] = b"\xff" * 4
        case "not finite":
            body[4:8] = b"\x00\x00\xc0\x7f"
        case "too long":
            body += bytes(STATE_UNIT)
        case "half a unit":
            del body[STATE_UNIT // 2 :]
    return body


@pytest.mark.parametrize("what", ["too many rows", "most rows", "not finite", "too long", "half a unit"])
def test_bytes_that_are_no_state_are_refused(incoming: Any, what: str) -> None:
    cache, transfer, bodies = incoming
    write = transfer.writer(b"b", 40, SPAN)
    first = min(bodies)
    with pytest.raises(InvalidRequest):
        write(first, 0, bytes(spoil(bodies[first], what)))
    with pytest.raises(InvalidRequest, match="missing"):
        write.finish()
    cache.rollback(b"b", 0)
    assert cache.states_of(b"b").length == 0


def test_states_of_different_lengths_are_refused(incoming: Any) -> None:
    cache, transfer, bodies = incoming
    first, second = sorted(bodies)[:2]
    write = transfer.writer(b"b", 40, SPAN)
    write(first, 0, bytes(bodies[first]))
    bodies[second][:4] = (1).to_bytes(4, "little")
    with pytest.raises(InvalidRequest, match="1 rows after it"):
        write(second, 0, bytes(bodies[second]))
    assert cache.states_of(b"b").length == 0


def test_random_bytes_are_refused_or_give_a_state_of_the_right_shape(incoming: Any) -> None:
    _, transfer, bodies = incoming
    rng = random.Random(5)
    for _ in range(300):
        write = transfer.writer(b"b", 40, SPAN)
        for layer, body in bodies.items():
            changed = bytearray(body)
            for _ in range(rng.randint(1, 4)):
                changed[rng.randrange(0, 60)] = rng.randrange(256)
            try:
                write(layer, rng.choice((0, 0, 0, 1, -1, 1 << 40)), bytes(changed[: rng.choice((None, 10))]))
            except InvalidRequest:
                break


def test_nothing_is_read_of_what_is_not_kept(lfm2: tuple[Any, HfSpan]) -> None:
    _, span = lfm2
    cache = stateful(span, 1)
    cache.open(b"a", 500)
    for start in range(0, 320, 64):
        span.forward(torch.randn(64, 64), cache.schedule([StepRequest(b"a", start, 64)]), cache)
    transfer = LayerTransfer(cache, SPAN)
    with pytest.raises(ActivationLogEvicted):
        transfer.reader(b"a", 70)
    with pytest.raises(InvalidRequest):
        transfer.reader(b"a", 400)
