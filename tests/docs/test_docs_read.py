"""The documents name only what exists: every command parses, every flag, target, file and test is there."""

from __future__ import annotations

import re

import pytest
from doc_blocks import ROOT, Piece, commands, documents, fenced, inline_code, programs, shell_lines
from doc_programs import SCRIPTS, check, check_inline, known_flags

pytestmark = pytest.mark.slow

OTHERS_FLAGS = re.compile(r"^--(durations|dist|strict-markers)$")  # pytest's
LINES = [pytest.param(piece, id=piece.place) for piece in shell_lines()]


@pytest.mark.parametrize("piece", LINES)
def test_a_command_would_be_understood(piece: Piece) -> None:
    found = commands(piece.text)
    assert found, piece.text
    for command in found:
        check(command)


@pytest.mark.parametrize("piece", [pytest.param(piece, id=piece.place) for piece in programs()])
def test_a_program_compiles(piece: Piece) -> None:
    compile(piece.text, piece.place, "exec", flags=0x2000)  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


def named_inline() -> list[Piece]:
    starts = (*(f"{name} " for name in SCRIPTS), "make ", "python ", "pytest ", "PYTHONPATH=")
    return [piece for piece in inline_code() if piece.text.startswith(starts)]


def test_commands_within_sentences_exist() -> None:
    wrong = []
    for piece in named_inline():
        try:
            check_inline(commands(piece.text)[0])
        except AssertionError as error:
            wrong.append(f"{piece.place}: `{piece.text}`: {str(error).splitlines()[0]}")
    assert not wrong, "\n".join(wrong)


def test_flags_within_sentences_exist() -> None:
    wrong = []
    for piece in inline_code():
        flag = re.match(r"--[a-z][a-z0-9-]*", piece.text)
        if flag is not None and flag[0] not in known_flags() and not OTHERS_FLAGS.match(flag[0]):
            wrong.append(f"{piece.place}: `{piece.text}`")
    assert not wrong, "\n".join(wrong)


def test_links_within_the_repository_lead_somewhere() -> None:
    wrong = []
    for file in documents():
        for target in re.findall(r"\]\(([^)\s]+)\)", file.read_text(encoding="utf-8")):
            path = target.partition("#")[0]
            if path and "://" not in path and not (file.parent / path).exists():
                wrong.append(f"{file.relative_to(ROOT)}: {target}")
    assert not wrong, "\n".join(wrong)


def test_the_reader_of_documents_reads() -> None:
    (command,) = commands("PYTHONPATH=a python benchmarks/x.py --n 2 'two words' ... > out  # why")
    assert command == ({"PYTHONPATH": "a"}, ["python", "benchmarks/x.py", "--n", "2", "two words"])
    assert [c.words for c in commands("cd swarm && make test | tail")] == [["cd", "swarm"], ["make", "test"], ["tail"]]
    (command,) = commands("swarm-node join --peer /ip4/1.2.3.4/tcp/1/p2p/Q --layers 0:3,3:6 --max-memory 6GB")
    assert command.words[3:] == ["/ip4/1.2.3.4/tcp/1/p2p/Q", "--layers", "0:3,3:6", "--max-memory", "6GB"]
    for wrong in ("make nothing", "swarm-node join --no-such-flag", "swarm-node fly", "python benchmarks/none.py"):
        with pytest.raises(AssertionError):
            check(commands(wrong)[0])
    check(commands("swarm-node join --gpu 0")[0])
    assert any(mark == "python" for mark, _, _ in fenced(ROOT / "README.md"))
