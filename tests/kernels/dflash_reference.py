"""DFlash in plain torch, as z-lab's release defines it: nothing cached, the whole context projected for every block.
Also writes random drafters in the layouts of both kinds of folders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

BLOCK, MASK = 6, 130
LAYER = {
    "hidden_size": 96, "intermediate_size": 80, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 131, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 5000.0,
    "hidden_act": "silu", "num_hidden_layers": 2, "model_type": "qwen3", "attention_bias": False,
}  # fmt: skip


class Reference:
    """`embedding`, `head` `[vocab, hidden]`: the target's. `kinds`: (window or None, causal) of each layer."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        embedding: torch.Tensor,
        head: torch.Tensor,
        kinds: Sequence[tuple[int | None, bool]] = ((None, False), (None, False)),
        scales: tuple[float, float, float] = (1.0, 1.0, 0.0),
    ) -> None:
        """`scales`: of the embedding, of the logits, and where these are capped."""
        self.w = {name: tensor.float() for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
        self.d2t, self.kinds, self.scales = tensors.get("d2t"), kinds, scales
        self.embedding, self.head = embedding.float(), self.w.get("lm_head.weight", head.float())

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + LAYER["rms_norm_eps"]) * self.w[f"{name}.weight"]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`[heads, n, head_dim]`."""
        dim = x.shape[-1]
        frequencies = LAYER["rope_theta"] ** (-torch.arange(0, dim, 2).float() / dim)
        angles = positions.float()[:, None] * frequencies
        cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
        half = torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1)
        return x * cos + half * sin

    def attention(
        self, layer: int, hidden: torch.Tensor, target: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        name, (window, causal) = f"layers.{layer}.self_attn.", self.kinds[layer]
        both = torch.cat((target, hidden))
        q = self.norm(name + "q_norm", self.linear(name + "q_proj", hidden).view(len(hidden), -1, 16)).transpose(0, 1)
        k = self.norm(name + "k_norm", self.linear(name + "k_proj", both).view(len(both), -1, 16)).transpose(0, 1)
        v = self.linear(name + "v_proj", both).view(len(both), -1, 16).transpose(0, 1)
        q, k = self.rotate(q, rows), self.rotate(k, keys)
        k, v = (part.repeat_interleave(3, 0) for part in (k, v))
        scores = (q @ k.transpose(1, 2)) * 16**-0.5
        hidden_from = torch.zeros(len(rows), len(keys), dtype=torch.bool)
        for i, row in enumerate(rows.tolist()):
            for j, key in enumerate(keys.tolist()):
                far = window is not None and abs(row - key) >= window
                hidden_from[i, j] = far or (causal and key > row)
        mixed = scores.masked_fill(hidden_from, -torch.inf).softmax(-1) @ v
        return self.linear(name + "o_proj", mixed.transpose(0, 1).flatten(1))

    def block(self, tapped: torch.Tensor, positions: Sequence[int], last_token: int, at: int) -> torch.Tensor:
        """`[BLOCK - 1, hidden]`, what the head reads."""
        target = self.norm("hidden_norm", self.linear("fc", tapped))
        rows = torch.arange(at, at + BLOCK)
        keys = torch.cat((torch.tensor(list(positions)), rows))
        x = self.embedding[[last_token] + [MASK] * (BLOCK - 1)] * self.scales[0]
        for layer in range(len(self.kinds)):
            name = f"layers.{layer}."
            x = x + self.attention(layer, self.norm(name + "input_layernorm", x), target, rows, keys)
            y = self.norm(name + "post_attention_layernorm", x)
            gated = F.silu(self.linear(name + "mlp.gate_proj", y)) * self.linear(name + "mlp.up_proj", y)
            x = x + self.linear(name + "mlp.down_proj", gated)
        return self.norm("norm", x)[1:]

    def logprobs(self, tapped: torch.Tensor, positions: Sequence[int], last_token: int, at: int) -> torch.Tensor:
        """`[BLOCK - 1, draft vocabulary]` of what follows the text whose last token is at position `at`; `tapped
        [n, taps * hidden]`: the target's states at `positions`."""
        logits = F.linear(self.block(tapped, positions, last_token, at), self.head) * self.scales[1]
        cap = self.scales[2]
        return (torch.tanh(logits / cap) * cap if cap else logits).log_softmax(-1)

    def candidates(
        self, tapped: torch.Tensor, positions: Sequence[int], last_token: int, at: int, width: int
    ) -> list[list[tuple[int, float]]]:
        """For each place of the block."""
        values, ids = self.logprobs(tapped, positions, last_token, at).topk(width)
        if self.d2t is not None:
            ids = ids + self.d2t[ids]
        return [list(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]


def random_tensors(
    seed: int = 0, taps: int = 3, *, draft_vocab: int | None = None, bias: bool = False
) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    hidden, inter = LAYER["hidden_size"], LAYER["intermediate_size"]

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=made) * 1.2 / columns**0.5

    def vector(size: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size, generator=made)

    tensors = {
        "fc.weight": matrix(hidden, taps * hidden),
        "hidden_norm.weight": vector(hidden),
        "norm.weight": vector(hidden),
    }
    for layer in range(LAYER["num_hidden_layers"]):
        name = f"layers.{layer}."
        tensors |= {
            name + "self_attn.q_proj.weight": matrix(96, hidden),
            name + "self_attn.k_proj.weight": matrix(32, hidden),
            name + "self_attn.v_proj.weight": matrix(32, hidden),
            name + "self_attn.o_proj.weight": matrix(hidden, 96),
            name + "self_attn.q_norm.weight": vector(16),
            name + "self_attn.k_norm.weight": vector(16),
            name + "mlp.gate_proj.weight": matrix(inter, hidden),
            name + "mlp.up_proj.weight": matrix(inter, hidden),
            name + "mlp.down_proj.weight": matrix(hidden, inter),
            name + "input_layernorm.weight": vector(hidden),
            name + "post_attention_layernorm.weight": vector(hidden),
        }
    if bias:
        for name in [name for name in tensors if name.endswith("_proj.weight") and "self_attn" in name]:
            tensors[name.removesuffix("weight") + "bias"] = 0.3 * torch.randn(len(tensors[name]), generator=made)
    if draft_vocab is not None:
        tensors["lm_head.weight"] = 3 * matrix(draft_vocab, hidden)
        chosen = torch.randperm(LAYER["vocab_size"], generator=made)[:draft_vocab].sort().values
        tensors["d2t"] = chosen - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(LAYER["vocab_size"], dtype=torch.bool).index_fill_(0, chosen, True)
    return tensors


def save_release(
    folder: Path, tensors: Mapping[str, torch.Tensor], taps: Sequence[int] = (1, 3, 5), **changes: Any
) -> Path:
    """A folder as z-lab's are. `taps`: the layers whose output is read; `changes`: of its config."""
    config = {
        **LAYER,
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "attention_bias": "layers.0.self_attn.q_proj.bias" in tensors,
        "block_size": BLOCK,
        "num_target_layers": 8,
        "layer_types": ["full_attention"] * 2,
        "sliding_window": None,
        "use_sliding_window": False,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(taps)},
        **changes,
    }
    return _save(folder, tensors, config)


def save_speculators(folder: Path, tensors: Mapping[str, torch.Tensor], **changes: Any) -> Path:
    """A folder of `speculators`, which counts layers by what they read."""
    layer = {**LAYER, "attention_bias": "layers.0.self_attn.q_proj.bias" in tensors}
    config = {
        "speculators_model_type": "dflash",
        "speculators_version": "0.5.0",
        "architectures": ["DFlashSpeculator"],
        "draft_vocab_size": len(tensors["lm_head.weight"]) if "lm_head.weight" in tensors else 131,
        "aux_hidden_state_layer_ids": [2, 4, 6],
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "target_hidden_size": None,
        "sliding_window_non_causal": False,
        "projector_type": "dflash",
        "transformer_layer_config": {**layer, "layer_types": ["full_attention"] * 2, **changes.pop("layer", {})},
        **changes,
    }
    return _save(folder, tensors, config)


def _save(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
