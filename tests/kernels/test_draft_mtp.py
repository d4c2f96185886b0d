"""MTP layers within checkpoints, of every layout, against transformers' own layers without a cache; damaged ones."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from mtp_reference import KINDS, Checkpoint
from zoo.shrink import LAYERS

from swarm.errors import CorruptModel, DrafterFailed, ModelError, UnsupportedModel
from swarm.types import LayerSpan
from swarm_kernels.draft.eagle_session import EagleSession
from swarm_kernels.draft.mtp import MtpDraft, open_mtp
from swarm_kernels.draft.mtp_source import find_mtp
from swarm_kernels.models.hf_config import model_config
from swarm_kernels.models.layers import tensors_of_span
from swarm_kernels.ops.base.layer_weights import plain_linear
from swarm_kernels.runtime.load import load_span
from swarm_kernels.runtime.taps import decode, encode


def draft(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> MtpDraft:
    layout = find_mtp(checkpoint.source)
    assert layout is not None
    return MtpDraft(checkpoint.source, layout, dtype, plain_linear)


def rows(tapped: torch.Tensor, positions: Sequence[int]) -> dict[int, tuple[bytes, ...]]:
    """`tapped [n, hidden]` as hops send it."""
    return {at: (encode(tapped[at : at + 1], 8),) for at in positions}


@pytest.mark.parametrize("layout", KINDS)
def test_every_layout_drafts_what_the_reference_drafts_token_by_token(layout: str) -> None:
    checkpoint = Checkpoint(layout)
    model = draft(checkpoint)
    assert model.taps.layers == (LAYERS,)
    session = model.new_session()
    assert isinstance(session, EagleSession)
    rng = random.Random(layout)
    text = [rng.randrange(256) for _ in range(40)]
    tapped = decode(encode(checkpoint.taps(text), 8), 64, 8)
    session.reset(text[:15])
    session.add(rows(tapped, range(14)))
    known = 15
    while known < 40:
        path: tuple[int, ...] = ()
        for _ in range(3):  # the layer's own chain, and another branch
            others = [(*path[:-1], rng.randrange(256))] if path else []
            for asked, found in zip([path, *others], session.propose([path, *others], 256), strict=True):
                expected = dict(checkpoint.candidates(tapped[: known - 1], text[:known], asked, 256))
                assert len(found) == 256
                assert [p for _, p in found] == pytest.approx([expected[token] for token, _ in found], abs=1e-2)
                assert found[0][0] == max(expected, key=expected.__getitem__)
            path = (*path, session.propose([path], 1)[0][0][0])
        step = rng.randint(3, 9)
        session.extend(text[known : known + step])
        session.add(rows(tapped, range(known - 1, min(39, known + step - 1))))
        known += step


def test_the_head_reads_what_the_model_says_of_itself() -> None:
    """The tap after the last layer, normed, is what the model's own head reads."""
    checkpoint = Checkpoint("glm")
    text = list(range(3, 20))
    with torch.inference_mode():
        logits = checkpoint.made(torch.tensor([text]), use_cache=False).logits[0]
        ours = draft(checkpoint).fuse(checkpoint.taps(text)) @ checkpoint.made.lm_head.weight.T
    assert torch.allclose(ours, logits, atol=1e-4)


def test_a_model_of_type_mimo_is_qwen2() -> None:
    source = Checkpoint("mimo").source
    assert source.config.hf["model_type"] == source.config.model_type == "qwen2"
    assert source.config.is_llama_like
    assert source.config.qkv_bias
    with pytest.raises(CorruptModel):
        model_config({"model_type": ["mimo"]})


def test_without_such_layers_there_is_nothing_to_open() -> None:
    checkpoint = Checkpoint("mimo")
    for name in checkpoint.tensors:
        checkpoint.source.forget(name)
    assert find_mtp(checkpoint.source) is None
    with pytest.raises(DrafterFailed, match="has no MTP layers"):
        open_mtp(checkpoint.source)


@pytest.mark.parametrize("layout", ["mimo", "glm, own ends", "deepseek", "qwen3.5", "qwen3-next"])
def test_no_node_reads_them(layout: str) -> None:
    checkpoint = Checkpoint(layout)
    source, whole = checkpoint.source, LayerSpan(0, LAYERS)
    read = set(tensors_of_span(source, whole))
    assert not read & checkpoint.tensors.keys()
    assert {
        name for name in source.names() if "layers.0." in name and not name.startswith(("mtp", "model.mtp"))
    } <= read
    source.read.clear()
    load_span(source, whole, torch.float32)
    assert source.read
    assert not set(source.read) & checkpoint.tensors.keys()


def test_layers_of_another_layout_are_refused() -> None:
    checkpoint = Checkpoint("qwen3.5")
    checkpoint.source.forget("mtp.fc.weight")
    checkpoint.source.replace("mtp.fc_hidden.weight", torch.zeros(64, 64))
    with pytest.raises(UnsupportedModel, match="of a layout that is not run here"):
        find_mtp(checkpoint.source)


@pytest.mark.parametrize(
    ("layout", "name", "shape"),
    [
        ("glm", "enorm.weight", (63,)),
        ("glm", "eh_proj.weight", (64, 64)),
        ("glm, own ends", "embed_tokens.weight", (255, 64)),
        ("glm, own ends", "shared_head.head.weight", (256, 63)),
        ("mimo", "final_layernorm.weight", (64, 1)),
        ("mimo", "self_attn.q_proj.weight", (64, 63)),
        ("mimo", "mlp.down_proj.weight", (1, 1)),
        ("qwen3.5", "self_attn.k_norm.weight", (3,)),
    ],
)
def test_tensors_that_do_not_fit_are_a_sentence(layout: str, name: str, shape: tuple[int, ...]) -> None:
    checkpoint = Checkpoint(layout)
    (full,) = [stored for stored in checkpoint.tensors if stored.endswith(name)]
    checkpoint.source.replace(full, torch.zeros(shape))
    with pytest.raises(ModelError) as raised:
        draft(checkpoint)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["hnorm.weight", "self_attn.k_proj.weight", "shared_head.norm.weight"])
def test_a_tensor_that_is_not_there_is_a_sentence(name: str) -> None:
    checkpoint = Checkpoint("glm")
    checkpoint.source.forget(f"model.layers.{LAYERS}.{name}")
    with pytest.raises(CorruptModel) as raised:
        draft(checkpoint)
    assert "\n" not in str(raised.value)


def test_a_layer_of_no_numbers_is_a_sentence() -> None:
    checkpoint = Checkpoint("mimo")
    name = "model.mtp_layers.0.input_proj.weight"
    checkpoint.source.replace(name, torch.full_like(checkpoint.tensors[name], torch.nan))
    session = draft(checkpoint).new_session()
    session.reset([1, 2, 3])
    session.add(rows(torch.randn(3, 64), range(2)))
    with pytest.raises(DrafterFailed, match=r"the MTP layer gives .* not finite"):
        session.propose([()], 2)


def test_the_default_format_is_8_bits() -> None:
    checkpoint = Checkpoint("mimo")
    layout = find_mtp(checkpoint.source)
    assert layout is not None
    session = MtpDraft(checkpoint.source, layout).new_session()
    session.reset([1, 2, 3])
    session.add(rows(torch.randn(3, 64), range(2)))
    assert len(session.propose([()], 4)[0]) == 4
