"""A pytest plugin that limits the kernels, and torch, to AVX2, as on a machine that has nothing newer:

    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 PYTHONPATH=tests pytest -p hold_isa

Limits this process (and xdist's workers) only: node processes that tests start choose for themselves.
"""

from __future__ import annotations

import pytest

from swarm.errors import KernelError
from swarm_kernels.ops import dispatch
from swarm_kernels.ops.cpu import cpu_library

NAMES = ("avx2", "generic", cpu_library.REFERENCE)
_use = cpu_library.select_isa


def _held(name: str) -> None:
    """As `cpu_library.select_isa`, on a machine whose best is AVX2."""
    if name not in (*NAMES, "best"):
        raise KernelError(f"{name}: limited to AVX2")
    _use("avx2" if name == "best" else name)


@pytest.hookimpl
def pytest_configure() -> None:
    cpu_library.select_isa = dispatch.select_isa = _held
    _held("best")
