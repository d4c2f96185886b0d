"""What `swarm-node local` leaves for its clients is read as a stranger's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm import config
from swarm.errors import UsageError


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        '{"model": "m", "peers": ["p"], "pid": 1e400}',
        f'{{"model": "m", "peers": ["p"], "pid": {10**30}}}',
        '{"model": "m", "peers": ["p"], "pid": -1}',
        '{"model": 5, "peers": "p", "pid": 1}',
        "[" * 100_000,
        "\udcff",
    ],
)
def test_a_damaged_file_of_a_local_swarm_is_none(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path))
    config.local_swarm_file().parent.mkdir(parents=True)
    config.local_swarm_file().write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match="no swarm on this machine"):
        config.local_swarm()
