"""A chain of hops without tensors: the step rule of `messages.Step` on token lists, with every hop at its own pace."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from swarm.planner.generation.state_machine import SendStep, StepDone


def toy_model(tokens: list[int]) -> int:
    """The next token as a function of every token before it."""
    return (sum((i + 1) * t for i, t in enumerate(tokens)) * 2654435761 + 7) % 97


def toy_answer(prompt: list[int], count: int, eos: frozenset[int] = frozenset()) -> list[int]:
    tokens = list(prompt)
    while len(tokens) - len(prompt) < count:
        tokens.append(toy_model(tokens))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


@dataclass
class ToyHop:
    """Committed tokens, and for each tree slot its path of tokens below the last committed one."""

    held: list[int] = field(default_factory=list)
    tree: dict[int, list[int]] = field(default_factory=dict)
    epoch: int = 0  # the newest that has arrived
    ran: int = 0  # the newest that was run
    queue: deque[SendStep] = field(default_factory=deque)
    model: Callable[[list[int]], int] = toy_model

    def arrive(self, step: SendStep) -> None:
        if step.epoch >= self.epoch:
            self.epoch = step.epoch
            self.queue.append(step)

    def next(self) -> SendStep | None:
        while self.queue:
            step = self.queue.popleft()
            if step.epoch >= self.epoch:
                return step
        return None

    def run(self, step: SendStep) -> tuple[int, ...]:
        """What a tail would sample."""
        target = step.committed_before + len(step.commit_slots)
        assert len(self.held) >= step.committed_before, "a hop lacks tokens that the step builds on"
        if len(self.held) > target:
            assert step.epoch > self.ran, "only a new epoch truncates"
            del self.held[target:]
            self.tree.clear()
        for slot in step.commit_slots[len(self.held) - step.committed_before :]:
            path = self.tree[slot]
            assert len(path) == 1, "a committed slot must follow the last committed token"
            self.held += path
            self.tree = {s: p[1:] for s, p in self.tree.items() if p[:1] == path and len(p) > 1}
        self.ran = step.epoch
        if step.tokens:
            self.tree.clear()
            self.held += step.tokens
        samples = [self.model(self.held)] if step.tokens else []
        for token, parent, slot in zip(step.rows, step.parents, step.slots, strict=True):
            assert slot not in self.tree, "a slot is used twice"
            self.tree[slot] = [*(self.tree[parent] if parent >= 0 else []), token]
            samples.append(self.model(self.held + self.tree[slot]))
        return tuple(samples) if step.sample else ()


@dataclass
class ToyChain:
    """`hops` in a row. `send` to the first; `next_result` moves steps along in any order until one leaves the tail."""

    hops: list[ToyHop]
    rng: random.Random

    @classmethod
    def of(cls, hops: int, rng: random.Random, model: Callable[[list[int]], int] = toy_model) -> ToyChain:
        return cls([ToyHop(model=model) for _ in range(hops)], rng)

    def send(self, step: SendStep) -> None:
        self.hops[0].arrive(step)

    def drop(self, epoch: int) -> None:
        """Announce a new epoch, to some hops only: DropInFlight may be late."""
        for hop in self.hops:
            if self.rng.random() < 0.5:
                hop.epoch = max(hop.epoch, epoch)

    def next_result(self) -> StepDone | None:
        """The next result, or None when nothing is in flight."""
        while any(hop.queue for hop in self.hops):
            index = self.rng.choice([i for i, hop in enumerate(self.hops) if hop.queue])
            step = self.hops[index].next()
            if step is None:
                continue
            tokens = self.hops[index].run(step)
            if index + 1 < len(self.hops):
                self.hops[index + 1].arrive(step)
            else:
                return StepDone(step.epoch, step.step, tokens)
        return None

    def lose(self, held: int) -> None:
        """Some hops are replaced by ones that have only the first `held` tokens."""
        known = max((hop.held for hop in self.hops), key=len)[:held]
        for i, hop in enumerate(self.hops):
            hop.queue.clear()
            if self.rng.random() < 0.5:
                assert len(hop.held) >= held, "a survivor must have what has passed the whole chain"
                self.hops[i] = ToyHop(list(known), model=self.hops[i].model)
