"""What the documents show is run: their programs and questions against one small swarm with a gateway, `swarm-plan` and
the examples.

Commands that start something for good, need another machine or take minutes are only parsed, in `test_docs_read`.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_blocks import ROOT, Piece, commands, programs, shell_lines
from doc_programs import SCRIPTS, environment

from swarm.config import data_dir

pytestmark = [pytest.mark.processes, pytest.mark.real_model]
ANSWER_S, TOKENS = 120, 8
PEER = re.compile(r"/ip4/\.\.\./\S*?p2p/\.\.\.|\$PEER\b|\bMULTIADDR\b|/ip4/<[^\"\s]*")
GATEWAY = "http://127.0.0.1:11435"  # as the documents write it; ours listens on any port
CURL = ("curl", "--silent", "--show-error", "--fail-with-body")
PLACEHOLDERS = re.compile(r"(?<![\w-])[A-Z][A-Z_]{2,}(?![\w=])|\.\.\.|<\w+>")  # FILE, MODEL, TOKEN
RUNS = """
import ast, asyncio, inspect, sys
name, text = sys.argv[1], sys.stdin.read()
code = compile(text, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
waiting = eval(code, {"__name__": "__main__"})
if inspect.iscoroutine(waiting):
    asyncio.run(waiting)
"""


class LocalSwarm:
    """What `swarm-node local` of two nodes says, and the environment in which its commands find it."""

    def __init__(self, home: Path, peer: str, gateway: str) -> None:
        self.home, self.peer, self.gateway = home, peer, gateway

    def named(self, text: str) -> str:
        """With the addresses of this swarm in place of those of the documents."""
        return PEER.sub(self.peer, text.replace(GATEWAY, self.gateway))

    def environment(self, home: Path | None = None) -> dict[str, str]:
        return environment({"SWARM_HOME": str(home or self.home), "PEER": self.peer, "SWARM_DISCOVERY": "0"})

    def run(self, command: list[str], given: str = "", home: Path | None = None) -> str:
        done = subprocess.run(
            command,
            input=given,
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=self.environment(home),
            timeout=ANSWER_S,
            check=False,
        )
        assert done.returncode == 0, f"{shlex.join(command)[:200]}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"
        return done.stdout


def script(name: str, words: list[str]) -> list[str]:
    """A console script of this working tree, whatever is installed."""
    module, _, function = SCRIPTS[name].partition(":")
    start = f"import sys; sys.argv[0] = {name!r}; from {module} import {function} as main; sys.exit(main())"
    return [sys.executable, "-c", start, *words]


def home_like(folder: Path) -> Path:
    """A SWARM_HOME of its own, with the models and kernels that are there already."""
    for entry in data_dir().iterdir():
        if entry.name != "state":
            (folder / entry.name).symlink_to(entry)
    return folder


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, real_model: object) -> Iterator[LocalSwarm]:
    home = home_like(tmp_path_factory.mktemp("docs-home"))
    command = script("swarm-node", ["local", "--nodes", "2", "--threads", "1", "--gateway-port", "0", "--json"])
    quiet = environment({"SWARM_HOME": str(home), "SWARM_DISCOVERY": "0"})
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=quiet, start_new_session=True)
    try:
        assert process.stdout is not None
        events = {}
        for line in process.stdout:
            event = json.loads(line)
            events[event["event"]] = event
            if event["event"] == "gateway":
                break
        else:
            pytest.fail(f"`swarm-node local` ended: {events}", pytrace=False)
        yield LocalSwarm(home, events["ready"]["peers"][0], events["gateway"]["address"])
    finally:
        process.terminate()
        process.communicate(timeout=60)


def to_run() -> Iterator[Piece]:
    """The documented commands that end by themselves: one question, a look at the swarm, a plan of a file."""
    for piece in shell_lines():
        for command in commands(piece.text):
            name, *words = command.words
            question = name == "swarm-chat" and {"--once", "--prompt"} & set(words)
            look = name == "swarm-node" and (words[:1] == ["status"] or (words[:1] == ["top"] and "--once" in words))
            plan = name == "swarm-plan"
            ask = name == "curl" and any(word.startswith(GATEWAY) for word in words)
            if (question or look or plan or ask) and not PLACEHOLDERS.search(PEER.sub("", " ".join(words))):
                yield Piece(piece.place, shlex.join(command.words))


@pytest.mark.parametrize("piece", [pytest.param(piece, id=piece.place) for piece in to_run()])
def test_a_command_runs(piece: Piece, local: LocalSwarm) -> None:
    name, *words = (local.named(word) for word in shlex.split(piece.text))
    if name == "swarm-chat" and "--max-new-tokens" not in words:
        words += ["--max-new-tokens", str(TOKENS)]
    assert local.run([*CURL, *words] if name == "curl" else script(name, words)).strip()


@pytest.mark.parametrize("piece", [pytest.param(piece, id=piece.place) for piece in programs()])
def test_a_program_runs(piece: Piece, local: LocalSwarm) -> None:
    local.run([sys.executable, "-c", RUNS, piece.place], local.named(piece.text))


EXAMPLES = [pytest.param(file, id=file.name) for file in sorted((ROOT / "examples").glob("*.py"))]


@pytest.mark.parametrize("file", EXAMPLES)
def test_an_example_runs(file: Path, local: LocalSwarm, tmp_path: Path) -> None:
    """In a home of its own: an example may start a swarm, which must not take the place of ours."""
    home = home_like(tmp_path)
    (home / "state").mkdir()
    (home / "state" / "local.json").write_bytes((local.home / "state" / "local.json").read_bytes())
    assert local.run([sys.executable, str(file)], home=home).strip()
