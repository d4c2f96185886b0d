"""Packed linear layers beside torch's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from kernel_timing import Timed, measure, table, wall
from rounded_weights import to_fp8, to_nf4

from swarm_kernels.ops import dispatch
from swarm_kernels.ops.base.codebook_linear import quantize_mxfp4

SHAPES = ((3072, 576), (576, 1536), (49152, 576), (4096, 4096))  # outputs, inputs
ROWS = (1, 4, 16, 64, 512)
FEWER = (("int8", "bf16"), ("int4", "int8"), ("mxfp4", "int4"), ("nf4", "int4"), ("fp8", "bf16"), ("fp8", "int8"))
NAMES = ("bf16", "int8", "int4", "mxfp4", "nf4", "fp8", "fp32", "torch bf16", "torch fp32")


def bench(seconds: float) -> str:
    rows = []
    for outputs, inputs in SHAPES:
        weight = torch.randn(outputs, inputs)
        half = weight.bfloat16()
        packed = {
            "bf16": dispatch.pack_linear(half),
            "int8": dispatch.quantize_linear(weight),
            "int4": dispatch.quantize_linear(weight, bits=4),
            "mxfp4": dispatch.pack_stored(quantize_mxfp4(weight), None, inputs),
            "nf4": dispatch.pack_stored(to_nf4(weight), None, inputs),
            "fp8": dispatch.pack_stored(to_fp8(weight), None, inputs),
            "fp32": dispatch.pack_linear(weight),
        }
        for count in ROWS:
            x = torch.randn(count, inputs)
            x_half = x.bfloat16()
            works: dict[str, Timed] = {
                name: wall(lambda linear=linear: linear(x))  # type: ignore[misc]  # noqa: B023
                for name, linear in packed.items()
            }
            works["torch bf16"] = wall(lambda: F.linear(x_half, half))  # noqa: B023
            works["torch fp32"] = wall(lambda: F.linear(x, weight))  # noqa: B023
            pairs = measure(seconds, works)
            times = " | ".join(f"{1e3 * pairs.median(name):.0f}" for name in NAMES)
            fewer = " | ".join(f"{pairs.ratio(*two):.2f}" for two in FEWER)
            rows.append(f"{outputs} x {inputs}, {count} | {times} | {fewer}")
    return table(" | ".join(("weights, rows", *NAMES, *map(" / ".join, FEWER))), rows)
