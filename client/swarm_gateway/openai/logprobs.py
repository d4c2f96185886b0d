"""Log-probabilities in the two forms that OpenAI's API has for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swarm.types import TokenLogprobs
from swarm_client import SwarmClient
from swarm_gateway.openai.answers import ChatLogprobs, ChosenLogprob, TextLogprobs, TokenLogprob

_LEAST = -9999.0  # for -inf, which JSON does not have; as OpenAI
_REPLACEMENT = "\ufffd"


class TokenTexts:
    """The text of single tokens of one answer; the same ones come again and again among the likeliest.

    `as_ids`: name them by their ids, since several may have one text (parts of a character).
    """

    def __init__(self, client: SwarmClient, as_ids: bool = False) -> None:
        self._tokenizer = client.tokenizer
        self._as_ids = as_ids
        self._texts: dict[int, str] = {}

    def of(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._tokenizer.decode([token], skip_special_tokens=False)
        return text

    def name(self, token: int) -> str:
        """What stands for the token in an answer."""
        return f"token_id:{token}" if self._as_ids else self.of(token)

    def chat(self, entries: Iterable[TokenLogprobs]) -> ChatLogprobs | None:
        """None if there are none."""
        content = [
            ChosenLogprob(*self._entry(e.token, e.logprob), [TokenLogprob(*self._entry(t, p)) for t, p in e.top])
            for e in entries
        ]
        return ChatLogprobs(content) if content else None

    def _entry(self, token: int, logprob: float) -> tuple[str, float, list[int] | None]:
        text = self.of(token)
        return self.name(token), max(logprob, _LEAST), None if _REPLACEMENT in text else list(text.encode())


class TextLogprobsWriter:
    """Completions' form for one choice; offsets count the characters of the tokens' texts."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._offset = 0

    def prompt(self, ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> TextLogprobs:
        """An echoed prompt: `entries` are those of the tokens after the first."""
        found = TextLogprobs()
        for token, entry in zip(ids, (None, *entries), strict=False):
            self._add(found, token, entry)
        return found

    def tokens(self, entries: Iterable[TokenLogprobs]) -> TextLogprobs:
        found = TextLogprobs()
        for entry in entries:
            self._add(found, entry.token, entry)
        return found

    def _add(self, found: TextLogprobs, token: int, entry: TokenLogprobs | None) -> None:
        found.tokens.append(self._texts.name(token))
        found.text_offset.append(self._offset)
        found.token_logprobs.append(max(entry.logprob, _LEAST) if entry else None)
        found.top_logprobs.append(self._top(entry) if entry else None)
        self._offset += len(self._texts.of(token))

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """Of several tokens with one text the likeliest, which comes first."""
        found: dict[str, float] = {}
        for token, logprob in entry.top:
            found.setdefault(self._texts.name(token), max(logprob, _LEAST))
        return found


def joined(parts: Iterable[TextLogprobs]) -> TextLogprobs:
    whole = TextLogprobs()
    for part in parts:
        whole.tokens += part.tokens
        whole.token_logprobs += part.token_logprobs
        whole.top_logprobs += part.top_logprobs
        whole.text_offset += part.text_offset
    return whole
