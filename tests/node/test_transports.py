"""Node processes with and without the Go daemon serve one chain together, for clients with and without it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest
from memory_swarm import NumberTokenizer
from node_fakes import private_home, prompt_of
from test_node_processes import started
from tiny_models import hf_greedy, tiny_model

from swarm.config import ClientConfig, Libp2pImpl
from swarm_client import SwarmClient

pytestmark = pytest.mark.processes
TOKENS = 12


def test_daemon_and_python_nodes_serve_one_chain(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Everything goes by libp2p streams: direct connections are turned off."""
    home = private_home(tmp_path_factory.mktemp("home"))
    folder = tmp_path / "tiny"
    tiny_model("llama").save_pretrained(folder)
    common = ("join", "--model", str(folder), "--dtype", "fp32", "--threads", "1", "--transport", "libp2p", "--json")
    with started(home, *common, "--layers", "0:3", "--libp2p", "go") as go:
        address = go.read_until("started")["addresses"][0]
        with started(home, *common, "--layers", "3:6", "--libp2p", "python", "--peer", address) as python:
            python.read_until("serving")
            go.read_until("serving")
            assert not psutil.Process(python.process.pid).children(), "no Go program"
            prompt = prompt_of(9, 3)
            truth = hf_greedy(tiny_model("llama"), prompt, TOKENS)

            async def ask(libp2p_impl: Libp2pImpl, peer: str) -> None:
                config = ClientConfig(model=str(folder), peers=(peer,), transport="libp2p", libp2p_impl=libp2p_impl)
                async with SwarmClient(config=config, tokenizer=NumberTokenizer()) as client:  # type: ignore[arg-type]
                    answer = await client.generate(prompt, max_new_tokens=TOKENS)
                    assert list(answer.token_ids) == truth

            async def scenario() -> None:
                for impl in ("go", "python"):
                    for peer in (address, python.events[-1]["addresses"][0]):
                        await ask(impl, peer)  # type: ignore[arg-type]

            asyncio.run(scenario())
