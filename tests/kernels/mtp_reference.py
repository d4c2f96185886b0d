"""Checkpoints with a layer for multi-token prediction: random models of transformers, and its own decoder layer of the
same kind. The reference runs that, nothing cached, every path computed from the start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from tiny_models import ModelTensors
from zoo.shrink import LAYERS, tiny_config
from zoo.weights import random_model

_DENSE = {"first_k_dense_replace": LAYERS}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mimo": ("qwen2", {}, {}),
    "mimo, tied": ("qwen2", {"tie_word_embeddings": True}, {}),
    "glm": ("glm4_moe", {}, {"first_k_dense_replace": 0}),
    "glm, dense, q-k norm": ("glm4_moe", {"use_qk_norm": True}, _DENSE),
    "glm, own ends": ("glm4_moe", {}, {"first_k_dense_replace": 0}),
    "deepseek": ("deepseek_v3", {}, {"first_k_dense_replace": 0}),
    "deepseek v3.2": ("deepseek_v32", {}, {"first_k_dense_replace": 0}),
    "glm 5": (
        "glm_moe_dsa",
        {"indexer_types": ["full"] * LAYERS},
        {"first_k_dense_replace": 0, "indexer_types": ["full"]},
    ),
    "qwen3.5, mixture": ("qwen3_5_moe_text", {}, {}),
    "qwen3.5": ("qwen3_5_text", {}, {}),
    "qwen3-next": ("qwen3_next", {}, {}),
}
"""Layout: transformers' type, changes of the model's config, changes of the MTP layer's."""


class Checkpoint:
    """`source`: what clients open. `made`: transformers' model of the target."""

    def __init__(self, layout: str, seed: int = 0, **changes: Any) -> None:
        kind, of_model, of_layer = KINDS[layout]
        config = tiny_config(kind, **{**of_model, **changes})
        self.made = random_model(config, seed)
        one = {**of_model, **changes, **of_layer, "num_hidden_layers": 1}
        if getattr(config, "layer_types", None):
            kinds = config.layer_types
            one["layer_types"] = ["full_attention" if "full_attention" in kinds else kinds[-1]]
        self.block = random_model(tiny_config(kind, **one), seed + 1)
        stored = {**config.to_dict(), "num_nextn_predict_layers": 1}
        if kind == "qwen2":
            stored["model_type"] = "mimo"
        self.source = ModelTensors(self.made, stored)
        self.tensors = _mtp_tensors(layout, self.made, self.block, torch.Generator().manual_seed(seed))
        for name, tensor in self.tensors.items():
            self.source.replace(name, tensor)
        self.offset = 1.0 if kind.startswith("qwen3") else 0.0
        self.state_first = kind == "qwen2"
        self.eps = float(config.rms_norm_eps)

    def taps(self, text: Sequence[int]) -> torch.Tensor:
        """What the final norm reads, `[n, hidden]`."""
        seen: list[torch.Tensor] = []
        hook = self.made.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
        with torch.inference_mode():
            self.made(torch.tensor([list(text)]), use_cache=False)
        hook.remove()
        return seen[0]

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = next(tensor for stored, tensor in self.tensors.items() if stored.endswith(name))
        return self._norm(weight, x)

    @torch.inference_mode()
    def after(self, tapped: torch.Tensor, text: Sequence[int], path: Sequence[int] = ()) -> torch.Tensor:
        """ln p `[vocab]` of what follows `text` and `path`; `tapped [len(text) - 1, hidden]`."""
        states, tokens = self._norm(self.made.model.norm.weight, tapped), list(text[1:])
        for token in (*path, None):
            out = self._layer(states, tokens)
            if token is not None:
                states, tokens = torch.cat((states, out[-1:])), [*tokens, token]
        head = next((t for name, t in self.tensors.items() if "shared_head.head" in name), self.made.lm_head.weight)
        return F.linear(out[-1], head.bfloat16().float()).log_softmax(-1)

    def candidates(
        self, tapped: torch.Tensor, text: Sequence[int], path: Sequence[int], width: int
    ) -> list[tuple[int, float]]:
        logprobs, ids = self.after(tapped, text, path).topk(width)
        return list(zip(ids.tolist(), logprobs.tolist(), strict=True))

    def _layer(self, states: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        embedding = next(
            (t for name, t in self.tensors.items() if "embed_tokens" in name), self.made.model.embed_tokens.weight
        )
        first, second, projection = (_NAMES[self.state_first, self.offset][part] for part in range(3))
        both = [self.norm(first, embedding[list(tokens)].bfloat16().float()), self.norm(second, states)]
        if self.state_first:
            both.reverse()
        joined = torch.cat(both, -1)
        weight = next(tensor for name, tensor in self.tensors.items() if name.endswith(projection))
        positions = torch.arange(len(tokens))[None]
        out = self.block.model(inputs_embeds=F.linear(joined, weight)[None], position_ids=positions, use_cache=False)
        return out.last_hidden_state[0]  # the model's last norm is the MTP layer's

    def _norm(self, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (weight + self.offset)


_NAMES = {
    (True, 0.0): ("token_layernorm.weight", "hidden_layernorm.weight", "input_proj.weight"),
    (False, 0.0): ("enorm.weight", "hnorm.weight", "eh_proj.weight"),
    (False, 1.0): ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "mtp.fc.weight"),
}


def _mtp_tensors(layout: str, made: Any, block: Any, rng: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, vocab = made.config.hidden_size, made.config.vocab_size
    state = {name: tensor for name, tensor in block.state_dict().items() if name.startswith("model.layers.0.")}

    def vector() -> torch.Tensor:
        return (0.0 if layout.startswith("qwen") else 1.0) + 0.1 * torch.randn(hidden, generator=rng)

    projection = torch.randn(hidden, 2 * hidden, generator=rng) * 1.2 / (2 * hidden) ** 0.5
    norm = block.state_dict()["model.norm.weight"]
    if layout.startswith("mimo"):
        prefix, outside = "model.mtp_layers.0.", "model.mtp_layers.0."
        names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    elif layout.startswith("qwen"):
        prefix, outside = "mtp.layers.0.", "mtp."
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    else:
        prefix = outside = f"model.layers.{LAYERS}."
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    tensors = {prefix + name.removeprefix("model.layers.0."): tensor for name, tensor in state.items()}
    values = (vector(), vector(), projection, norm)
    tensors |= {f"{outside}{name}.weight": value for name, value in zip(names, values, strict=True)}
    if "own ends" in layout:
        tensors[f"{outside}embed_tokens.weight"] = 0.05 * torch.randn(vocab, hidden, generator=rng)
        tensors[f"{outside}shared_head.head.weight"] = torch.randn(vocab, hidden, generator=rng) / hidden**0.5
    return tensors
