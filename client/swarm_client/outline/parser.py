"""Incremental parser of an outline while a model generates it: numbered or bulleted lines in, titles out.

Tolerant of what models do to a list (bold, headings, colons, nested bullets, an introduction, repetitions). Owns what
counts as a point and what its title is. Independent of the model; never raises, and takes linear time on any text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MAX_TITLE_WORDS = 12
MAX_TITLE_LENGTH = 96

_NUMBERED = re.compile(r"(?P<indent>[ \t]{0,32})[#>*_ ]{0,8}\(?\d{1,3}[.):][*_]{0,3}(?=[ \t*_])(?P<rest>.*)")
_BULLETED = re.compile(r"(?P<indent>[ \t]{0,32})[#>]{0,4}[ ]?[-*+\u2022\u2013\u2014](?=[ \t])(?P<rest>.*)")
_END_OF_TITLE = re.compile(r"[:：]|\s[-\u2013\u2014]\s|\u2014")
_MARKUP = re.compile(r"[*_`#]+|<\|[^<>|]{0,64}\|>")
_INVISIBLE = re.compile(r"[\x00-\x1f\x7f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]+")


@dataclass(slots=True)
class OutlineParser:
    """`push` text as it arrives and `finish` at the end; `titles` has those of complete lines.

    Only lines of the first one's kind count: bullets under numbers are details, and so are deeper indented lines.
    """

    max_points: int
    titles: list[str] = field(default_factory=list)
    text: str = ""
    _read: int = 0  # offset of the first incomplete line
    _numbered: bool | None = None
    _indent: int = 0
    _seen: set[str] = field(default_factory=set)

    @property
    def full(self) -> bool:
        return len(self.titles) >= self.max_points

    def push(self, text: str) -> None:
        self.text += text
        while (end := self.text.find("\n", self._read)) >= 0:
            self._line(self.text[self._read : end])
            self._read = end + 1

    def finish(self, cut: bool) -> None:
        """`cut`: the text was truncated; its last line may be incomplete and is ignored."""
        if not cut:
            self._line(self.text[self._read :])

    def _line(self, line: str) -> None:
        match, numbered = _NUMBERED.match(line), True
        if match is None:
            match, numbered = _BULLETED.match(line), False
        if match is None or self.full:
            return
        title = clean_title(match["rest"])
        indent = len(match["indent"].expandtabs(4))
        if not title or (self._numbered is not None and (numbered is not self._numbered or indent > self._indent + 1)):
            return
        self._numbered, self._indent = numbered, indent if self._numbered is None else self._indent
        key = "".join(c for c in title.casefold() if c.isalnum())
        if key not in self._seen:
            self._seen.add(key)
            self.titles.append(title)


def clean_title(text: str) -> str:
    """A point's title without markup and explanations, "" if no word is left. At most 12 words, 96 characters.

    Text that looks like a chat template's special token is removed: a title becomes part of the next prompt.
    """
    plain = " ".join(_MARKUP.sub("", _INVISIBLE.sub(" ", text)).split())
    head = next((part for part in _END_OF_TITLE.split(plain) if any(map(str.isalnum, part))), "")
    title = " ".join(head.split()[:MAX_TITLE_WORDS])[:MAX_TITLE_LENGTH].strip(" .,;!\"'()[]\u201c\u201d")
    return title if any(map(str.isalpha, title)) else ""
