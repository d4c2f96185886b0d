"""Recognises one JSON value (RFC 8259) that comes in pieces, without waiting for its end. Owns JSON's grammar; what the
value means is its caller's."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, auto

MAX_JSON_DEPTH = 200  # below the recursion limits of the parsers that read the arguments next
MAX_NUMBER_LENGTH = 400  # characters; a number is held back until it is whole

_WHITE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_RUN = re.compile(r"[-+.eE0-9]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_PREFIX = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_CONTROL = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}
_LITERALS = {"t": "true", "f": "false", "n": "null"}


class _Expect(Enum):
    VALUE = auto()
    FIRST_ITEM = auto()  # a value or ]
    FIRST_KEY = auto()  # a key or }
    KEY = auto()
    COLON = auto()
    NEXT = auto()  # a comma, or the end of the innermost list or object
    STRING = auto()  # inside one
    NOTHING = auto()


class JsonScanner:
    """Feed it text until it is `done` or `failed`.

    Control characters inside strings, which JSON forbids and models write, come out escaped: so that what it gives
    for a value that was `done` is always valid JSON.
    """

    def __init__(self) -> None:
        self._expect = _Expect.VALUE
        self._inside: list[str] = []  # the brackets that close what is open, innermost last
        self._string_is_key = False
        self._scanned: list[str] = []
        self._position = 0
        self.failed = False

    @property
    def done(self) -> bool:
        return self._expect is _Expect.NOTHING

    def feed(self, text: str, start: int = 0) -> int:
        """Returns how far into `text` it got; hand the rest in again, with what follows it. The rest is at most
        MAX_NUMBER_LENGTH characters unless it is done or failed."""
        self._position = start
        while self._position < len(text) and not self.done and not self.failed:
            before = self._position
            if self._expect is _Expect.STRING:
                self._string(text)
            else:
                self._take(_WHITE, text)
                if self._position < len(text):
                    self._token(text)
            if self._position == before:
                break
        return self._position

    def take(self) -> str:
        """The value's text since the last call."""
        text = "".join(self._scanned)
        self._scanned.clear()
        return text

    def _take(self, pattern: re.Pattern[str], text: str) -> bool:
        found = pattern.match(text, self._position)
        if found is None or found.end() == self._position:
            return False
        self._scanned.append(found[0])
        self._position = found.end()
        return True

    def _string(self, text: str) -> None:
        if self._take(_PLAIN, text) or self._take(_ESCAPE, text):
            return
        char = text[self._position]
        if char == '"':
            self._one(char)
            self._expect = _Expect.COLON if self._string_is_key else self._after_value()
        elif char == "\\":
            self.failed = _ESCAPE_PREFIX.fullmatch(text, self._position) is None
        else:
            self._scanned.append(_CONTROL.get(char, f"\\u{ord(char):04x}"))
            self._position += 1

    def _token(self, text: str) -> None:
        char = text[self._position]
        expect = self._expect
        if char == '"' and expect in (_Expect.VALUE, _Expect.FIRST_ITEM, _Expect.KEY, _Expect.FIRST_KEY):
            self._string_is_key = expect in (_Expect.KEY, _Expect.FIRST_KEY)
            self._one(char)
            self._expect = _Expect.STRING
        elif expect is _Expect.COLON and char == ":":
            self._one(char)
            self._expect = _Expect.VALUE
        elif expect is _Expect.NEXT and char == ",":
            self._one(char)
            self._expect = _Expect.KEY if self._inside[-1] == "}" else _Expect.VALUE
        elif self._closes(char):
            self._one(char)
            self._inside.pop()
            self._expect = self._after_value()
        elif expect in (_Expect.VALUE, _Expect.FIRST_ITEM):
            self._value(text, char)
        else:
            self.failed = True

    def _closes(self, char: str) -> bool:
        first = {"}": _Expect.FIRST_KEY, "]": _Expect.FIRST_ITEM}
        return bool(self._inside) and char == self._inside[-1] and self._expect in (_Expect.NEXT, first[char])

    def _value(self, text: str, char: str) -> None:
        if char in "{[":
            self._one(char)
            self._inside.append("}" if char == "{" else "]")
            self._expect = _Expect.FIRST_KEY if char == "{" else _Expect.FIRST_ITEM
            self.failed = len(self._inside) > MAX_JSON_DEPTH
        elif char in _LITERALS:
            literal = _LITERALS[char]
            given = text[self._position : self._position + len(literal)]
            if given == literal:
                self._scalar(literal)
            else:
                self.failed = not literal.startswith(given)
        else:
            self._number(text)

    def _number(self, text: str) -> None:
        """A number is whole only when another character follows it."""
        run = _NUMBER_RUN.match(text, self._position)
        number = "" if run is None else run[0]
        if not number or len(number) > MAX_NUMBER_LENGTH:
            self.failed = True
        elif self._position + len(number) < len(text):
            if _NUMBER.fullmatch(number):
                self._scalar(number)
            else:
                self.failed = True

    def _scalar(self, token: str) -> None:
        self._scanned.append(token)
        self._position += len(token)
        self._expect = self._after_value()

    def _one(self, char: str) -> None:
        self._scanned.append(char)
        self._position += 1

    def _after_value(self) -> _Expect:
        return _Expect.NEXT if self._inside else _Expect.NOTHING


def is_json(text: str) -> bool:
    """Whether a text is one JSON value, of at most MAX_JSON_DEPTH levels, without control characters in strings."""
    scanner = JsonScanner()
    given = text.strip(" \t\n\r") + " "  # ends a number
    used = scanner.feed(given)
    return scanner.done and not given[used:].strip() and scanner.take() == given[:used]


class CallObject:
    """A call as one JSON object, `{"name": ..., "arguments": {...}}`, that comes in pieces; keys in any order, others
    ignored, "parameters" for "arguments". `accepts`: whether a name is one of a function.

    `name` is set as soon as this is surely a call: its name is known, and its arguments (an object) began, or, unless
    `needs_arguments`, the object ended without them. What `take` gives is the arguments' text.
    """

    def __init__(self, accepts: Callable[[str], bool], *, needs_arguments: bool = False) -> None:
        self._accepts = accepts
        self._needs_arguments = needs_arguments
        self._step: Callable[[str], bool] = self._open
        self._used = 0
        self._key = ""
        self._found_name = ""
        self._scanner = JsonScanner()
        self._arguments: JsonScanner | None = None
        self.name = ""
        self.done = False
        self.failed = False

    @property
    def has_whole_arguments(self) -> bool:
        return self.done or (self._arguments is not None and self._arguments.done)

    def feed(self, text: str) -> int:
        """Returns how many characters it took, as JsonScanner.feed does."""
        self._used = 0
        while not self.done and not self.failed and self._step(text):
            pass
        return self._used

    def take(self) -> str:
        if self._arguments is None:
            return "{}" if self.done else ""
        return self._arguments.take()

    def _punctuation(self, text: str) -> str:
        """The next character that is no white space, taken; "" when there is none."""
        white = _WHITE.match(text, self._used)
        self._used = white.end() if white is not None else self._used
        self._used += 1
        if self._used > len(text):
            self._used = len(text)
            return ""
        return text[self._used - 1]

    def _fail(self) -> bool:
        self._used -= 1  # the character that does not fit is the caller's
        self.failed = True
        return False

    def _open(self, text: str) -> bool:
        char = self._punctuation(text)
        self._step = self._first_key if char == "{" else self._step
        return char == "{" or (char != "" and self._fail())

    def _first_key(self, text: str) -> bool:
        return self._key_or_end(text, end="}")

    def _next(self, text: str) -> bool:
        char = self._punctuation(text)
        if char == ",":
            self._step = self._next_key
            return True
        return char != "" and (self._end() if char == "}" else self._fail())

    def _next_key(self, text: str) -> bool:
        return self._key_or_end(text, end="")

    def _key_or_end(self, text: str, end: str) -> bool:
        char = self._punctuation(text)
        if char == '"':
            self._used -= 1
            self._scanner = JsonScanner()
            self._step = self._in_key
            return True
        return char != "" and (self._end() if char == end else self._fail())

    def _in_key(self, text: str) -> bool:
        key = self._scan(text)
        if key is not None:
            self._key = key
            self._step = self._colon
        return key is not None

    def _colon(self, text: str) -> bool:
        char = self._punctuation(text)
        if char != ":":
            return char != "" and self._fail()
        self._scanner = JsonScanner()
        self._step = self._value
        return True

    def _value(self, text: str) -> bool:
        char = self._punctuation(text)
        if not char:
            return False
        expected = {'"name"': '"', '"arguments"': "{", '"parameters"': "{"}.get(self._key)
        if expected is not None and (char != expected or (expected == "{" and self._arguments is not None)):
            return self._fail()
        self._used -= 1
        if expected == "{":
            self._arguments = self._scanner
            self._settle()
        self._step = self._in_value
        return True

    def _in_value(self, text: str) -> bool:
        if self._scanner is self._arguments:
            self._used = self._scanner.feed(text, self._used)
            self.failed = self._scanner.failed
            if self._scanner.done:
                self._step = self._next
            return self._scanner.done
        value = self._scan(text)
        if value is None:
            return False
        self._step = self._next
        if self._key == '"name"':
            name = value[1:-1]
            if self._found_name or not self._accepts(name):
                self.failed = True
            self._found_name = name
            self._settle()
        return True

    def _scan(self, text: str) -> str | None:
        """A value that is of use only when it is whole. None: not yet."""
        self._used = self._scanner.feed(text, self._used)
        self.failed = self._scanner.failed
        return self._scanner.take() if self._scanner.done else None

    def _settle(self) -> None:
        if not self.failed and self._arguments is not None:
            self.name = self._found_name

    def _end(self) -> bool:
        if not self._found_name or (self._arguments is None and self._needs_arguments):
            return self._fail()
        self.name = self._found_name
        self.done = True
        return False
