"""Text to token ids within a time: a tokenizer's own regular expressions can take for ever on a text made for them.

Owns that bound. The library's matching cannot be interrupted, so a text that takes too long is left behind in its
thread, and the tokenizer refuses further texts until that thread is through: one core at most is lost to it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import TracebackType

from tokenizers import Tokenizer

from swarm.errors import CorruptModel, InvalidRequest
from swarm_kernels.tokenizer.parts import MalformedTokenizer


@dataclass(frozen=True, slots=True)
class EncodePolicy:
    """Patience against the harm of a hostile tokenizer: honest ones do a million characters a second and core."""

    base_s: float = 10.0
    s_per_character: float = 2e-5


POLICY = EncodePolicy()


@dataclass(slots=True)
class _Encoding:
    """One text on its way, and what became of it."""

    text: str
    add_special_tokens: bool
    ids: list[int] = field(default_factory=list)
    error: BaseException | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = error
        return True  # raised where it is waited for


class BoundedEncoder:
    """Encodes with one tokenizer, from any thread."""

    def __init__(self, tokenizer: Tokenizer, policy: EncodePolicy = POLICY) -> None:
        self._tokenizer = tokenizer
        self._policy = policy
        self._stuck: threading.Thread | None = None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Raises InvalidRequest for a text that is no Unicode, CorruptModel if the tokenizer fails or is too slow."""
        if self._stuck is not None and self._stuck.is_alive():
            raise CorruptModel("the model's tokenizer is still at work on an earlier text; use another model")
        encoding = _Encoding(text, add_special_tokens)
        thread = threading.Thread(target=self._run, args=(encoding,), name="encode", daemon=True)
        thread.start()
        limit_s = self._policy.base_s + self._policy.s_per_character * len(text)
        thread.join(limit_s)
        if thread.is_alive():
            self._stuck = thread
            raise CorruptModel(
                f"the model's tokenizer takes more than {limit_s:.0f} s for this text; use another model"
            )
        if isinstance(encoding.error, TypeError | UnicodeEncodeError):  # lone surrogates
            raise InvalidRequest("the text is not valid Unicode") from None
        if encoding.error is not None:
            with MalformedTokenizer("the model's tokenizer"):
                raise encoding.error
        return encoding.ids

    def _run(self, encoding: _Encoding) -> None:
        with (
            encoding
        ):  # `encode` of one text would hold the GIL, for seconds if it is long; this takes half the time too
            batch = [encoding.text]
            encoding.ids = self._tokenizer.encode_batch_fast(batch, add_special_tokens=encoding.add_special_tokens)[
                0
            ].ids
