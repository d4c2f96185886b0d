"""A few attacks of `process_siege` for a moment: no honest answer fails, nobody dies, nothing grows without bound.

How quick the answers stay is measured by `make siege`; here a busy machine may take its time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from swarm_kernels.models.source import ModelSource

SIEGE = Path(__file__).with_name("process_siege.py")
ATTACKS = ("malformed", "half-open-tls", "wrong-opens")
MOST_MIB = 256.0
MOST_DESCRIPTORS = 1024


def _networks() -> bool:
    try:
        command = ["unshare", "--user", "--map-root-user", "--net", "ip", "link", "add", "siege0", "type", "bridge"]
        return subprocess.run(command, capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@pytest.mark.processes
@pytest.mark.real_model
def test_attacked_nodes_live_and_answer(tmp_path: Path, real_model: ModelSource) -> None:
    if not _networks():
        pytest.skip("this user may not make network namespaces")
    found = tmp_path / "siege.json"
    command = [sys.executable, str(SIEGE), "--seconds", "3", "--quiet", "2", "--json", str(found)]
    command += [word for name in ATTACKS for word in ("--attack", name)]
    path = [str(SIEGE.parent), str(SIEGE.parent.with_name("chaos")), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    results = msgspec.json.decode(found.read_bytes())
    assert [result["attack"] for result in results] == list(ATTACKS), done.stdout
    for result in results:
        assert result["nodes_alive"], result
        assert not result["failed"], result
        assert not result["wrong"], result
        assert result["memory_mib"] <= MOST_MIB, result
        assert result["descriptors"] <= MOST_DESCRIPTORS, result
        assert result["answers"] > 0, result
