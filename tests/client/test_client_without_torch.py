"""What `pip install swarm-llm` brings is enough to use a swarm: every package of the extra `node` raises ImportError
here, and chat, gateway and library give the same tokens as with all of them, from real nodes with the real model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_node_processes import started

from swarm.extras import NODE_PACKAGES
from swarm_kernels.models.source import ModelSource

pytestmark = [pytest.mark.processes, pytest.mark.real_model]

PROMPT = "Name three colors of the rainbow."
BLOCKED = sorted({*NODE_PACKAGES, "uvloop", "triton", "libp2p", "trio"})
LIBRARY = """
import asyncio, json, sys
from swarm.config import ClientConfig
from swarm_client import SwarmClient

async def main(model, peers):
    config = ClientConfig(model=model, peers=tuple(peers), audits="wait")
    async with SwarmClient(config=config) as client:
        messages = [{"role": "user", "content": sys.argv[1]}]
        async with client.chat_stream(messages, max_new_tokens=12, temperature=0.0) as stream:
            ids, audit = list((await stream.read()).token_ids), await stream.audited()
        print(json.dumps({"ids": ids, "checked": len(audit.checked), "why": audit.reason, "liars": audit.liars}))

asyncio.run(main(sys.argv[2], sys.argv[3:]))
"""


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory, real_model: ModelSource) -> Iterator[tuple[Path, str, list[str]]]:
    """(SWARM_HOME, model, peers) of a swarm in which each layer has two nodes."""
    from node_fakes import private_home

    home = private_home(tmp_path_factory.mktemp("home"))
    model = str(real_model.path)
    local = ("local", "--layers", "0:15,15:30,0:15,15:30", "--nodes", "4", "--model", model, "--threads", "1", "--json")
    with started(home, *local) as nodes:
        yield home, model, nodes.read_until("ready")["peers"]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder on whose account these packages cannot be imported."""
    folder = tmp_path_factory.mktemp("without")
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({BLOCKED!r}))\n")
    return folder


def environment(home: Path, without: Path | None) -> dict[str, str]:
    path = os.pathsep.join(entry for entry in (str(without or ""), *sys.path) if entry)
    return {**os.environ, "SWARM_HOME": str(home), "PYTHONPATH": path}


def run(home: Path, without: Path | None, *command: str) -> str:
    command = (sys.executable, *command)
    done = subprocess.run(
        command, env=environment(home, without), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def flags(model: str, peers: list[str]) -> list[str]:
    return ["--model", model, *(word for peer in peers for word in ("--peer", peer))]


def test_the_packages_are_not_there(without: Path, tmp_path: Path) -> None:
    check = """
import importlib
for name in %r:
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    raise SystemExit(name)
"""
    run(tmp_path, without, "-c", check % BLOCKED)


def test_chat_gives_the_same_tokens(swarm: tuple[Path, str, list[str]], without: Path) -> None:
    home, model, peers = swarm
    words = ("-m", "swarm_client", "--prompt", PROMPT, "--greedy", "--max-new-tokens", "24", "--json")
    answers = [json.loads(run(home, way, *words, *flags(model, peers))) for way in (without, None)]
    assert answers[0]["text"] == answers[1]["text"]
    assert answers[0]["token_ids"] == answers[1]["token_ids"]
    assert len(answers[0]["token_ids"]) > 8


def test_the_library_has_its_answers_audited(swarm: tuple[Path, str, list[str]], without: Path) -> None:
    home, model, peers = swarm
    answers = [json.loads(run(home, way, "-c", LIBRARY, PROMPT, model, *peers)) for way in (without, None)]
    assert answers[0]["ids"] == answers[1]["ids"]
    assert [(answer["checked"], answer["liars"]) for answer in answers] == [(2, []), (2, [])], answers


def test_the_gateway_answers_chats(swarm: tuple[Path, str, list[str]], without: Path) -> None:
    home, model, peers = swarm
    command = [sys.executable, "-m", "swarm_gateway", "--json", "--port", "0", *flags(model, peers)]
    process = subprocess.Popen(command, env=environment(home, without), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        body: dict[str, Any] = {"model": ready["models"][0], "temperature": 0, "max_tokens": 12}
        body |= {"messages": [{"role": "user", "content": PROMPT}], "tools": [], "n": 2}
        answer = ask(ready["address"], body)
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
        assert len({choice["message"]["content"] for choice in answer["choices"]}) == 1
        pattern = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
        number = ask(ready["address"], {**body, "n": 1, "response_format": pattern})["choices"][0]["message"]
        assert number["content"].strip().lstrip("-").isdigit()
    finally:
        process.terminate()
        process.communicate(timeout=60)


def ask(address: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        found: dict[str, Any] = json.load(response)
    return found


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (("swarm_node", "join"), "swarm-node: it needs psutil"),
        (("swarm_client", "--prompt", "hi", "--local-layers", "1:1"), "--local-layers"),
        (("swarm_client", "--prompt", "hi", "--drafter", "smollm2-135m"), "a drafter on this machine needs torch"),
        (("swarm_privacy.cli", "measure", "--text", __file__, "--train", __file__), "swarm-privacy: it needs"),
        (("swarm_training.cli", "eval"), "swarm-draft: it needs torch"),
    ],
)
def test_what_needs_more_says_what_to_install(
    command: tuple[str, ...], sentence: str, swarm: tuple[Path, str, list[str]], without: Path
) -> None:
    home, model, peers = swarm
    words = [sys.executable, "-m", *command, *(flags(model, peers) if command[0] == "swarm_client" else ())]
    done = subprocess.run(
        words, env=environment(home, without), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr
    assert done.stderr.rstrip().endswith("pip install 'swarm-llm[node]'")
    assert done.stderr.count("\n") == 1
