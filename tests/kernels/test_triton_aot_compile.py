"""The Triton kernels compile for every GPU we name, with none at hand, and fit its shared memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("triton", reason="Triton is not installed")

TARGETS = (80, 86, 89, 90, 120)
LINE = re.compile(r"sm_(\d+)  (.+?) +([\d.]+) KiB shared of (\d+)")


def test_the_kernels_compile_for_five_targets() -> None:
    """In two processes: Triton may have been told to interpret in this one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "swarm_kernels.ops.triton.aot_compile", "--sample"]
    running = [
        subprocess.Popen(
            [*command, *map(str, part)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for part in (TARGETS[:3], TARGETS[3:])
    ]
    found = []
    for process in running:
        output, errors = process.communicate(timeout=600)
        if process.returncode == 3:
            pytest.skip(errors.strip())
        assert process.returncode == 0, errors
        found += LINE.findall(output)
    assert {int(target) for target, *_ in found} == set(TARGETS)
    kernels = {title.split()[0] for _, title, *_ in found}
    assert kernels == {
        "attend",
        "norm_rope_and_cache",
        "add_rms_norm",
        "silu_times",
        "cut_tiles",
        "merge_splits",
        "commit_tree_slots",
    }
    for _, title, used, limit in found:
        assert float(used) <= int(limit), title
