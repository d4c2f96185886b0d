from __future__ import annotations

import random

import pytest

from swarm_client.generation.stop_strings import StopStrings


def cut_by_hand(text: str, stops: list[str]) -> str:
    ends = [(text.find(s) + len(s), -len(s)) for s in stops if s in text]
    if not ends:
        return text
    end, minus_length = min(ends)
    return text[: end + minus_length]


@pytest.mark.parametrize("seed", range(300))
def test_any_chunking_cuts_at_the_same_place(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("ab") for _ in range(rng.randint(0, 30)))
    stops = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 5))) for _ in range(rng.randint(0, 3))]
    filter_ = StopStrings(stops)
    shown, at = "", 0
    while at < len(text):
        step = rng.randint(1, 4)
        shown += filter_.push(text[at : at + step])
        at += step
    shown += filter_.flush()
    assert shown == cut_by_hand(text, stops)


def test_text_that_only_looks_like_a_stop_is_released() -> None:
    filter_ = StopStrings(["</end>"])
    assert filter_.push("hello </e") == "hello "
    assert filter_.push("m>") == "</em>"
    assert filter_.push("</en") == ""
    assert filter_.flush() == "</en"


def test_nothing_is_shown_after_a_hit() -> None:
    filter_ = StopStrings(["STOP"])
    assert filter_.push("a STOP b") == "a "
    assert filter_.hit == "STOP"
    assert filter_.push("c") == ""
