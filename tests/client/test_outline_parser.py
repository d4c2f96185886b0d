"""Outlines as models write them, and text that is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_client.outline.parser import MAX_TITLE_LENGTH, MAX_TITLE_WORDS, OutlineParser, clean_title


def titles(text: str, most: int = 6, cut: bool = False) -> list[str]:
    parser = OutlineParser(most)
    parser.push(text)
    parser.finish(cut)
    return parser.titles


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1. Sleep\n2. Food\n3. Sport", ["Sleep", "Food", "Sport"]),
        ("1) Sleep\n2) Food", ["Sleep", "Food"]),
        ("(1) Sleep\n(2) Food", ["Sleep", "Food"]),
        ("- Sleep\n- Food", ["Sleep", "Food"]),
        ("* **Sleep**\n* **Food**", ["Sleep", "Food"]),
        ("\u2022 Sleep\n\u2022 Food", ["Sleep", "Food"]),
        ("1. **Sleep**: it matters: a lot\n2. **Food:** so does this", ["Sleep", "Food"]),
        ("**1. Sleep**\n**2. Food**", ["Sleep", "Food"]),
        ("1.** Sleep**\n2.**Food**", ["Sleep", "Food"]),
        ("### 1. Sleep\n### 2. Food", ["Sleep", "Food"]),
        ("1. Sleep - the basics\n2. Food \u2014 the rest", ["Sleep", "Food"]),
        ("Here is an outline:\n\n1. Sleep\n\n2. Food\n\nI hope it helps!", ["Sleep", "Food"]),
        ("1. Sleep\n   - how long\n   - when\n2. Food\n   * what", ["Sleep", "Food"]),
        ("1. Sleep\n- how long\n2. Food", ["Sleep", "Food"]),
        ("- Sleep\n  - how long\n    1. really\n- Food", ["Sleep", "Food"]),
        ("1. Sleep\n    1. Deep\n    2. Light\n2. Food", ["Sleep", "Food"]),
        ("1. Sleep\n2. sleep!\n3. Food", ["Sleep", "Food"]),
        ("1. Sleep\n2.\n3. ---\n4. 42\n5. Food", ["Sleep", "Food"]),
        ("1. Well-being\n2. Food 2.0", ["Well-being", "Food 2.0"]),
        ("1. Sleep<|im_end|>\n2. Food", ["Sleep", "Food"]),
        ("1. \u7761\u7720\uff1a\u91cd\u8981\n2. \u98df\u7269", ["\u7761\u7720", "\u98df\u7269"]),
        ("Sleep is good. 2. Food is good.", []),
        ("3.14 is pi\n2.72 is e", []),
        ("", []),
    ],
)
def test_headings(text: str, found: list[str]) -> None:
    assert titles(text) == found


def test_a_line_that_broke_off_does_not_count() -> None:
    assert titles("1. Sleep\n2. Foo", cut=True) == ["Sleep"]
    assert titles("1. Sleep\n2. Foo") == ["Sleep", "Foo"]


def test_enough_is_enough() -> None:
    parser = OutlineParser(2)
    parser.push("1. A\n2. B\n3. C\n")
    assert parser.titles == ["A", "B"]
    assert parser.full


def test_titles_come_line_by_line() -> None:
    parser = OutlineParser(3)
    parser.push("1. Sleep\n2. Fo")
    assert parser.titles == ["Sleep"]
    parser.push("od\n")
    assert parser.titles == ["Sleep", "Food"]
    assert parser.text == "1. Sleep\n2. Food\n"


def test_a_title_is_short_and_bare() -> None:
    assert clean_title("word " * 40) == " ".join(["word"] * MAX_TITLE_WORDS)
    assert len(clean_title("w" * 500)) == MAX_TITLE_LENGTH
    assert clean_title(' "Quoted", \u200b(twice). ') == 'Quoted", (twice'
    assert clean_title(": : --") == ""


OUTLINES = st.text() | st.text(alphabet="12.)(-*#:> \t\nAb|<\u2022\u2014\x00")


@pytest.mark.slow
@given(OUTLINES, st.lists(st.integers(1, 9), min_size=1), st.integers(2, 8), st.booleans())
def test_any_text_in_any_chunks(text: str, sizes: list[int], most: int, cut: bool) -> None:
    parser, at, turn = OutlineParser(most), 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        parser.push(text[at : at + size])
        at, turn = at + size, turn + 1
    parser.finish(cut)
    found = parser.titles
    assert found == titles(text, most, cut)
    assert len(found) <= most
    keys = ["".join(filter(str.isalnum, title.casefold())) for title in found]
    assert len(set(keys)) == len(keys)
    for title in found:
        assert 0 < len(title) <= MAX_TITLE_LENGTH
        assert any(map(str.isalpha, title))
        assert "\n" not in title


@pytest.mark.parametrize("line", ["1. " + " " * 50, "-" * 50, "(" * 50, "1. a: " * 20, "*_" * 50, "<|" * 50])
def test_no_line_takes_long(line: str) -> None:
    assert len(titles((line * 200 + "\n") * 3)) <= 6
