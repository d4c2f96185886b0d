"""What the gateway must answer: transformers' own `generate`, its processors and llguidance's masks, on one machine.

Owns the random requests, the reference answers, and the comparison of an answer from HTTP with them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from reference_sampling import inverted, processors, warpers
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

from swarm.types import Sampling
from swarm_kernels.sampling.grammar import JSON_FORM
from swarm_kernels.tokenizer.tokenizer import ChatTokenizer

TOLERANCE = 1e-4  # of a log-probability
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
        "alive": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "alive"],
    "additionalProperties": False,
}
REGEX = r"(cat|catalog|dog)( (sat|ran|slept)){2,6}\."


@dataclass(frozen=True)
class Case:
    """One request. `prompt`: token ids, or messages of a chat. `fields`: of the body, beside the prompt's."""

    prompt: list[int] | list[dict[str, str]]
    fields: dict[str, Any]
    schema: dict[str, Any] | None = None
    regex: str | None = None

    @property
    def chat(self) -> bool:
        return isinstance(self.prompt[0], dict)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    @property
    def body(self) -> dict[str, Any]:
        body = {"messages" if self.chat else "prompt": self.prompt, "return_tokens_as_token_ids": True, **self.fields}
        if self.schema is not None:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": self.schema}}
        if self.regex is not None:
            body["structured_outputs"] = {"regex": self.regex}
        return body

    @property
    def top(self) -> int | None:
        """How many alternatives a token has; None without log-probabilities."""
        top: int | None = self.fields.get("top_logprobs") if self.chat else self.fields.get("logprobs")
        return top

    def sampling(self, choice: int) -> Sampling:
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty")
        given = {name: self.fields[name] for name in (*names, "presence_penalty") if name in self.fields}
        biases = tuple(sorted((int(token), bias) for token, bias in self.fields.get("logit_bias", {}).items()))
        return Sampling(**given, seed=self.fields.get("seed", 0) + choice, logit_bias=biases)


@dataclass
class Answer:
    """One choice. `logprobs`: (token, ln p, (token, ln p) of the likeliest) of each token with a text, and before them
    of the prompt's if it is echoed. `tokens`: all that were generated."""

    text: str
    finish_reason: str
    tokens: list[int]
    logprobs: list[tuple[int, float | None, list[tuple[int, float]]]] = field(default_factory=list)


class GrammarMask(LogitsProcessor):
    """llguidance's own mask, of the text so far."""

    def __init__(self, case: Case, tokenizer: ChatTokenizer, vocab: int, prompt_tokens: int) -> None:
        ll = LLTokenizer(tokenizer.to_json(), n_vocab=vocab, eos_token=list(tokenizer.eos_token_ids))
        grammar = (
            LLMatcher.grammar_from_json_schema(json.dumps(case.schema), overrides=JSON_FORM)
            if case.schema is not None
            else LLMatcher.grammar_from_regex(case.regex or "")
        )
        self.matcher, self.vocab, self.known = LLMatcher(ll, grammar), vocab, prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for token in input_ids[0, self.known :].tolist():
            assert self.matcher.consume_token(token)
        self.known = input_ids.shape[1]
        bits = allocate_token_bitmask(1, self.vocab)
        fill_next_token_bitmask(self.matcher, bits)
        allowed = np.unpackbits(bits.view(np.uint8)[0], bitorder="little")[: self.vocab].astype(bool)
        return scores.masked_fill(torch.from_numpy(~allowed), -float("inf"))


class Inverted(LogitsProcessor):
    """In place of torch's generator the random number of a seed and a place: leaves one token."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = inverted(torch.softmax(scores, -1)[0], self.seed, input_ids.shape[1])
        return torch.full_like(scores, -float("inf")).index_fill_(1, torch.tensor([token]), 0.0)


class Reference:
    """transformers' `model`, in fp32."""

    def __init__(self, model: Any, tokenizer: ChatTokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer

    def prompt_ids(self, case: Case) -> list[int]:
        if case.chat:
            return self.tokenizer.apply_chat_template(case.prompt)  # type: ignore[arg-type]
        return [int(token) for token in case.prompt]  # type: ignore[call-overload]

    def answers(self, case: Case) -> list[Answer]:
        """One for each choice."""
        return [self._answer(case, case.sampling(i)) for i in range(case.fields.get("n", 1))]

    def _answer(self, case: Case, sampling: Sampling) -> Answer:
        prompt, eos = self.prompt_ids(case), list(self.tokenizer.eos_token_ids)
        steps = processors(sampling, len(prompt))
        if case.schema is not None or case.regex is not None:
            steps.append(GrammarMask(case, self.tokenizer, self.model.config.vocab_size, len(prompt)))
        steps.extend(warpers(sampling))
        if not sampling.greedy:
            steps.append(Inverted(sampling.seed))
        ids = torch.tensor([prompt])
        made = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=case.fields["max_tokens"],
            do_sample=False,
            logits_processor=LogitsProcessorList(steps),
            eos_token_id=None if case.fields.get("ignore_eos") else eos,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = made.sequences[0, len(prompt) :].tolist()
        reason = "length"
        if tokens[-1] in eos and not case.fields.get("ignore_eos"):
            reason = "stop"
        text, tokens, reason = self._stopped(tokens, reason, case.fields.get("stop", []))
        answer = Answer(text, reason, tokens)
        if case.top is not None:
            shown = tokens[:-1] if reason == "stop" and tokens[-1] in eos else tokens
            rows = [self._entry(row[0], token, case.top) for row, token in zip(made.logits, shown, strict=False)]
            answer.logprobs = [*(self._prompt(prompt, case.top) if case.fields.get("echo") else []), *rows]
        if case.fields.get("echo"):
            answer.text = self.tokenizer.decode(prompt) + answer.text
        return answer

    def _stopped(self, tokens: list[int], reason: str, stops: Sequence[str]) -> tuple[str, list[int], str]:
        """-> text, tokens and reason of an answer that ends with the first token that completes a stop string."""
        for end in range(1, len(tokens) + 1):
            text = self.tokenizer.decode(tokens[:end])
            found = [text.index(stop) for stop in stops if stop in text]
            if found:
                return text[: min(found)], tokens[:end], "stop"
        return self.tokenizer.decode(tokens), tokens, reason

    def _prompt(self, prompt: Sequence[int], top: int) -> list[Any]:
        with torch.inference_mode():
            logits = self.model(torch.tensor([list(prompt)]), use_cache=False).logits[0]
        rows = [self._entry(row, token, top) for row, token in zip(logits, prompt[1:], strict=False)]
        return [(prompt[0], None, []), *rows]

    def _entry(self, logits: torch.Tensor, token: int, top: int) -> Any:
        row = torch.log_softmax(logits.double(), -1)
        values, ids = row.topk(top)
        return token, row[token].item(), list(zip(ids.tolist(), values.tolist(), strict=True))


def random_case(rng: random.Random, reference: Reference, max_tokens: int = 24, chat: bool | None = None) -> Case:
    """Each field is in about half of the requests; a third has a grammar. Stop strings come from the answer itself."""
    tokenizer, vocab = reference.tokenizer, reference.model.config.vocab_size
    fields: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0}

    def maybe(name: str, value: Any, chance: float = 0.5) -> None:
        if rng.random() < chance:
            fields[name] = value

    if rng.random() < 0.6:
        fields |= {"temperature": round(rng.uniform(0.3, 1.5), 2), "seed": rng.randrange(1 << 40)}
        maybe("min_p", rng.choice([0.02, 0.1]))
        maybe("top_k", rng.choice([2, 20, 100]))
        maybe("top_p", rng.choice([0.5, 0.9, 0.99]))
        maybe("n", 3, 0.4)
    maybe("repetition_penalty", rng.choice([0.9, 1.1, 1.4]))
    maybe("frequency_penalty", rng.choice([-0.5, 0.7, 1.5]))
    maybe("presence_penalty", rng.choice([-0.3, 0.6, 1.2]))
    maybe(
        "logit_bias", {str(rng.randrange(vocab)): rng.choice([-100, -2.5, 1.5, 4]) for _ in range(rng.randrange(1, 9))}
    )
    is_chat = rng.random() < 0.5 if chat is None else chat
    logprobs = rng.choice([0, 1, 5])
    if rng.random() < 0.8:
        fields |= {"logprobs": True, "top_logprobs": logprobs} if is_chat else {"logprobs": logprobs}
    prompt: Any
    if is_chat:
        words = " ".join("".join(rng.choices("abcde fg", k=5)) for _ in range(rng.randrange(1, 6)))
        prompt = [{"role": "user", "content": f"Say {words}"}]
    else:
        prompt = [rng.randrange(6, tokenizer.vocab_size) for _ in range(rng.randrange(1, 40))]
        maybe("echo", True)
    kind = rng.choice(["free", "free", "free", "free", "schema", "regex"])
    if kind == "free":
        maybe("ignore_eos", True, 0.3)
    case = Case(prompt, fields, SCHEMA if kind == "schema" else None, REGEX if kind == "regex" else None)
    return _with_stop(rng, reference, case) if rng.random() < 0.3 else case


def _with_stop(rng: random.Random, reference: Reference, case: Case) -> Case:
    bare = replace(case, fields={k: v for k, v in case.fields.items() if k not in ("n", "echo")})
    text = reference.answers(bare)[0].text
    places = [i for i in range(len(text) // 3, len(text) - 2) if "\ufffd" not in text[i : i + 2]]
    if not places:
        return case
    place = rng.choice(places)
    return replace(case, fields={**case.fields, "stop": ["no such text", text[place : place + 2]]})


def given_answers(case: Case, answer: dict[str, Any]) -> list[Answer]:
    """Out of the gateway's JSON. What an answer does not say (the tokens without log-probabilities) is left empty."""
    found = []
    for choice in answer["choices"]:
        text = choice["message"]["content"] if case.chat else choice["text"]
        made = Answer(text, choice["finish_reason"], [])
        given = choice["logprobs"]
        if given is not None and case.chat:
            for entry in given["content"]:
                top = [(_token(t["token"]), t["logprob"]) for t in entry["top_logprobs"]]
                made.logprobs.append((_token(entry["token"]), entry["logprob"], top))
        elif given is not None:
            parts = zip(given["tokens"], given["token_logprobs"], given["top_logprobs"], strict=True)
            for token, logprob, tops in parts:
                top = [(_token(t), p) for t, p in (tops or {}).items()]
                made.logprobs.append((_token(token), logprob, top))
        found.append(made)
    return found


def assert_same(case: Case, answer: dict[str, Any], expected: Sequence[Answer], where: str) -> None:
    """`answer`: the gateway's JSON."""
    given = given_answers(case, answer)
    assert len(given) == len(expected), where
    for one, wanted in zip(given, expected, strict=True):
        assert [token for token, *_ in one.logprobs] == [token for token, *_ in wanted.logprobs], where
        assert one.text == wanted.text, where
        assert one.finish_reason == wanted.finish_reason, where
        for (_, logprob, top), (_, right, right_top) in zip(one.logprobs, wanted.logprobs, strict=True):
            assert logprob == (right if right is None else pytest.approx(right, abs=TOLERANCE)), where
            assert [token for token, _ in top] == [token for token, _ in right_top], where
            assert [p for _, p in top] == pytest.approx([p for _, p in right_top], abs=TOLERANCE), where
    assert answer["usage"]["completion_tokens"] == sum(len(wanted.tokens) for wanted in expected), where


def joined_stream(case: Case, lines: str) -> dict[str, Any]:
    """The answer that the parts of a stream make."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for line in lines.split("\n"):
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        part = json.loads(line.removeprefix("data: "))
        usage = part["usage"] or usage
        for choice in part["choices"]:
            _add(
                case, choices.setdefault(choice["index"], {"logprobs": None, "text": "", "finish_reason": None}), choice
            )
    made = [choices[index] for index in sorted(choices)]
    if case.chat:
        made = [{**choice, "message": {"content": choice["text"]}} for choice in made]
    return {"choices": made, "usage": usage}


def _add(case: Case, whole: dict[str, Any], part: dict[str, Any]) -> None:
    whole["text"] += (part["delta"].get("content") or "") if case.chat else part["text"]
    whole["finish_reason"] = part["finish_reason"] or whole["finish_reason"]
    for name, values in (part["logprobs"] or {}).items():
        whole["logprobs"] = whole["logprobs"] or {}
        whole["logprobs"].setdefault(name, []).extend(values)


@cache
def _token(name: str) -> int:
    return int(name.removeprefix("token_id:"))
