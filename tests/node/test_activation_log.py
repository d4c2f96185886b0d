"""What a hop keeps for replay: exactly its committed rows, and no more bytes than it may."""

from __future__ import annotations

import random

import pytest

from swarm.errors import ActivationLogEvicted
from swarm.messages import Step
from swarm_hop.serving.activation_log import REPLAY_ROWS, ActivationLog

ID = b"s" * 16


def step(line: int = 0, slots: tuple[int, ...] = (), commit: tuple[int, ...] = ()) -> Step:
    return Step(ID, 0, 0, 0, line, parents=[-1] * len(slots), slots=[*slots], commit_slots=[*commit])


def replayed(logs: ActivationLog, key: int, count: int) -> bytes:
    return b"".join(body for _, _, body in logs.replay(key, count))


def test_causal_rows_commits_and_rollbacks() -> None:
    logs = ActivationLog(10_000)
    logs.open(0)
    logs.append(0, step(line=3), b"aabbcc")
    logs.append(0, step(slots=(4, 9)), b"ddee")
    logs.append(0, step(slots=(4,), commit=(9,)), b"xx")  # slot 4 is used again
    assert replayed(logs, 0, 4) == b"aabbccee"
    logs.append(0, step(line=1, commit=(4,)), b"ff")
    assert replayed(logs, 0, 6) == b"aabbcceexxff"
    logs.rollback(0, 2)
    assert replayed(logs, 0, 2) == b"aabb"
    assert logs.size == 4
    with pytest.raises(ActivationLogEvicted):
        logs.replay(0, 3)
    logs.close(0)
    logs.close(0)
    assert logs.size == 0


def test_long_replays_come_in_chunks() -> None:
    logs = ActivationLog(10_000)
    logs.open(0)
    rows = bytes(i % 251 for i in range(2 * REPLAY_ROWS + 7))
    logs.append(0, step(line=len(rows)), rows)
    parts = list(logs.replay(0, len(rows)))
    assert [(start, count) for start, count, _ in parts] == [(0, 256), (256, 256), (512, 7)]
    assert b"".join(body for _, _, body in parts) == rows


def test_over_the_cap_the_longest_log_is_evicted_and_stays_so() -> None:
    logs = ActivationLog(100)
    for key in (0, 1):
        logs.open(key)
    logs.append(0, step(line=4), bytes(40))
    promised = logs.replay(0, 4)
    logs.append(1, step(line=7), bytes(70))
    assert logs.size == 40
    with pytest.raises(ActivationLogEvicted):
        logs.replay(1, 1)
    logs.append(1, step(line=1), bytes(10))
    assert logs.size == 40
    logs.close(0)
    assert b"".join(body for _, _, body in promised) == bytes(40)


@pytest.mark.parametrize("seed", range(20))
def test_random_steps_against_a_plain_list(seed: int) -> None:
    rng = random.Random(seed)
    logs, plain, tree = ActivationLog(1 << 20), list[bytes](), dict[int, bytes]()
    logs.open(0)
    for _ in range(40):
        if rng.random() < 0.15:
            length = rng.randrange(len(plain) + 1)
            logs.rollback(0, length)
            plain, tree = plain[:length], {}
        commit = rng.sample(sorted(tree), rng.randrange(len(tree) + 1))
        line, slots = rng.randrange(3), rng.sample(range(12), rng.randrange(1, 4))
        rows = [rng.randbytes(3) for _ in range(line + len(slots))]
        logs.append(0, step(line, tuple(slots), tuple(commit)), b"".join(rows))
        plain += [tree.pop(slot) for slot in commit]
        if line:
            tree.clear()
        plain += rows[:line]
        tree.update(zip(slots, rows[line:], strict=True))
        assert replayed(logs, 0, len(plain)) == b"".join(plain)
        assert logs.size == 3 * (len(plain) + len(tree))
