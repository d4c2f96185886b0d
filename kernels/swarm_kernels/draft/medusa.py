"""Medusa heads: candidates for the tokens after the next, from the target's last hidden state (Cai et al. 2024, §2.1).

Owns their tensor names and arithmetic: head k maps `x` to `x + silu(W x + b)` for each of its blocks, then to the
vocabulary, and predicts the token k + 2 positions after the row (the target's head predicts the next one). They run
where that state is, on the tail (Jupiter §IV).

The file is one safetensors file with the tensor names of Medusa's own releases: `<head>.<block>.linear.weight`
`[hidden, hidden]`, `<head>.<block>.linear.bias` `[hidden]`, and `<head>.<blocks>.weight` `[vocab, hidden]`; all with an
optional prefix such as `medusa_head.`. Heads without the last tensor share the target's output layer; where it is
`[hidden, hidden]`, it projects the state for that layer. Files trained by `swarm-draft` (`draft.file`) are of this last
kind and predict only frequent tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from swarm.errors import CorruptModel, ModelNotFound, UnsupportedModel
from swarm_kernels.draft.card import is_draft, read_card
from swarm_kernels.draft.file import DraftWeights
from swarm_kernels.draft.models import top_tokens
from swarm_kernels.models.config import ModelConfig
from swarm_kernels.models.safetensors import read_header, read_tensor
from swarm_kernels.models.source import ModelFile, ModelSource
from swarm_kernels.ops import dispatch
from swarm_kernels.runtime.llama_span import LlamaSpan
from swarm_kernels.runtime.span import Span

MAX_HEADS = 16
_CPU = torch.device("cpu")
_NAME = re.compile(r"(?:.*\.)?(\d{1,3})\.(\d{1,3})\.(linear\.weight|linear\.bias|weight)")


@dataclass(frozen=True, slots=True, eq=False)
class _Head:
    blocks: tuple[dispatch.Linear, ...]
    projection: dispatch.Linear | None
    output: dispatch.Linear | None  # None: the target's

    def states(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + F.silu(block(x))
        return x if self.projection is None else self.projection(x)


class MedusaHeads:
    """Predicts `len(heads)` tokens after the next one. Use `of`."""

    def __init__(
        self, heads: Sequence[_Head], shared: dispatch.Linear | None = None, vocabulary: torch.Tensor | None = None
    ) -> None:
        """`shared`: output layer of heads without their own. `vocabulary [v]`: the ids of the outputs, if not all."""
        self._heads, self._shared, self._vocabulary = tuple(heads), shared, vocabulary

    def __len__(self) -> int:
        return len(self._heads)

    @classmethod
    def of(cls, path: Path, span: Span, source: ModelSource) -> MedusaHeads:
        """Heads for `span`, which holds the last layer of the model `source`. Raises as `load`, and
        UnsupportedModel."""
        if not isinstance(span, LlamaSpan) or span.head is None or not span.config.is_llama_like:
            raise UnsupportedModel("Medusa heads run on the last layers of Llama-like models only")
        if is_draft(path):
            card = read_card(path)
            if not card.heads:
                raise UnsupportedModel(f"{path} is a draft and holds no heads; clients draft with it: --drafter {path}")
            if card.weight_hash != source.weight_hash:
                raise UnsupportedModel(
                    f"the heads in {path} were trained for {card.model}, not for {source.name}; train some for it"
                )
        return cls.load(path, span.config, span.head, span.device)

    @classmethod
    def load(
        cls,
        path: Path,
        config: ModelConfig,
        shared: dispatch.Linear | None = None,
        device: torch.device = _CPU,
    ) -> MedusaHeads:
        """`shared`: the target's head, for files that have none. Raises ModelNotFound, CorruptModel."""
        tensors, vocabulary = _read(path)
        quantized = vocabulary is not None and device.type == "cpu"  # trained by swarm-draft; CPUs have int8 kernels
        build = _Build(
            config, path, shared is not None, device, dispatch.quantize_linear if quantized else dispatch.pack_linear
        )
        parts = _sorted_parts(tensors, path)
        heads = [build.head(parts[k], k) for k in range(len(parts))]
        if vocabulary is None or shared is None:
            return cls(heads, shared)
        fits = int(vocabulary.min()) >= 0 and int(vocabulary.max()) < config.vocab_size
        if not fits or any(head.output is not None for head in heads):
            raise CorruptModel(f"{path} predicts tokens that the model does not have; train the heads again")
        vocabulary = vocabulary.to(device)
        return cls(heads, build.pack(shared.embedding_rows(vocabulary), None), vocabulary)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[n, hidden]` after the final norm, the input of the head -> fp32 `[heads, n, v]`."""
        states = torch.stack([head.states(hidden.float()) for head in self._heads])
        shared = self._shared
        if shared is not None and all(head.output is None for head in self._heads):  # one pass over its weights
            return shared(states.flatten(0, 1)).float().view(*states.shape[:2], -1)
        rows = []
        for head, state in zip(self._heads, states, strict=True):
            output = head.output or shared
            if output is None:
                raise CorruptModel("these Medusa heads need the target's own head")
            rows.append(output(state).float())
        return torch.stack(rows)

    def propose(self, hidden: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """-> ids and log-probabilities `[heads, n, width]`, likeliest first."""
        logits = self.logits(hidden)
        ids, logprobs = top_tokens(logits.flatten(0, 1), width)
        if self._vocabulary is not None:
            ids = self._vocabulary[ids]
        return ids.view(*logits.shape[:2], -1), logprobs.view(*logits.shape[:2], -1)


def _read(path: Path) -> tuple[Mapping[str, torch.Tensor], torch.Tensor | None]:
    """-> tensors and, for a file of `swarm-draft`, the ids that the heads can predict."""
    if not path.is_file():
        raise ModelNotFound(f"there are no Medusa heads at {path}; train some with 'swarm-draft train --kind heads'")
    if is_draft(path):
        weights = DraftWeights.load(path)
        return weights.tensors, weights.vocabulary
    try:
        with closing(ModelFile(path)) as file:
            return {name: read_tensor(tensor, name) for name, tensor in read_header(file).items()}, None
    except CorruptModel:
        raise CorruptModel(f"{path} is no safetensors file, or damaged; fetch it again") from None


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


@dataclass(frozen=True, slots=True)
class _Build:
    """Builds heads from their tensors."""

    config: ModelConfig
    path: Path
    has_shared: bool
    device: torch.device
    pack: Callable[[torch.Tensor, torch.Tensor | None], dispatch.Linear]

    def head(self, parts: _Parts, number: int) -> _Head:
        """Raises CorruptModel for tensors that do not fit the model."""
        hidden, vocab = self.config.hidden_size, self.config.vocab_size
        blocks = sum(name == "linear.weight" for _, name in parts)
        expected: dict[tuple[int, str], tuple[int, ...]] = {}
        for block in range(blocks):
            expected[block, "linear.weight"], expected[block, "linear.bias"] = (hidden, hidden), (hidden,)
        last = parts.get((blocks, "weight"))
        projects = last is not None and self.has_shared and tuple(last.shape) == (hidden, hidden)
        if last is not None or not self.has_shared:
            expected[blocks, "weight"] = (hidden if projects else vocab, hidden)
        found = {place: tuple(tensor.shape) for place, tensor in parts.items()}
        if found != expected:
            wrong = sorted(set(found.items()) ^ set(expected.items()))[0][0]
            raise CorruptModel(
                f"{self.path}: part {wrong[0]}.{wrong[1]} of Medusa head {number} has shape "
                f"{found.get(wrong, 'none')}, but the model needs {expected.get(wrong, 'none')}; these heads are for "
                "another model"
            )
        linears = [self._packed(parts[b, "linear.weight"], parts[b, "linear.bias"]) for b in range(blocks)]
        projection = self._packed(last) if last is not None and projects else None
        output = None if last is None or projects else dispatch.pack_linear(last.to(self.device, torch.bfloat16))
        return _Head(tuple(linears), projection, output)

    def _packed(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> dispatch.Linear:
        return self.pack(weight.float().to(self.device), None if bias is None else bias.float().to(self.device))
