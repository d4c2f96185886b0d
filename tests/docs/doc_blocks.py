"""What the documents tell a reader to type: fenced blocks and code between backticks, with the place of each.

Convention: blocks marked sh, or with nothing, hold commands, one a line; blocks marked python hold programs. Both are
executed or checked. All others (text, json, toml, ...) are for reading.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COMMANDS, PROGRAMS = ("", "sh"), ("python",)
FENCE = re.compile(r"^(?P<indent> *)```(?P<mark>[\w-]*)\s*$")
BACKTICKS = re.compile(r"(?<!`)`([^`]+)`(?!`)")
PLACEHOLDER = re.compile(r"^\[?\.\.\.\]?$")  # "and so on"
ASSIGNMENT = re.compile(r"^[A-Z_][A-Z0-9_]*=")


class Piece(NamedTuple):
    """Something of a document, and where it is: "docs/guide/node.md:12"."""

    place: str
    text: str


class Command(NamedTuple):
    """One command of a shell line: what it sets in the environment, and its words."""

    environment: dict[str, str]
    words: list[str]


def documents() -> list[Path]:
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [file for file in found if file.exists()]


def fenced(file: Path) -> Iterator[tuple[str, int, str]]:
    """(mark, line number of its first line, text) of every fenced block of a document."""
    mark, first, lines = None, 0, list[str]()
    indent = ""
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        fence = FENCE.match(line)
        if fence is None:
            lines.append(line.removeprefix(indent))
        elif mark is None:
            mark, indent, first, lines = fence["mark"], fence["indent"], number + 1, []
        else:
            yield mark, first, "\n".join(lines)
            mark, indent = None, ""
    assert mark is None, f"{file}: the block of line {first} is never closed"


def shell_lines() -> Iterator[Piece]:
    """The lines of the blocks that hold commands, continued ones joined; no comments."""
    for file in documents():
        for mark, first, text in fenced(file):
            if mark not in COMMANDS:
                continue
            begun, at = "", first
            for number, line in enumerate(text.split("\n"), first):
                at = at if begun else number
                if line.endswith("\\"):
                    begun += line[:-1]
                    continue
                if shlex.split(begun + line, comments=True):
                    yield Piece(f"{file.relative_to(ROOT)}:{at}", (begun + line).strip().removeprefix("$ "))
                begun = ""


def programs() -> Iterator[Piece]:
    for file in documents():
        for mark, first, text in fenced(file):
            if mark in PROGRAMS:
                yield Piece(f"{file.relative_to(ROOT)}:{first}", text)


def inline_code() -> Iterator[Piece]:
    """What stands between single backticks outside of blocks, line breaks in it as spaces."""
    for file in documents():
        text, inside = [], False
        for line in file.read_text(encoding="utf-8").splitlines():
            fence = FENCE.match(line) is not None
            inside ^= fence
            text.append("" if fence or inside else line)
        whole = "\n".join(text)
        for code in BACKTICKS.finditer(whole):
            line_number = whole.count("\n", 0, code.start()) + 1
            yield Piece(f"{file.relative_to(ROOT)}:{line_number}", " ".join(code[1].split()))


def commands(line: str) -> list[Command]:
    """The commands of a shell line: split at ; & and |, redirections and placeholders left out."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.wordchars += "$@%^,:+[]{}"
    found: list[list[str]] = [[]]
    words = list(lexer)
    while words:
        word = words.pop(0)
        if set(word) <= set(";&|"):
            found.append([])
        elif set(word) <= set("<>&"):
            words = words[1:]  # the file's name
        elif not PLACEHOLDER.match(word):
            found[-1].append(word.removeprefix(".venv/bin/"))
    return [command for words in found if (command := _command(words)).words]


def _command(words: list[str]) -> Command:
    environment = {}
    while words and ASSIGNMENT.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    return Command(environment, words)
