"""The parts of a tokenizer, independent of the file format; `tokenizer.hf` and `tokenizer.gguf` read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType

from tokenizers import AddedToken, Tokenizer, processors

from swarm.errors import CorruptModel

MAX_TOKENS = 1 << 20  # of a vocabulary; the largest known have 262,144
MAX_TOKEN = 2048  # bytes of one
_MAX_ADDED = 1 << 16  # the library takes 10 us for each


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """`special`: the named tokens a chat template may use (`bos_token`, `eos_token`, ...). `tool_template`: the chat
    template to use with tools, if it is another one.
    """

    tokenizer: Tokenizer
    chat_template: str | None = None
    special: Mapping[str, str] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    tool_template: str | None = None


def wrap_with(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make `encode` add `bos` before a text and `eos` after it, unless None."""
    single = " ".join(([f"{bos}:0"] if bos else []) + ["$A:0"] + ([f"{eos}:0"] if eos else []))
    named = [(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=named)


def add_tokens(tokenizer: Tokenizer, control: list[str], user_defined: list[str]) -> None:
    """Match these as single tokens anywhere in a text; only control tokens are skipped when decoding.

    Raises ValueError.
    """
    if len(control) + len(user_defined) > _MAX_ADDED:
        raise ValueError(f"{len(control) + len(user_defined)} added tokens")
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in control])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in user_defined])


class MalformedTokenizer:  # used as `with MalformedTokenizer(file):`
    """Turns the errors of the `tokenizers` library into CorruptModel.

    The library raises ValueError and plain `Exception`, of which exactly that class is caught and no other subclass. A
    panic of its Rust code arrives as a BaseException whose class cannot be imported.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and (kind is Exception or issubclass(kind, ValueError) or is_panic(kind)):
            raise CorruptModel(f"{self._what} is malformed ({error!s:.300}); fetch the model again") from None


def is_panic(kind: type[BaseException]) -> bool:
    """Whether an exception is a panic of Rust code."""
    return kind.__name__ == "PanicException" and not issubclass(kind, Exception)
