"""A whole SmolLM2-135M a step: bf16, int8 and int4 beside llama.cpp with the same weights in BF16, in turn.

llama.cpp is held to the instruction set in use if `llama_cpp_build` has built it for that.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
from kernel_timing import Timed, measure, table, tree_plan, wall
from llama_cpp_build import built
from llama_cpp_process import llama_cpp

from swarm.types import LayerSpan
from swarm_kernels.device.device import DTYPES
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.models.source import ModelSource
from swarm_kernels.ops import dispatch
from swarm_kernels.runtime.load import load_span

CONTEXT = 256
HEADER = "rows | bf16 | int8 | int4 | llama.cpp BF16 | bf16 / llama.cpp | int8 / bf16 | int4 / int8"
ROWS = (1, 4, 16, 64)


def swarm(source: ModelSource, weights: torch.dtype) -> dict[int, Timed]:
    """One step, tokens to logits of all rows, by its number of rows: a binary tree on CONTEXT tokens."""
    span = load_span(source, LayerSpan(0, source.config.num_layers), weights)
    cache = span.new_cache(CONTEXT + max(ROWS))
    cache.open(b"s", CONTEXT)
    metadata = cache.schedule([StepRequest(b"s", 0, CONTEXT)])
    span.forward(span.embed(list(range(CONTEXT))), metadata, cache)

    def step(rows: int) -> Timed:
        metadata, _ = tree_plan(CONTEXT, rows)
        tokens = list(range(1000, 1000 + rows))
        return wall(lambda: span.logits(span.forward(span.embed(tokens), metadata, cache)))

    return {rows: step(rows) for rows in ROWS}


def write_bf16_gguf(source: Path, target: Path) -> Path:
    """A copy of a GGUF file with its matrices in BF16."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    bf16 = gguf.GGMLQuantizationType.BF16
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, bf16), raw_dtype=bf16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def bench(source: ModelSource, seconds: float, threads: int) -> tuple[str, list[str]]:
    """-> (table, missed targets): milliseconds a step."""
    steps = {name: swarm(source, DTYPES[name]) for name in ("bf16", "int8", "int4")}
    lines, missed = [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        llama_cpp(
            write_bf16_gguf(source.path, Path(folder) / "bf16.gguf"), threads, CONTEXT, ROWS, built(dispatch.isa())
        ) as theirs,
    ):
        if theirs is not None:
            steps["llama.cpp BF16"] = theirs.steps
        for rows in ROWS:
            pairs = measure(seconds, {name: by_rows[rows] for name, by_rows in steps.items()})
            against = f"{pairs.ratio('bf16', 'llama.cpp BF16'):.2f}" if theirs else "not installed"
            llama = f"{pairs.median('llama.cpp BF16'):.2f}" if theirs else "not installed"
            swarm_ms = " | ".join(f"{pairs.median(name):.2f}" for name in ("bf16", "int8", "int4"))
            fewer = f"{pairs.ratio('int8', 'bf16'):.2f} | {pairs.ratio('int4', 'int8'):.2f}"
            lines.append(f"{rows} | {swarm_ms} | {llama} | {against} | {fewer}")
            limit = {1: 1.2, 16: 0.6}.get(rows)
            if theirs and limit and pairs.ratio("bf16", "llama.cpp BF16") > limit:
                missed.append(f"{rows} rows: {against} of llama.cpp's time, not {limit}")
            if pairs.ratio("int8", "bf16") >= 1:
                missed.append(f"{rows} rows: int8 is no faster than bf16")
            if rows <= 4 and pairs.ratio("int4", "int8") >= 1:
                missed.append(f"{rows} rows: int4 is no faster than int8")
    return table(HEADER, lines), missed
