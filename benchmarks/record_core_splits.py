"""Records the milliseconds of a pool of threads and of two core groups in turns, for the test of how they are compared:

    python benchmarks/record_core_splits.py tests/kernels/data/core_split_timings.json

Two layers of SmolLM2-135M in bf16, 1 and 16 rows, halves of the columns, as `calibration.hetero_cores` times them. Run
it beside other programs: the test is about noise.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from swarm.types import LayerSpan
from swarm_kernels.calibration.cost_curve import StepTimer
from swarm_kernels.calibration.hetero_cores import ColumnSplitPolicy, apply
from swarm_kernels.device.core_groups import find_core_groups
from swarm_kernels.device.device import physical_cores
from swarm_kernels.models.open import open_model
from swarm_kernels.runtime.load import load_span


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--turns", type=int, default=400)
    args = parser.parse_args()
    policy, groups = ColumnSplitPolicy(), find_core_groups()
    assert groups is not None, "there is only one core"
    span = load_span(open_model("smollm2-135m"), LayerSpan(1, 3), torch.bfloat16)
    timer = StepTimer(span, policy.context_tokens, max(policy.widths))
    times: dict[str, list[list[float]]] = {"pool": [], "split": []}
    for _ in range(args.turns):
        for name, found in times.items():
            apply(replace(groups, slow_permille=500) if name == "split" else None, physical_cores())
            taken = []
            for width in policy.widths:
                timer.ms(width)
                taken.append(round(timer.ms(width), 3))
            found.append(taken)
    args.file.write_text(json.dumps(times) + "\n")


if __name__ == "__main__":
    main()
