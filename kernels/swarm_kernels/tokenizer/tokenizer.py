"""Text to token ids and back, chat messages to a prompt.

Owns ChatTokenizer and streaming detokenization. Uses only the `tokenizers` library: importing transformers takes
seconds, and a node or a client must start quickly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from swarm.errors import InvalidRequest, UnsupportedModel
from swarm_kernels.models.gguf import GgufSource
from swarm_kernels.models.source import ModelSource
from swarm_kernels.tokenizer.bounded_encoder import BoundedEncoder
from swarm_kernels.tokenizer.chat_template import ChatTemplate
from swarm_kernels.tokenizer.gguf import read_gguf_tokenizer
from swarm_kernels.tokenizer.hf import read_hf_tokenizer
from swarm_kernels.tokenizer.parts import MalformedTokenizer, TokenizerParts
from swarm_kernels.tokenizer.template_process import RENDERER

_REPLACEMENT = "\ufffd"  # what an incomplete character decodes to
_MAX_PENDING = 16  # tokens of an incomplete character, before its bytes are emitted as U+FFFD


def load_tokenizer(source: ModelSource) -> ChatTokenizer:
    """The tokenizer that came with a model. Raises ModelNotFound, CorruptModel, UnsupportedModel."""
    if isinstance(source, GgufSource):
        parts = read_gguf_tokenizer(source.header, str(source.path))
    else:
        parts = read_hf_tokenizer(source.path)
    return ChatTokenizer(parts, source.config.eos_token_ids)


class ChatTokenizer:
    """Encodes, decodes and applies the chat template as transformers does with the same files.

    Text that looks like a special token ("<|im_end|>") becomes that token, in user messages too, as with transformers'
    defaults: a caller that puts untrusted text into a prompt must strip such tokens first.
    """

    def __init__(self, parts: TokenizerParts, eos_token_ids: Iterable[int] = ()) -> None:
        """`eos_token_ids`: further ids that end a generation. Raises CorruptModel when the chat template is broken.

        `chat_template`: the source of the template, of the one for tools if there are two; None without one.
        """
        self._tokenizer = parts.tokenizer
        self._encoder = BoundedEncoder(parts.tokenizer)
        self._template = ChatTemplate(parts.chat_template, parts.special) if parts.chat_template else None
        self._tool_template = ChatTemplate(parts.tool_template, parts.special) if parts.tool_template else None
        self.eos_token_ids: tuple[int, ...] = tuple(sorted({*eos_token_ids, *parts.eos_token_ids}))
        self.special_ids: frozenset[int] = frozenset(
            token for token, added in parts.tokenizer.get_added_tokens_decoder().items() if added.special
        )
        self.chat_template = parts.tool_template or parts.chat_template

    def warm_up(self) -> None:
        """Start the process that renders chat templates, which takes a tenth of a second; best effort. Blocks."""
        if self._template is not None:
            RENDERER.start()

    @property
    def vocab_size(self) -> int:
        """One more than the largest id `encode` can give; the model's own vocabulary may be padded beyond it."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def special_tokens(self) -> dict[str, int]:
        """Text -> id, of `special_ids`."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {added[token].content: token for token in sorted(self.special_ids)}

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def to_json(self) -> str:
        """The content of a `tokenizer.json` with the same vocabulary and rules."""
        text: str = self._tokenizer.to_str()
        return text

    @property
    def supports_tools(self) -> bool:
        """Whether the model's chat template tells it of tools."""
        return any(t is not None and t.supports_tools for t in (self._template, self._tool_template))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """`add_special_tokens`: with the beginning-of-sequence token, for models that have one. Raises
        InvalidRequest, and CorruptModel if the tokenizer fails or takes far too long."""
        return self._encoder.encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Raises InvalidRequest for ids outside the vocabulary."""
        try:
            with MalformedTokenizer("the model's tokenizer"):
                text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError):
            raise InvalidRequest("a token id is not a whole number between 0 and the vocabulary's size") from None
        return text

    def stream(self, *, skip_special_tokens: bool = True) -> StreamDecoder:
        return StreamDecoder(self, skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text; see `ChatTemplate.render`.

        Raises UnsupportedModel without a chat template, InvalidRequest for bad messages.
        """
        template = self._tool_template if tools and self._tool_template is not None else self._template
        if template is None:
            raise UnsupportedModel("this model has no chat template; give it a plain prompt instead of messages")
        return template.render(messages, add_generation_prompt, tools, template_options)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Messages (`role`, `content`, ...) -> token ids of the prompt. Raises as `render_chat`."""
        text = self.render_chat(messages, add_generation_prompt, tools=tools, template_options=template_options)
        return self.encode(text, add_special_tokens=False)


class StreamDecoder:
    """Streaming detokenizer. All pushes and `finish` joined equal `decode` of all the tokens.

    A token may end inside a character, and a token's text may depend on the one before it; so the last tokens
    emitted are decoded again with the new one, and nothing is emitted while the text ends in an incomplete character.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._emitted: list[int] = []  # the last tokens emitted: context of the next
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that is complete now; often one word, "" while a character is incomplete."""
        if token in self._skip:
            return ""
        self._pending.append(token)
        text = self._new_text()
        if not text.endswith(_REPLACEMENT):
            return self._emit(len(self._pending), text)
        return self._emit_invalid() if len(self._pending) > _MAX_PENDING else ""

    def finish(self) -> str:
        """The rest: an incomplete character at the end, as U+FFFD."""
        return self._emit(len(self._pending), self._new_text())

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _new_text(self) -> str:
        before = self._decode(self._emitted)
        return self._decode(self._emitted + self._pending)[len(before) :]

    def _emit(self, count: int, text: str) -> str:
        if count:
            self._emitted, self._pending = self._pending[:count], self._pending[count:]
        return text

    def _emit_invalid(self) -> str:
        """Emit a run of bytes that will never be characters, split between characters."""
        whole = self._new_text()
        for count in range(len(self._pending) - 4, 0, -1):  # a character has at most four bytes
            text = self._decode(self._emitted + self._pending[:count])[len(self._decode(self._emitted)) :]
            if text + self._decode(self._pending[count:]) == whole:
                return self._emit(count, text)
        return ""
