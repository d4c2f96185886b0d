"""schemathesis over /openapi.json: every operation with values that its schema allows and with wrong ones.

SWARM_FUZZ_EXAMPLES: random requests of each operation; if it is set, also those that cover every keyword of the schema,
3,000 together, which take minutes.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
from gateway_swarm import gateway_swarm

EXAMPLES = os.environ.get("SWARM_FUZZ_EXAMPLES")
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
)


@pytest.mark.slow
async def test_no_request_breaks_the_gateway(tmp_path: Path) -> None:
    async with gateway_swarm(sockets=True) as gateway:
        gateway.model.max_tokens = 4
        code, said = await schemathesis(str(gateway.http.base_url.join("/openapi.json")), tmp_path)
        assert code == 0, said
        await gateway.until(lambda: gateway.sessions() == 0)
        assert gateway.model.admission.running == 0


async def schemathesis(url: str, folder: Path) -> tuple[int, str]:
    """Runs its own process, in `folder`, where it may write. -> (exit code, what it printed)"""
    program = Path(sys.executable).with_name("schemathesis")
    words = ["run", url, f"--checks={','.join(CHECKS)}", f"--max-examples={EXAMPLES or 15}"]
    words += ["--seed=1", "--no-color", "--continue-on-failure", "--no-shrink", "--request-timeout=20"]
    words.append("--phases=coverage,fuzzing" if EXAMPLES else "--phases=fuzzing")
    words += ["--exclude-path=/swarm/events"]  # a stream without an end
    hooks = {"SCHEMATHESIS_HOOKS": str(Path(__file__).with_name("openapi_fuzz_hooks.py"))}
    process = await asyncio.create_subprocess_exec(
        program,
        *words,
        cwd=folder,
        env={**os.environ, **hooks},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode(errors="replace")[-20_000:]
