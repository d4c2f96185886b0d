"""Medusa heads: guesses of the tokens after the next, from the target's own last hidden state (Cai et al. 2024, §2.1).

Owns their file and their arithmetic: head k maps `x` to `x + silu(W x + b)`, as often as it has blocks, then to the
vocabulary, and guesses the token k + 2 places after the row (the target's own head says the one after it). They are run
where that state is, on the tail (Jupiter §IV). Knows neither trees nor sessions.

The file is one safetensors file in the names of Medusa's own releases: `<head>.<block>.linear.weight` `[hidden,
hidden]`, `<head>.<block>.linear.bias` `[hidden]`, and, unless the heads share the target's, `<head>.<blocks>.weight`
`[vocab, hidden]`; all possibly behind a prefix such as `medusa_head.`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file

from swarm.errors import CorruptModel, ModelNotFound, UnsupportedModel
from swarm_kernels import ops
from swarm_kernels.draft import top_tokens
from swarm_kernels.lean import LeanSpan
from swarm_kernels.model_config import ModelConfig
from swarm_kernels.span import Span

MAX_HEADS = 16
_NAME = re.compile(r"(?:.*\.)?(\d{1,3})\.(\d{1,3})\.(linear\.weight|linear\.bias|weight)")

Logits = Callable[[torch.Tensor], torch.Tensor]
"""The target's own head: `[n, hidden]`, normed, -> `[n, vocab]`."""


@dataclass(frozen=True, slots=True, eq=False)
class _Head:
    blocks: tuple[ops.Linear, ...]
    output: ops.Linear | None  # None: the target's

    def states(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + F.silu(block(x))
        return x


class MedusaHeads:
    """`len(heads)` guesses ahead. Use `load`."""

    def __init__(self, heads: Sequence[_Head], shared: Logits | None) -> None:
        self._heads, self._shared = tuple(heads), shared

    def __len__(self) -> int:
        return len(self._heads)

    @classmethod
    def load(cls, path: Path, config: ModelConfig, shared: Logits | None = None) -> MedusaHeads:
        """`shared`: the target's head, for files that have none. Raises ModelNotFound, CorruptModel."""
        if not path.is_file():
            raise ModelNotFound(f"there are no Medusa heads at {path}")
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError):
            raise CorruptModel(f"{path} is no safetensors file, or damaged; fetch it again") from None
        parts = _sorted_parts(tensors, path)
        return cls([_head(parts[k], k, config, path, shared is not None) for k in range(len(parts))], shared)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[n, hidden]` after the final norm, as the head sees it -> fp32 `[heads, n, vocab]`."""
        rows = []
        for head in self._heads:
            states = head.states(hidden.float())
            output = head.output or self._shared
            if output is None:
                raise CorruptModel("these Medusa heads need the target's own head")
            rows.append(output(states).float())
        return torch.stack(rows)

    @classmethod
    def of(cls, path: Path, span: Span) -> MedusaHeads:
        """Beside the head of `span`, the last of its model. Raises as `load`, and UnsupportedModel."""
        if not isinstance(span, LeanSpan) or span.head is None:
            raise UnsupportedModel("Medusa heads are run on the last layers of Llama-like models only")
        return cls.load(path, span.config, span.head)

    def guess(self, hidden: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """-> ids and log-probabilities `[heads, n, width]`, likeliest first."""
        logits = self.logits(hidden)
        ids, logprobs = top_tokens(logits.flatten(0, 1), width)
        return ids.view(*logits.shape[:2], -1), logprobs.view(*logits.shape[:2], -1)


def hits_by_depth(
    heads: MedusaHeads, hidden: torch.Tensor, tokens: Sequence[int], ranks: Sequence[int] = (1, 4, 8)
) -> list[list[float]]:
    """`[heads][len(ranks)]`: how often each head's first guesses held the truth.

    `hidden [n, hidden]`: normed states of the rows of `tokens [n]`, a text the target wrote.
    """
    ids, _ = heads.guess(hidden, max(ranks))
    truth = torch.tensor(tokens)
    hits = []
    for k in range(len(heads)):
        wanted = truth[k + 2 :, None]
        found = ids[k, : len(wanted)]
        hits.append(
            [float((found[:, :rank] == wanted).any(1).float().mean()) if len(wanted) else 0.0 for rank in ranks]
        )
    return hits


_Parts = dict[tuple[int, str], torch.Tensor]  # (block, name) -> tensor, of one head


def _sorted_parts(tensors: Mapping[str, torch.Tensor], path: Path) -> dict[int, _Parts]:
    heads: dict[int, _Parts] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise CorruptModel(f"{path}: '{name[:80]}' is not the name of a part of a Medusa head")
        heads.setdefault(int(match[1]), {})[int(match[2]), match[3]] = tensor
    if sorted(heads) != list(range(len(heads))) or not 1 <= len(heads) <= MAX_HEADS:
        raise CorruptModel(f"{path} must hold Medusa heads 0, 1, ... without a gap, 1 to {MAX_HEADS} of them")
    return heads


def _head(parts: _Parts, number: int, config: ModelConfig, path: Path, has_shared: bool) -> _Head:
    hidden, vocab = config.hidden_size, config.vocab_size
    blocks = sum(name == "linear.weight" for _, name in parts)
    expected: dict[tuple[int, str], tuple[int, ...]] = {}
    for block in range(blocks):
        expected[block, "linear.weight"], expected[block, "linear.bias"] = (hidden, hidden), (hidden,)
    if (blocks, "weight") in parts or not has_shared:
        expected[blocks, "weight"] = (vocab, hidden)
    found = {place: tuple(tensor.shape) for place, tensor in parts.items()}
    if found != expected:
        wrong = sorted(set(found.items()) ^ set(expected.items()))[0][0]
        raise CorruptModel(
            f"{path}: part {wrong[0]}.{wrong[1]} of Medusa head {number} has shape {found.get(wrong, 'none')}, but the "
            f"model needs {expected.get(wrong, 'none')}; these heads are for another model"
        )
    linears = [
        ops.pack_linear(parts[b, "linear.weight"].float(), parts[b, "linear.bias"].float()) for b in range(blocks)
    ]
    output = parts.get((blocks, "weight"))
    return _Head(tuple(linears), None if output is None else ops.pack_linear(output.to(torch.bfloat16)))
