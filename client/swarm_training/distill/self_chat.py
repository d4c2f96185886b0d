"""The model writes chats with itself, many at once: the user's turns too, sampled from its own chat template.

Owns the life of one chat (template, user, answer, another turn or the end) and the batching of many on one span. Knows
neither where the chats are kept nor what they are for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from swarm.errors import UnsupportedModel
from swarm_kernels.draft.models import top_tokens
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.runtime.span import Span
from swarm_kernels.tokenizer.tokenizer import ChatTokenizer
from swarm_training.distill.corpus import ANSWER, GIVEN, TOP, USER, RecordedChat
from swarm_training.distill.seed_prompts import SEED_PROMPTS, SeedPrompt

MAX_TURN = {USER: 160, ANSWER: 224}
MAX_CHAT = 640
MIN_USER = 4
SECOND_TURN = 0.3  # of the chats
USER_TEMPERATURE = 0.8
ANSWER_TEMPERATURES = (0.0, 0.0, 0.6, 1.0)  # drawn evenly: most people generate greedily
LOOP = 48
"""An answer whose last `LOOP` tokens only repeat a shorter run has nothing more to teach."""

_MARK = "\x02turn\x03"


@dataclass(slots=True)
class _Chat:
    """One chat in the making. `pending`: tokens whose rows the span has not run yet."""

    key: bytes
    rng: random.Random
    turns: int
    between: Sequence[Sequence[int]]  # the template's tokens: before the user, before the answer, alternately
    temperature: float
    tokens: list[int] = field(default_factory=list)
    origin: list[int] = field(default_factory=list)
    tops: list[tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=list)  # (place, ids, log-probabilities)
    pending: list[int] = field(default_factory=list)
    speaker: int = USER
    part: int = 0
    said: int = 0  # tokens of this turn
    done: bool = False

    def give(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.origin += [GIVEN] * len(tokens)
        self.pending += tokens

    def speak(self, ids: torch.Tensor, logprobs: torch.Tensor, ends: frozenset[int]) -> None:
        """The teacher expects `ids [k]` with `logprobs [k]`, likeliest first: draw one, or change the turn."""
        temperature = USER_TEMPERATURE if self.speaker == USER else self.temperature
        token = self._draw(ids, logprobs, temperature)
        self.tops.append((len(self.tokens), ids[:TOP], logprobs[:TOP]))
        if token not in ends or self.speaker == ANSWER:
            self.tokens.append(token)
            self.origin.append(self.speaker)
            self.pending.append(token)
            self.said += 1
        else:
            self.tops.pop()  # the template writes the end of a user's turn
        over = self.said >= MAX_TURN[self.speaker] or (self.said % 16 == 0 and _loops(self.tokens[-self.said :]))
        if token in ends or over or len(self.tokens) >= MAX_CHAT:
            self._next_turn(ended=token in ends)

    def _draw(self, ids: torch.Tensor, logprobs: torch.Tensor, temperature: float) -> int:
        if temperature == 0:
            return int(ids[0])
        weights = (logprobs / temperature).exp().tolist()
        return int(ids[self.rng.choices(range(len(weights)), weights)[0]])

    def _next_turn(self, ended: bool) -> None:
        if self.speaker == USER and self.said < MIN_USER:
            self.tokens.clear()
        self.part += 1
        last = self.part >= len(self.between) or len(self.tokens) >= MAX_CHAT or not self.tokens
        if last or (self.speaker == ANSWER and (not ended or self.part >= 2 * self.turns)):
            self.done = True
            return
        given = self.between[self.part]
        self.give(given[1:] if self.speaker == ANSWER else given)  # an answer's own end token opens what follows it
        self.speaker, self.said = (ANSWER if self.speaker == USER else USER), 0

    def finished(self) -> RecordedChat | None:
        """None if nothing worth keeping came of it."""
        size = len(self.tokens)
        if not size:
            return None
        ids, logprobs = torch.zeros(size, TOP, dtype=torch.int32), torch.zeros(size, TOP, dtype=torch.float16)
        for place, top, logprob in self.tops:
            ids[place], logprobs[place] = top.int(), logprob.half()
        return RecordedChat(
            torch.tensor(self.tokens, dtype=torch.int32), torch.tensor(self.origin).byte(), ids, logprobs
        )


class ChatGenerator:
    """`for chat in Writer(...).write()`: an endless stream of finished chats. `span` is the whole model."""

    def __init__(self, span: Span, tokenizer: ChatTokenizer, batch: int, seed: int) -> None:
        """Raises UnsupportedModel for a model without a chat template, OutOfMemory."""
        self._span = span
        self._ends = frozenset(tokenizer.eos_token_ids)
        self._openings = [_template(tokenizer, opening) for opening in SEED_PROMPTS]
        self._weights = [opening.weight for opening in SEED_PROMPTS]
        self._batch, self._seed, self._started = batch, seed, 0
        self._cache = span.new_cache(batch * (MAX_CHAT + 192))
        self._live: list[_Chat] = []

    def write(self) -> Iterator[RecordedChat]:
        while True:
            while len(self._live) < self._batch:
                self._live.append(self._start())
            self._step()
            for chat in [chat for chat in self._live if chat.done]:
                self._cache.close(chat.key)
                self._live.remove(chat)
                finished = chat.finished()
                if finished is not None:
                    yield finished

    def _start(self) -> _Chat:
        number = self._started
        self._started += 1
        rng = random.Random(f"{self._seed}/{number}")
        between = rng.choices(self._openings, self._weights)[0]
        turns = 2 if rng.random() < SECOND_TURN else 1
        chat = _Chat(number.to_bytes(8, "little"), rng, turns, between, rng.choice(ANSWER_TEMPERATURES))
        self._cache.open(chat.key, MAX_CHAT + 192)
        chat.give(between[0])
        return chat

    def _step(self) -> None:
        """Run every chat's pending tokens and let each say its next."""
        live, span = self._live, self._span
        requests = [StepRequest(c.key, len(c.tokens) - len(c.pending), len(c.pending)) for c in live]
        tokens = [token for chat in live for token in chat.pending]
        metadata = self._cache.schedule(requests)
        hidden = span.forward(span.embed(tokens), metadata, self._cache)
        ends = torch.from_numpy(np.cumsum([len(chat.pending) for chat in live]) - 1)
        ids, logprobs = top_tokens(span.logits(hidden[ends]), 4 * TOP)
        for chat, top, logprob in zip(live, ids.cpu(), logprobs.cpu(), strict=True):
            chat.pending = []
            chat.speak(top, logprob, self._ends)


def _template(tokenizer: ChatTokenizer, opening: SeedPrompt) -> list[list[int]]:
    """The template's own tokens between the turns of two rounds; the first ends with the user's given words."""
    system = [{"role": "system", "content": opening.system}] if opening.system else []
    turns = [{"role": role, "content": _MARK} for role in ("user", "assistant", "user")]
    text = tokenizer.render_chat([*system, *turns])
    parts = text.split(_MARK)
    if len(parts) != 4:
        raise UnsupportedModel("this model's chat template rewrites messages, so it cannot write chats with itself")
    parts[0] += opening.user
    return [tokenizer.encode(part, add_special_tokens=False) for part in parts]


def _loops(tokens: Sequence[int]) -> bool:
    last = list(tokens[-LOOP:])
    return len(last) == LOOP and any(last[p:] == last[:-p] for p in range(1, LOOP // 3))
