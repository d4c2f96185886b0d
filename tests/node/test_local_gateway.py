"""The gateway beside `swarm-node local`, as a process: a small program of the same JSON lines stands in for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from swarm_node.commands import local_gateway
from swarm_node.commands.local_gateway import GatewayDied, gateway_beside

PEERS = ("/ip4/127.0.0.1/tcp/1/p2p/a", "/ip4/127.0.0.1/tcp/2/p2p/b")
LISTENS = """import json, sys, time
print(json.dumps({'event': 'ready', 'address': 'http://127.0.0.1:1/'}), flush=True)
"""
Write = Callable[[str], object]


class Reports:
    """What was reported: (event, fields)."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.sentences: list[str] = []
        self.came = asyncio.Event()

    def __call__(self, event: str, sentence: str, **fields: Any) -> None:
        self.events.append((event, fields))
        self.sentences.append(sentence)
        self.came.set()


@pytest.fixture
def write_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(local_gateway, "MODULE", "stand_in")
    return lambda text: (tmp_path / "stand_in.py").write_text(text)


def beside(reports: Reports, stop: asyncio.Event) -> Any:
    return gateway_beside("toy", PEERS, 11435, stop, reports)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_it_listens_and_is_stopped(write_program: Write, tmp_path: Path) -> None:
    args = tmp_path / "args"
    write_program(f"{LISTENS}open({str(args)!r}, 'w').write(json.dumps(sys.argv[1:]))\ntime.sleep(60)")
    reports, stop = Reports(), asyncio.Event()
    async with asyncio.timeout(20.0), beside(reports, stop):
        await reports.came.wait()
        ((event, fields),) = reports.events
        assert (event, fields["address"]) == ("gateway", "http://127.0.0.1:1")
        assert "http://127.0.0.1:1/v1" in reports.sentences[0]
        while not (args.exists() and args.read_text()):  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.01)
    assert gone(fields["pid"])
    assert len(reports.events) == 1
    given = json.loads(args.read_text())
    assert given[:7] == ["--json", "--host", "127.0.0.1", "--port", "11435", "--model", "toy"]
    assert given[7:] == ["--peer", PEERS[0], "--peer", PEERS[1]]


@pytest.mark.parametrize(
    ("text", "code", "sentence"),
    [
        (
            "print('no json', flush=True)\n"
            'print(\'{"event": "error", "error": "address_in_use", "message": "port 1 is taken"}\', flush=True)',
            "address_in_use",
            "the gateway: port 1 is taken",
        ),
        ("raise SystemExit('it broke')", "gateway_died", "the gateway ended with code 1: it broke"),
        ("print('[1]')", "gateway_died", "the gateway ended with code 0: without output"),
    ],
)
async def test_it_cannot_start(write_program: Write, text: str, code: str, sentence: str) -> None:
    write_program(text)
    reports = Reports()
    with pytest.raises(GatewayDied) as died:
        async with asyncio.timeout(20.0), beside(reports, asyncio.Event()):
            raise AssertionError("it did not start")
    assert (died.value.code, str(died.value)) == (code, sentence)
    assert reports.events == []


async def test_its_end_is_reported(write_program: Write) -> None:
    write_program(LISTENS + "time.sleep(0.2)\nraise SystemExit('it broke')")
    reports = Reports()
    async with asyncio.timeout(20.0), beside(reports, asyncio.Event()):
        while len(reports.events) < 2:
            reports.came.clear()
            await reports.came.wait()
    assert [event for event, _ in reports.events] == ["gateway", "gateway_died"]
    assert reports.sentences[1] == "the gateway ended with code 1: it broke"


async def test_a_stop_before_it_listens(write_program: Write) -> None:
    write_program("import time\ntime.sleep(60)")
    reports, stop = Reports(), asyncio.Event()
    asyncio.get_running_loop().call_later(0.3, stop.set)
    async with asyncio.timeout(20.0), beside(reports, stop):
        assert stop.is_set()
    assert reports.events == []


async def test_one_that_does_not_stop_is_killed(write_program: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_gateway, "STOP_S", 0.3)
    write_program("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + LISTENS + "time.sleep(60)")
    reports = Reports()
    async with asyncio.timeout(20.0), beside(reports, asyncio.Event()):
        await reports.came.wait()
    assert gone(reports.events[0][1]["pid"])
