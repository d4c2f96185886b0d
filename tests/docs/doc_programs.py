"""Whether a documented command would be understood: by our own programs' parsers, the Makefile, or a script's --help.

Nothing here runs what it checks; whatever is wrong is an AssertionError in a sentence.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import typer
from doc_blocks import ROOT, Command

BIN = Path(sys.executable).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SCRIPTS: dict[str, str] = PROJECT["project"]["scripts"]
BEHIND = {"swarm-node": "swarm_node.commands.cli"}  # what its script imports, unless its packages are missing
SCRIPT_FOLDERS = ("benchmarks", "examples", "tests")
SET_UP = ("apt", "apt-get", "cd", "curl", "export", "git", "pip", "source", "sudo", ".")  # no program of ours
TOOLS = ("mypy", "ruff", "systemctl", "kill")  # checked by their own projects
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def environment(more: dict[str, str]) -> dict[str, str]:
    """For a command: ours first on the paths, as after `make setup`."""
    return {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **more}


@functools.cache
def program(name: str) -> Any:
    """The click command behind one of our console scripts: what `pyproject.toml` names, before it runs."""
    module = importlib.import_module(BEHIND.get(name) or SCRIPTS[name].partition(":")[0])
    return typer.main.get_command(module.app)


def understood(name: str, words: list[str]) -> None:
    """The program takes these arguments: every flag with its value is parsed for real, then nothing is run."""
    command, path = program(name), name
    while getattr(command, "commands", None) is not None and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"{path} has no command {words[0]}"
        command, path, words = command.commands[words[0]], f"{path} {words[0]}", words[1:]
    if words != ["--help"]:
        try:
            command.make_context(path, list(words))
        except Exception as error:  # noqa: BLE001  click's own classes live in two places
            raise AssertionError(f"{path} {' '.join(words)}: {error}") from None


@functools.cache
def flags_of(name: str) -> frozenset[str]:
    """All flags of a program of ours, its commands' too."""
    found, to_do = set(), [program(name)]
    while to_do:
        command = to_do.pop()
        to_do += getattr(command, "commands", {}).values()
        for parameter in command.params:
            found.update((*parameter.opts, *parameter.secondary_opts))
    return frozenset(found)


@functools.cache
def known_flags() -> frozenset[str]:
    """Every flag of our programs, scripts and tests."""
    found = {"--help"}.union(*(flags_of(name) for name in SCRIPTS))
    for folder in SCRIPT_FOLDERS:
        for file in (ROOT / folder).rglob("*.py"):
            found.update(re.findall(r'"(--[a-z][a-z0-9-]*)"', file.read_text(encoding="utf-8")))
    return frozenset(found)


def target_exists(words: list[str]) -> None:
    """`make` can make this: targets are there, variables are used."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        if "=" in word:
            assert f"$({word.partition('=')[0]})" in makefile or f"$({word.partition('=')[0]}," in makefile, word
        elif not word.startswith("-"):
            assert re.search(rf"(?m)^{re.escape(word)}:", makefile), f"make has no target {word}"


@functools.cache
def help_of(script: Path, variables: frozenset[tuple[str, str]]) -> str:
    done = subprocess.run(
        [sys.executable, str(script), "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment({**dict(variables), "COLUMNS": "200"}),
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{script.name} --help: {done.stderr[-500:]}"
    return done.stdout


def python_takes(command: Command) -> None:
    """A script that exists and whose --help names every flag used; or a module that can be found."""
    words = command.words[1:]
    if words[:1] == ["-m"]:
        assert importlib.util.find_spec(words[1]) is not None, f"no module {words[1]}"
        return
    if not words or words[0] == "-c":
        return
    script = ROOT / words[0]
    assert script.is_file(), f"no file {words[0]}"
    used = [flag for word in words[1:] for flag in FLAG.findall(word)]
    if used:
        shown = set(FLAG.findall(help_of(script, frozenset(command.environment.items()))))
        assert set(used) <= shown, f"{words[0]} knows no {', '.join(sorted(set(used) - shown))}"


def pytest_takes(words: list[str]) -> None:
    """Paths and tests that are named exist, and so do markers."""
    markers = {marker.partition(":")[0] for marker in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    given = iter(words)
    for word in given:
        if word == "-m":
            named = set(re.findall(r"\w+", next(given))) - {"and", "or", "not"}
            assert named <= markers, f"no markers {named - markers}"
        elif word in ("-k", "-n", "-p", "--dist"):
            next(given)
        elif not word.startswith("-"):
            path, *names = word.split("::")
            assert (ROOT / path).exists(), f"no file {path}"
            text = (ROOT / path).read_text(encoding="utf-8") if names else ""
            assert all(name.partition("[")[0] in text for name in names), f"no test {word}"


def check(command: Command) -> None:
    """Raises AssertionError if the command would not be understood."""
    name, *words = command.words
    if name in SCRIPTS:
        understood(name, words)
    elif name == "make":
        target_exists(words)
    elif name in ("python", "python3"):
        python_takes(command)
    elif name == "pytest":
        pytest_takes(words)
    elif name in TOOLS:
        assert shutil.which(name, path=environment({})["PATH"]), f"{name} is not installed"
    else:
        assert name in SET_UP or (ROOT / name).is_file(), f"what is {name}? Blocks that are not run are marked text"


def check_inline(command: Command) -> None:
    """As `check`, for code within a sentence, which may leave out what is required: commands and flags exist.

    `swarm-plan allocate | balance FILE` names alternatives; words in capitals stand for something.
    """
    name, *words = command.words
    if name in SCRIPTS:
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert flags <= flags_of(name) | {"--help"}, f"{name} knows no {', '.join(sorted(flags - flags_of(name)))}"
        verbs = getattr(program(name), "commands", {})
        if verbs and words and words[0].islower():
            assert words[0] in verbs, f"{name} has no command {words[0]}"
    else:
        check(command)
