"""Fixtures that more than one room's tests use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from swarm.errors import ModelError
from swarm_kernels.loader import ModelSource, open_model


@pytest.fixture(scope="session")
def real_model() -> Iterator[ModelSource]:
    """The built-in SmolLM2-135M, fetched on first use. A failure to fetch it fails the test: it is never skipped."""
    try:
        source = open_model("smollm2-135m")
    except ModelError as error:
        pytest.fail(str(error), pytrace=False)
    yield source
    source.close()
