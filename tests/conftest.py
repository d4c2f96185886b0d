"""Fixtures that more than one folder's tests use."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from swarm.errors import ModelError

if TYPE_CHECKING:
    from swarm_kernels.models.source import ModelSource


os.environ["SWARM_DISCOVERY"] = "0"  # no test sends multicast into whatever network it runs in


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """One thread for torch, and for the kernels that are loaded after: more of them make tiny models several times
    slower, most of all where tests run side by side. Tests of threads set their own number; later tests have one again.
    """
    torch = sys.modules.get("torch")  # the planner's tests do without
    if torch is not None:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def real_model() -> Iterator[ModelSource]:
    """The built-in SmolLM2-135M, fetched on first use. A failure to fetch it fails the test: it is never skipped."""
    from swarm_kernels.models.open import open_model  # brings torch, which the planner's tests do without

    try:
        source = open_model("smollm2-135m")
    except ModelError as error:
        pytest.fail(str(error), pytrace=False)
    yield source
    source.close()
