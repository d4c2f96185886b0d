"""Without a GPU: the Triton tests in Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

pytest.importorskip("triton", reason="Triton is not installed")

HERE = Path(__file__).resolve().parent
SUITES = ("test_triton_ops.py", "test_triton_layers.py")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the suites run on the GPU")
def test_the_kernels_are_right_in_the_interpreter() -> None:
    """Both suites at once, each in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--no-header"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [*command, str(HERE / suite)],
            env=environment,
            cwd=HERE.parent.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for suite in SUITES
    ]
    for process in running:
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
        assert "skipped" not in output, output
