"""Which implementation of the kernels a test runs on, and the hub of tests that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hub_parts import folder, hub, root

from swarm.errors import KernelError
from swarm_kernels.ops import dispatch

__all__ = ["folder", "hub", "isa", "root"]


@pytest.fixture(params=["avx512bf16", "avx512vnni", "avx512", "avx2", "generic"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs on each compiled instruction set this machine has, on two threads.

    torch, which computes what is expected, gets one: its threads spin on cores that others may need.
    """
    try:
        dispatch.select_isa(request.param)
    except KernelError as error:
        pytest.skip(str(error))
    before = torch.get_num_threads()
    dispatch.set_threads(2)
    torch.set_num_threads(1)
    yield request.param
    dispatch.select_isa("best")
    dispatch.set_threads(before)
