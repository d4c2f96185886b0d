"""Small random transformers models, the source a span reads them from, and plain loops that drive spans."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from swarm.types import LayerSpan
from swarm_kernels.kvcache.cache import KVCacheManager, StepRequest
from swarm_kernels.models.config import ModelConfig
from swarm_kernels.models.hf_config import model_config
from swarm_kernels.models.source import LocalFiles, NotQuantized
from swarm_kernels.runtime.load import load_span
from swarm_kernels.runtime.span import Span

SMALL = {
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}


def tiny_model(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A random transformers model in fp32. Weights are large enough that attention and positions matter."""
    config = AutoConfig.for_model(kind, **{**SMALL, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.05 if "embed" in name else 1.2 / parameter.shape[-1] ** 0.5)
            elif "norm" in name and name.endswith("weight"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(0, 0.3)
    return model


def transformers_model(source: Any) -> Any:
    """transformers' own model with the tensors of a ModelSource, in fp32."""
    hf = dict(source.config.hf)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(hf.pop("model_type"), **hf), dtype=torch.float32)
    state = {name: source.tensor(name).float() for name in model.state_dict() if source.has(name)}
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model.eval()


class ModelTensors(LocalFiles, NotQuantized):
    """A ModelSource over a transformers model in memory."""

    def __init__(self, model: Any, stored: dict[str, Any] | None = None) -> None:
        """`stored`: its config.json, by default every key of its config."""
        self.config: ModelConfig = model_config(model.config.to_dict() if stored is None else stored)
        self._tensors: dict[str, torch.Tensor] = dict(model.state_dict())
        self.read: list[str] = []
        self.name, self.path, self.weight_hash = "tiny", Path(), "0" * 32

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._tensors))

    def has(self, hf_name: str) -> bool:
        return hf_name in self._tensors

    def shape(self, hf_name: str) -> tuple[int, ...]:
        return tuple(self._tensors[hf_name].shape)

    def tensor(self, hf_name: str) -> torch.Tensor:
        self.read.append(hf_name)
        return self._tensors[hf_name].clone()

    def forget(self, hf_name: str) -> None:
        del self._tensors[hf_name]

    def replace(self, hf_name: str, tensor: torch.Tensor) -> None:
        self._tensors[hf_name] = tensor

    def nbytes(self, hf_name: str) -> int:
        return self._tensors[hf_name].nbytes

    def close(self) -> None:
        pass


class Chain:
    """Spans in one process, each with its cache, run one after another: a swarm without a network."""

    def __init__(self, source: Any, cuts: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
        """`cuts`: inner borders, e.g. (2, 5) for spans 0:2, 2:5, 5:end."""
        spans = [LayerSpan(a, b) for a, b in itertools.pairwise((0, *cuts, source.config.num_layers))]
        self.spans: list[Span] = [load_span(source, layers, dtype) for layers in spans]
        self.caches: list[KVCacheManager] = [span.new_cache(1024) for span in self.spans]

    def open(self, session: bytes, max_tokens: int = 200) -> None:
        for cache in self.caches:
            cache.open(session, max_tokens)

    def run(self, requests: Sequence[StepRequest], tokens: Sequence[int]) -> torch.Tensor:
        """Logits of every row."""
        hidden = self.spans[0].embed(tokens)
        for span, cache in zip(self.spans, self.caches, strict=True):
            hidden = span.forward(hidden.to(span.dtype), cache.schedule(requests), cache)
            cache.check_integrity()
        return self.spans[-1].logits(hidden)

    def greedy(self, session: bytes, prompt: Sequence[int], count: int, chunks: Sequence[int] = ()) -> list[int]:
        """`count` greedy tokens after `prompt`, which is prefilled in `chunks`."""
        self.open(session, len(prompt) + count)
        done, logits = 0, torch.empty(0)
        for size in chunks or (len(prompt),):
            part = prompt[done : done + size]
            logits = self.run([StepRequest(session, done, len(part))], part)
            done += len(part)
        answer = [int(logits[-1].argmax())]
        while len(answer) < count:
            logits = self.run([StepRequest(session, done)], answer[-1:])
            answer.append(int(logits[-1].argmax()))
            done += 1
        return answer


def hf_greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """What transformers generates, greedily, without stopping early."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


def hf_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """transformers' logits of every token, `[n, vocab]`."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


def on_transformers_layers(source: ModelTensors) -> ModelTensors:
    """Its spans run on transformers' layers, though the compiled ones cover its family: as mixtures do on a GPU."""
    source.config = replace(source.config, decoder=None)
    return source
