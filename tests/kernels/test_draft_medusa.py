"""Medusa heads against plain torch, and the files that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from swarm.errors import CorruptModel, ModelNotFound
from swarm_kernels.draft.medusa import MedusaHeads
from swarm_kernels.models.config import ModelConfig
from swarm_kernels.ops import dispatch

HIDDEN, VOCAB = 32, 50
CONFIG = ModelConfig("llama", 2, HIDDEN, 2, 2, 16, 64, VOCAB, 128)


def parts(heads: int, blocks: int, own_output: bool = True, prefix: str = "") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(heads * 10 + blocks)
    tensors = {}
    for head in range(heads):
        for block in range(blocks):
            tensors[f"{prefix}{head}.{block}.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=generator) / 6
            tensors[f"{prefix}{head}.{block}.linear.bias"] = torch.randn(HIDDEN, generator=generator)
        if own_output:
            tensors[f"{prefix}{head}.{blocks}.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16()
    return tensors


def saved(tensors: dict[str, torch.Tensor], folder: Path) -> Path:
    save_file(tensors, folder / "heads.safetensors")
    return folder / "heads.safetensors"


@pytest.mark.parametrize(("blocks", "prefix"), [(1, ""), (2, "medusa_head.")])
@pytest.mark.parametrize("own_output", [True, False])
def test_heads_compute_what_medusa_defines(blocks: int, prefix: str, own_output: bool, tmp_path: Path) -> None:
    tensors = parts(3, blocks, own_output, prefix)
    output = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
    shared = None if own_output else dispatch.pack_linear(output)
    heads = MedusaHeads.load(saved(tensors, tmp_path), CONFIG, shared)
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(2))
    ids, logprobs = heads.propose(hidden, 4)
    assert ids.shape == logprobs.shape == (3, 5, 4)
    for k in range(len(heads)):
        x = hidden
        for b in range(blocks):
            x = x + F.silu(
                F.linear(x, tensors[f"{prefix}{k}.{b}.linear.weight"], tensors[f"{prefix}{k}.{b}.linear.bias"])
            )
        if own_output:  # in bf16, which rounds its inputs
            x, weight = x.bfloat16().float(), tensors[f"{prefix}{k}.{blocks}.weight"].float()
        else:
            weight = output
        expected = (x @ weight.T).log_softmax(-1).topk(4)
        torch.testing.assert_close(logprobs[k], expected.values, atol=1e-3, rtol=1e-3)
        assert torch.equal(ids[k, :, 0], expected.indices[:, 0])


def test_files_that_cannot_be_used_are_one_sentence(tmp_path: Path) -> None:
    def refused(tensors: dict[str, torch.Tensor]) -> str:
        with pytest.raises(CorruptModel) as caught:
            MedusaHeads.load(saved(tensors, tmp_path), CONFIG)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    good = parts(2, 1)
    wide = {**good, "1.0.linear.weight": torch.zeros(HIDDEN + 1, HIDDEN)}
    assert "part 0.linear.weight of Medusa head 1 has shape (33, 32), but the model needs (32, 32)" in refused(wide)
    assert "another model" in refused({**good, "0.1.weight": torch.zeros(VOCAB + 1, HIDDEN)})
    assert "has shape none" in refused({name: t for name, t in good.items() if name != "0.0.linear.bias"})
    assert "has shape none" in refused(parts(2, 1, own_output=False))
    assert "without a gap" in refused({name: t for name, t in parts(3, 1).items() if not name.startswith("1.")})
    assert "not the name" in refused({**good, "lm_head.weight": torch.zeros(2)})
    with pytest.raises(ModelNotFound):
        MedusaHeads.load(tmp_path / "none", CONFIG)
    (tmp_path / "bad").write_bytes(b"pickle?")
    with pytest.raises(CorruptModel):
        MedusaHeads.load(tmp_path / "bad", CONFIG)
