"""What a checkpoint is served in: 4-bit weights as they are, 8 bits for what 4 do not hold, and `--dtype auto`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from model_files import tiny_model, write_gguf
from tiny_models import ModelTensors

from swarm.types import LayerSpan
from swarm_kernels.calibration.cost_curve import verify_layer
from swarm_kernels.device.device import INT4
from swarm_kernels.models.gguf_types.blocks import QUANT_BLOCKS
from swarm_kernels.models.gguf_types.dequant import GGUF_CODES, dequantize
from swarm_kernels.models.gguf_types.four_bits import GGUF_FOUR_BITS, four_bits_from_gguf
from swarm_kernels.models.native_format import native_dtype
from swarm_kernels.models.open import open_model
from swarm_kernels.models.source import ModelSource
from swarm_kernels.runtime.llama_span import LlamaSpan
from swarm_kernels.runtime.load import load_span

Q = gguf.GGMLQuantizationType
TYPES = {name: number for number, (name, _, _) in QUANT_BLOCKS.items()}


@pytest.mark.parametrize("name", sorted(GGUF_FOUR_BITS - GGUF_CODES.keys()))
@pytest.mark.parametrize("seed", range(4))
def test_gguf_blocks_keep_their_numbers(name: str, seed: int) -> None:
    """Q4_0 and Q4_1 to the last bit; of Q4_K the scales and minima, which are products, are rounded to fp16."""
    _, values, size = QUANT_BLOCKS[TYPES[name]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (6 * 2, size), dtype=np.uint8)
    floats = rng.uniform(-0.02, 0.02, (len(blocks), 1 if name == "Q4_0" else 2)).astype(np.float16)
    blocks[:, : 2 * floats.shape[1]] = floats.view(np.uint8)
    shape = (6, 2 * values)
    weights = four_bits_from_gguf(blocks.reshape(-1), TYPES[name], shape)
    assert weights is not None
    found = weights.embedding_rows(torch.arange(shape[0]))
    wanted = dequantize(blocks.reshape(-1), TYPES[name], shape)
    if name == "Q4_K":
        largest = 63 * 0.02 * (15 + 1)
        assert (found - wanted).abs().max() <= 2.0**-11 * largest
    else:
        assert torch.equal(found, wanted)


def test_other_blocks_are_none() -> None:
    blocks = np.zeros(2 * 34, dtype=np.uint8)
    assert four_bits_from_gguf(blocks, TYPES["Q8_0"], (2, 32)) is None


@pytest.mark.parametrize(
    ("quant", "wanted"),
    [
        (None, torch.bfloat16),
        (Q.BF16, torch.bfloat16),
        (Q.Q4_0, INT4),
        (Q.Q4_1, INT4),
        (Q.Q5_0, torch.int8),
        (Q.Q8_0, torch.int8),
    ],
)
def test_auto_is_the_format_of_the_files(quant: Q | None, wanted: torch.dtype, tmp_path: Path) -> None:
    source = open_model(str(write_gguf(tmp_path / "m.gguf", tiny_model(), quant)))
    assert native_dtype(source) == wanted
    source.close()


@pytest.mark.parametrize(
    ("kind", "wanted"), [("mixtral", INT4), ("gpt_oss", INT4), ("llama4_text", INT4), ("dbrx", torch.bfloat16)]
)
def test_auto_of_mixtures_is_the_format_of_the_files_where_they_are_served_in_it(
    kind: str, wanted: torch.dtype
) -> None:
    source = ModelTensors(tiny_model())
    assert native_dtype(source) == torch.bfloat16
    object.__setattr__(source.config, "model_type", kind)
    source.native = lambda name: INT4  # type: ignore[method-assign]
    assert native_dtype(source) == wanted


def int4_span(source: ModelSource) -> LlamaSpan:
    span = load_span(source, LayerSpan(0, source.config.num_layers), INT4)
    assert isinstance(span, LlamaSpan)
    return span


def test_a_4_bit_span_holds_4_bit_weights_as_they_are_stored(tmp_path: Path) -> None:
    source = open_model(str(write_gguf(tmp_path / "m.gguf", tiny_model(), Q.Q4_0)))
    span = int4_span(source)
    names = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"]
    stored = torch.cat([source.tensor(name) for name in names])
    assert torch.equal(span.weights[0].attention.qkv.embedding_rows(torch.arange(len(stored))), stored)
    verify_layer(span, source)
    source.close()


def test_a_4_bit_span_holds_in_8_bits_what_is_stored_in_8(tmp_path: Path) -> None:
    spans = {}
    for quant in (Q.Q4_1, Q.Q8_0, None):
        with closing(open_model(str(write_gguf(tmp_path / f"{quant}.gguf", tiny_model(), quant)))) as source:
            spans[quant] = int4_span(source)
            verify_layer(spans[quant], source)
    assert spans[Q.Q8_0].layer_bytes > 1.3 * spans[Q.Q4_1].layer_bytes
    assert spans[None].layer_bytes == spans[Q.Q4_1].layer_bytes
