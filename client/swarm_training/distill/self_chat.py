"""Chats that a model writes with itself, many in a batch: user turns too, sampled after its own chat template.

Owns the states of one chat (template, user, answer, another turn or the end) and the batching of many on one span.
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
from swarm_training.distill.policy import ChatPolicy
from swarm_training.distill.seed_prompts import SEED_PROMPTS, SeedPrompt
from swarm_training.distill.tap_rows import tapped_forward
from swarm_training.distill.whole_prompts import whole_prompt

_PLACEHOLDER = "\x02turn\x03"


@dataclass(slots=True)
class _Chat:
    """An unfinished chat. `pending`: tokens that the span has not run yet."""

    policy: ChatPolicy
    key: bytes
    rng: random.Random
    turns: int
    template: Sequence[Sequence[int]]  # its tokens before the user and before the answer, alternately
    temperature: float
    tokens: list[int] = field(default_factory=list)
    origin: list[int] = field(default_factory=list)
    tops: list[tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=list)  # (position, ids, logprobs)
    taps: list[torch.Tensor] = field(default_factory=list)  # [rows, bytes] of each run
    pending: list[int] = field(default_factory=list)
    role: int = USER
    part: int = 0
    turn_tokens: int = 0
    done: bool = False

    def ask(self, tokens: Sequence[int]) -> None:
        """Begin with a whole request: the template, up to where the answer begins."""
        self.add_template(tokens)
        self.role, self.part = ANSWER, 1

    def add_template(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.origin += [GIVEN] * len(tokens)
        self.pending += tokens

    def add_sample(self, ids: torch.Tensor, logprobs: torch.Tensor, ends: frozenset[int]) -> None:
        """Sample one of `ids [k]` with `logprobs [k]`, likeliest first; this may end the turn."""
        policy = self.policy
        temperature = policy.user_temperature if self.role == USER else self.temperature
        token = self._sample(ids, logprobs, temperature)
        self.tops.append((len(self.tokens), ids[:TOP], logprobs[:TOP]))
        if token not in ends or self.role == ANSWER:
            self.tokens.append(token)
            self.origin.append(self.role)
            self.pending.append(token)
            self.turn_tokens += 1
        else:
            self.tops.pop()  # the template writes the end of a user's turn
        if token in ends or self._turn_is_over() or len(self.tokens) >= policy.max_chat_tokens:
            self._next_turn(ended=token in ends)

    def _turn_is_over(self) -> bool:
        """Whether the turn has its maximum length, or repeats itself and so has nothing more to teach."""
        policy, size = self.policy, self.turn_tokens
        if size >= (policy.max_user_tokens if self.role == USER else policy.max_answer_tokens):
            return True
        return size % policy.loop_check_tokens == 0 and _loops(self.tokens[-size:], policy.loop_tokens)

    def _sample(self, ids: torch.Tensor, logprobs: torch.Tensor, temperature: float) -> int:
        if temperature == 0:
            return int(ids[0])
        weights = (logprobs / temperature).exp().tolist()
        return int(ids[self.rng.choices(range(len(weights)), weights)[0]])

    def _next_turn(self, ended: bool) -> None:
        if self.role == USER and self.turn_tokens < self.policy.min_user_tokens:
            self.tokens.clear()
        self.part += 1
        last = self.part >= len(self.template) or len(self.tokens) >= self.policy.max_chat_tokens or not self.tokens
        if last or (self.role == ANSWER and (not ended or self.part >= 2 * self.turns)):
            self.done = True
            return
        given = self.template[self.part]
        self.add_template(given[1:] if self.role == ANSWER else given)  # the answer's end token is there already
        self.role, self.turn_tokens = (ANSWER if self.role == USER else USER), 0

    def finished(self) -> RecordedChat | None:
        """The chat, or None if it was dropped."""
        size = len(self.tokens)
        if not size:
            return None
        ids, logprobs = torch.zeros(size, TOP, dtype=torch.int32), torch.zeros(size, TOP, dtype=torch.float16)
        for position, top, logprob in self.tops:
            ids[position], logprobs[position] = top.int(), logprob.half()
        return RecordedChat(
            torch.tensor(self.tokens, dtype=torch.int32),
            torch.tensor(self.origin).byte(),
            ids,
            logprobs,
            self._tapped(),
        )

    def _tapped(self) -> torch.Tensor:
        """`[n, bytes]`; the last token may not have been run, which nobody asks for."""
        rows = torch.cat(self.taps)
        return torch.cat((rows, rows.new_zeros(max(0, len(self.tokens) - len(rows)), rows.shape[1])))[
            : len(self.tokens)
        ]


class ChatGenerator:
    """`for chat in ChatGenerator(...).write()`: an endless stream of finished chats. `span` is the whole model."""

    def __init__(
        self,
        span: Span,
        tokenizer: ChatTokenizer,
        batch: int,
        seed: int,
        policy: ChatPolicy = ChatPolicy(),
        taps: Sequence[int] = (),
    ) -> None:
        """`taps`: layers whose input is recorded too, ascending. Raises UnsupportedModel for a model without a chat
        template, OutOfMemory."""
        self._span, self._taps, self._tokenizer = span, taps, tokenizer
        self._ends = frozenset(tokenizer.eos_token_ids)
        self._templates = [_template(tokenizer, seed_prompt) for seed_prompt in SEED_PROMPTS]
        self._weights = [seed_prompt.weight for seed_prompt in SEED_PROMPTS]
        self._policy, self._reserved = policy, policy.max_chat_tokens + policy.max_template_tokens
        self._batch, self._seed, self._started = batch, seed, 0
        self._cache = span.new_cache(batch * self._reserved)
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
        template = rng.choices(self._templates, self._weights)[0]
        turns = 2 if rng.random() < self._policy.second_turn_prob else 1
        chat = _Chat(
            self._policy,
            number.to_bytes(8, "little"),
            rng,
            turns,
            template,
            rng.choice(self._policy.answer_temperatures),
        )
        self._cache.open(chat.key, self._reserved)
        if rng.random() < self._policy.whole_prompt_prob:
            before, after, *_ = _template(self._tokenizer, SeedPrompt(None, whole_prompt(rng), 1.0))
            chat.ask([*before, *after])
        else:
            chat.add_template(template[0])
        return chat

    def _step(self) -> None:
        """Run the pending tokens of all chats and sample the next token of each."""
        live, span = self._live, self._span
        requests = [StepRequest(c.key, len(c.tokens) - len(c.pending), len(c.pending)) for c in live]
        tokens = [token for chat in live for token in chat.pending]
        metadata = self._cache.schedule(requests)
        hidden, tapped = tapped_forward(span, span.embed(tokens), metadata, self._cache, self._taps)
        for chat, rows in zip(live, torch.split(tapped, [len(chat.pending) for chat in live]), strict=True):
            chat.taps.append(rows)
        ends = torch.from_numpy(np.cumsum([len(chat.pending) for chat in live]) - 1)
        ids, logprobs = top_tokens(span.logits(hidden[ends]), 4 * TOP)
        for chat, top, logprob in zip(live, ids.cpu(), logprobs.cpu(), strict=True):
            chat.pending = []
            chat.add_sample(top, logprob, self._ends)


def _template(tokenizer: ChatTokenizer, seed: SeedPrompt) -> list[list[int]]:
    """The template's own tokens before each of two user and answer turns; the first ends with the seed's user text."""
    system = [{"role": "system", "content": seed.system}] if seed.system else []
    turns = [{"role": role, "content": _PLACEHOLDER} for role in ("user", "assistant", "user")]
    text = tokenizer.render_chat([*system, *turns])
    parts = text.split(_PLACEHOLDER)
    if len(parts) != 4:
        raise UnsupportedModel("this model's chat template rewrites messages, so it cannot write chats with itself")
    parts[0] += seed.user
    return [tokenizer.encode(part, add_special_tokens=False) for part in parts]


def _loops(tokens: Sequence[int], window: int) -> bool:
    """Whether the last `window` tokens only repeat a shorter run."""
    last = list(tokens[-window:])
    return len(last) == window and any(last[p:] == last[:-p] for p in range(1, window // 3))
