"""Steps that are cut into pieces: which of them sample."""

from __future__ import annotations

import pytest

from swarm.messages import Step
from swarm_hop.serving.step_cutter import cut


@pytest.mark.parametrize(("sample_all", "sampling"), [(False, [False, False, True]), (True, [True, True, True])])
def test_pieces_sample_after_the_last_row_or_after_every_one(sample_all: bool, sampling: list[bool]) -> None:
    tokens = list(range(10))
    step = Step(bytes(16), 0, 1, 5, 10, sample=True, tokens=tokens, sample_all=sample_all)
    pieces: list[Step] = []
    rest: tuple[Step, bytes | bytearray | memoryview] | None = (step, b"")
    while rest is not None:
        (piece, _), rest = cut(*rest, 4)
        pieces.append(piece)
    assert [piece.sample for piece in pieces] == sampling
    assert [token for piece in pieces for token in piece.tokens] == tokens
    assert [piece.committed_before for piece in pieces] == [5, 9, 13]
