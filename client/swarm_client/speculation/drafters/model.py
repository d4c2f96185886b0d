"""Drafts by a model on this machine: any with the target's vocabulary, or one trained for it.

Owns whether a model can draft for the target at all. The model's KV cache and trees are DraftSession's.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm.errors import DrafterFailed
from swarm_client.speculation.drafters.base import Candidate, Drafter, TokenPath
from swarm_kernels.draft.models import LocalModel
from swarm_kernels.draft.session import DraftModel, DraftSession
from swarm_kernels.models.source import ModelSource
from swarm_kernels.tokenizer.tokenizer import ChatTokenizer

_PROBES = ("Hello, world!", "def f(x):\n    return 2 * x", "naïve façade, 東京, 12345", "<|im_start|>user\n")


class ModelDrafter(Drafter):
    """A level of a tree is one pass of the model, whatever its width."""

    extend_is_synchronous = True  # nothing is computed before a proposal

    def __init__(self, model: DraftModel, name: str = "model", max_tokens: int | None = None) -> None:
        """`max_tokens`: of prompt and answer; beyond them it proposes nothing. Raises OutOfMemory."""
        super().__init__(name)
        self._open: DraftSession | None = DraftSession(model, max_tokens)

    @classmethod
    def local(
        cls,
        source: ModelSource,
        tokenizer: ChatTokenizer,
        target: ModelSource,
        target_tokenizer: ChatTokenizer,
        max_tokens: int | None = None,
    ) -> ModelDrafter:
        """A whole model. Raises DrafterFailed if its tokens are not the target's, and as `load_span`."""
        check_vocabulary(source, tokenizer, target, target_tokenizer)
        return cls(LocalModel(source), source.name, max_tokens)

    def close(self) -> None:
        super().close()
        self._open = None

    @property
    def _session(self) -> DraftSession:
        if self._open is None:
            raise DrafterFailed(f"{self.name} is closed")
        return self._open

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        self._session.reset(prompt_ids)

    def _advance(self, tokens: Sequence[int]) -> None:
        self._session.extend(tokens)

    def _draft(self, paths: Sequence[TokenPath], width: int) -> list[list[Candidate]]:
        return [[Candidate(*pair) for pair in pairs] for pairs in self._session.propose(paths, width)]


def check_vocabulary(
    source: ModelSource, tokenizer: ChatTokenizer, target: ModelSource, target_tokenizer: ChatTokenizer
) -> None:
    """Raises DrafterFailed unless both models mean the same by every token id."""
    same_size = source.config.vocab_size == target.config.vocab_size
    same_words = tokenizer.vocab_size == target_tokenizer.vocab_size and all(
        tokenizer.decode([token], skip_special_tokens=False)
        == target_tokenizer.decode([token], skip_special_tokens=False)
        for token in range(tokenizer.vocab_size)
    )
    same_cuts = same_words and all(tokenizer.encode(text) == target_tokenizer.encode(text) for text in _PROBES)
    if not (same_size and same_cuts):
        raise DrafterFailed(
            f"{source.name} cannot draft for {target.name}: its vocabulary is another one; choose a draft model of the "
            "same family"
        )
