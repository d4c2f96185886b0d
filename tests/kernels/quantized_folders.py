"""Writes checkpoints of fp8 blocks and NF4 as they are released, beside the models of their dequantized weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from swarm_kernels.ops.base.codebook_linear import CodeFormat, nf4_codes

Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
NF4_BLOCK, NESTED_BLOCK = 64, 256
CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}


def fp8(module: str, weight: torch.Tensor) -> Packed:
    """Blocks of 128 x 128, each scaled to its largest weight (DeepSeek-V3, arXiv 2412.19437)."""
    outputs, inputs = weight.shape
    scale = torch.empty(-(-outputs // 128), -(-inputs // 128))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            scale[i, j] = weight[128 * i : 128 * i + 128, 128 * j : 128 * j + 128].abs().max() / 448
    wide = scale.repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)[:, :inputs]
    stored = (weight / wide).to(torch.float8_e4m3fn)
    return {f"{module}.weight": stored, f"{module}.weight_scale_inv": scale}, stored.float() * wide


def nf4(module: str, weight: torch.Tensor) -> Packed:
    """Scales of 64 weights in 8 bits of a table, as double quantization stores them (QLoRA, arXiv 2305.14314)."""
    table, nested_table = torch.tensor(CodeFormat.NF4.values), torch.linspace(-1, 1, 256)
    groups = weight.reshape(-1, NF4_BLOCK)
    largest = groups.abs().amax(1)
    offset = float(largest.mean())
    rest = largest - offset
    padded = torch.nn.functional.pad(rest, (0, -len(rest) % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    nested = padded.abs().amax(1)
    bytes_ = ((padded / nested[:, None] + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).flatten()[: len(rest)]
    scale = nested_table[bytes_.int()].mul_(nested.repeat_interleave(NESTED_BLOCK)[: len(rest)]).add_(offset)
    codes = nf4_codes(groups / scale[:, None]).flatten()
    state = {"quant_type": "nf4", "blocksize": NF4_BLOCK, "dtype": "float32", "shape": list(weight.shape)}
    state |= {"nested_blocksize": NESTED_BLOCK, "nested_offset": offset, "nested_dtype": "float32"}
    name = f"{module}.weight"
    tensors = {
        name: (codes[::2] << 4 | codes[1::2])[:, None],
        f"{name}.absmax": bytes_,
        f"{name}.quant_map": table,
        f"{name}.nested_absmax": nested,
        f"{name}.nested_quant_map": nested_table,
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return tensors, (table[codes.int()].view(-1, NF4_BLOCK) * scale[:, None]).view_as(weight)


def write(folder: Path, form: str, kind: str, **sizes: Any) -> Any:
    """A random model of a type of transformers with its projections packed; -> the model of the dequantized weights."""
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.05 if "embed" not in name else 0.5)
    plain = folder / "plain"
    model.save_pretrained(plain)
    tensors: dict[str, torch.Tensor] = {}
    dequantized: dict[str, torch.Tensor] = {}
    for name, value in load_file(plain / "model.safetensors").items():
        if name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            packed, dequantized[name] = {"fp8": fp8, "nf4": nf4}[form](name.removesuffix(".weight"), value)
            tensors |= packed
        else:
            tensors[name] = dequantized[name] = value
    save_file(dequantized, plain / "model.safetensors", {"format": "pt"})
    (folder / "packed").mkdir()
    save_file(tensors, folder / "packed" / "model.safetensors")
    config = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = CONFIGS[form]
    (folder / "packed" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
