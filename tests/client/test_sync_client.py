"""SyncSwarmClient without `with`: it connects at the first call, ends with the program, and refuses after `close`."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from typing import Any

import pytest

import swarm_client.sync
from swarm.errors import SwarmError, UsageError
from swarm_client.sync import SyncSwarmClient

DEADLINE_S = 20


class FakeClient:
    """Stands for SwarmClient: counts how often it is entered and left."""

    def __init__(self, model: Any, peers: Any, *, config: Any, fails: int = 0) -> None:
        self.entered, self.left, self.fails = 0, 0, fails
        self.in_call = threading.Event()

    async def __aenter__(self) -> FakeClient:
        self.entered += 1
        if self.entered <= self.fails:
            raise UsageError("no peers")
        return self

    async def __aexit__(self, *_: Any) -> None:
        self.left += 1

    async def snapshot(self) -> Any:
        return self.entered

    async def generate(self, prompt: str, **options: Any) -> Any:
        self.in_call.set()
        await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm_client.sync, "SwarmClient", FakeClient)


def inner(client: SyncSwarmClient) -> Any:
    return client._client


def loop_threads() -> int:
    return sum(thread.name == "swarm-client" for thread in threading.enumerate())


def test_the_first_call_connects_once() -> None:
    client = SyncSwarmClient()
    assert (client.snapshot(), client.snapshot()) == (1, 1)
    client.close()
    client.close()
    assert inner(client).left == 1
    assert loop_threads() == 0
    with pytest.raises(UsageError, match="closed"):
        client.snapshot()
    with pytest.raises(UsageError, match="closed"):
        client.stream("hi")


def test_after_with_a_call_is_refused() -> None:
    with SyncSwarmClient() as client:
        assert client.snapshot() == 1
    with pytest.raises(UsageError, match="closed"), client:
        pass


def test_close_before_the_first_call() -> None:
    SyncSwarmClient().close()
    assert loop_threads() == 0


def test_a_failed_connection_is_raised_and_tried_again() -> None:
    client = SyncSwarmClient(fails=1)
    with pytest.raises(UsageError, match="no peers"):
        client.snapshot()
    assert loop_threads() == 0
    assert client.snapshot() == 2
    client.close()


def test_a_forgotten_client_disconnects() -> None:
    client = SyncSwarmClient()
    client.snapshot()
    fake = inner(client)
    del client
    gc.collect()
    assert fake.left == 1
    assert loop_threads() == 0


def test_close_ends_the_calls_of_other_threads() -> None:
    client = SyncSwarmClient()
    errors: list[SwarmError] = []

    def call() -> None:
        try:
            client.generate("hi")
        except SwarmError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert inner(client).in_call.wait(DEADLINE_S)
    client.close()
    thread.join(DEADLINE_S)
    assert "closed" in str(*errors)


PROGRAM = """
import swarm_client.sync as sync
class Client:
    def __init__(self, *_, **__): pass
    async def __aenter__(self): return self
    async def __aexit__(self, *_): print("left")
    async def snapshot(self): return "snapshot"
sync.SwarmClient = Client
client = sync.SyncSwarmClient()
print(client.snapshot())
"""


def test_the_interpreter_ends_and_disconnects() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert (ended.stdout, ended.stderr) == ("snapshot\nleft\n", "")
