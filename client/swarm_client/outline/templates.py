"""Prompt templates for an outline and for one of its points, by kind of request.

Owns the built-in templates and the format of a user's file. `router` picks one for a request.

All prompts of an answer share the conversation so far as their prefix; those of its points also share the question and
the outline and differ in their last lines, so that the hops' prefix caches compute the shared part once (Jupiter §V-B).
A point is requested in a separate message: with the outline request in the prompt, small models write another outline.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import msgspec

from swarm.errors import UsageError

MIN_POINTS = 2
MAX_POINTS = 12
_MAX_TOKENS = 4096

_DIRECTIVE = (
    "{question}\n\nDo not answer yet. Write only an outline of the answer: {count} numbered titles of 2 to 5 words."
)
_PARTS = (
    "ways|reasons|benefits|advantages|disadvantages|drawbacks|causes|effects|consequences|types|kinds|examples|factors"
    "|features|symptoms|uses|risks|challenges|steps|parts|elements|principles|stages|components|strategies|methods"
    "|options|functions|roles|differences|signs|properties|characteristics"
)
_POINT = (
    "Question: {question}\n\nOutline of the answer:\n{outline}\n\nExplain point {number} in three sentences: {title}"
)


class Template(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True, kw_only=True):
    """How answers of one kind are outlined. `{question}`, `{count}` (in `outline`), `{outline}`, `{number}`
    and `{title}` (in `point`) are filled in.

    `when`: regular expressions, case ignored; a request that contains one of them is of this kind. `fits`: the reason
    shown to users. `example`: a question and its outline, a one-shot example for the model; both empty for none.
    `begin` and `opening` prefill the assistant's text of the outline and of each point; `opening` is shown as heading.
    `points`: the maximum; `eager`: a point may start before the outline is complete, and its prompt then has the
    outline up to its own line only. `stop` ends a point. `*_tokens` limit the lengths.
    """

    name: str
    fits: str
    when: tuple[str, ...]
    outline: str = _DIRECTIVE
    point: str = _POINT
    example: tuple[str, str] = ("", "")
    begin: str = "1."
    opening: str = "**{title}.**"
    points: int = 6
    eager: bool = True
    outline_tokens: int = 64
    point_tokens: int = 128
    stop: tuple[str, ...] = ("\n\n",)

    def __post_init__(self) -> None:
        """Raises ValueError, which msgspec turns into a ValidationError."""
        if not MIN_POINTS <= self.points <= MAX_POINTS:
            raise ValueError(f"'{self.name}': points must be {MIN_POINTS} to {MAX_POINTS}")
        if not (1 <= self.outline_tokens <= _MAX_TOKENS and 1 <= self.point_tokens <= _MAX_TOKENS):
            raise ValueError(f"'{self.name}': outline_tokens and point_tokens must be 1 to {_MAX_TOKENS}")
        if "{question}" not in self.outline or "{title}" not in self.point:
            raise ValueError(f"'{self.name}': `outline` needs {{question}} and `point` needs {{title}}")
        for pattern in self.when:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"'{self.name}': /{pattern}/ is not a regular expression: {error}") from None

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(pattern, re.IGNORECASE) for pattern in self.when)

    def matches(self, request: str) -> bool:
        return any(pattern.search(request) for pattern in self._patterns)

    def outline_prompt(self, messages: Sequence[Mapping[str, str]], points: int) -> list[dict[str, str]]:
        """The chat that requests an outline of the answer to `messages`, whose last one is the question."""
        *before, question = [dict(m) for m in messages]
        return [*before, *self._one_shot(points), _user(self._request(question["content"], points))]

    def point_prompt(
        self, messages: Sequence[Mapping[str, str]], titles: Sequence[str], number: int
    ) -> list[dict[str, str]]:
        """The chat that requests point `number` (from 1) of the outline `titles`."""
        *before, question = [dict(m) for m in messages]
        outline = "\n".join(f"{n}. {title}" for n, title in enumerate(titles, 1))
        request = _fill(
            self.point, question=question["content"], outline=outline, number=str(number), title=titles[number - 1]
        )
        return [*before, _user(request)]

    def heading(self, number: int, title: str) -> str:
        return _fill(self.opening, number=str(number), title=title)

    def _one_shot(self, points: int) -> list[dict[str, str]]:
        question, outline = self.example
        if not question:
            return []
        return [_user(self._request(question, points)), {"role": "assistant", "content": outline}]

    def _request(self, question: str, points: int) -> str:
        count = f"{min(4, points)} to {points}" if points > 4 else str(points)
        return _fill(self.outline, question=question, count=count)


COMPARISON = Template(
    name="comparison",
    fits="a comparison has one part for each aspect",
    when=(
        r"\bcompar(?:e|ison|ing)\b",
        r"\bcontrast\b",
        r"\b(?:differences?|similarities)\b.{0,40}\b(?:between|of)\b",
        r"\bpros and cons\b",
        r"\badvantages and (?:the )?disadvantages\b",
        r"\b(?:versus|vs)\b\.?\s",
        r"\bhow (?:do|does|is|are) .{1,80} differ\b",
    ),
    example=(
        "Compare trains and buses.",
        "1. Cost of tickets\n2. Speed and range\n3. Comfort\n4. Effect on the climate",
    ),
)
HOWTO = Template(
    name="how-to",
    fits="a guide has one part for each step or piece of advice",
    when=(
        r"\bhow (?:do|can|should|could|would|might) (?:i|we|you|one|people|somebody|someone)\b",
        r"\bhow to\b",
        r"\b(?:guide|tutorial|instructions|checklist|plan) (?:to|for|on)\b",
        r"\bwhat(?:'s| is) the best way to\b",
        r"\bsteps (?:to|for|in|of|needed)\b",
    ),
    example=(
        "How do I plant a tree?",
        "1. Choose a place\n2. Dig the hole\n3. Set the tree\n4. Fill and water\n5. Care for it later",
    ),
)
LIST = Template(
    name="list",
    fits="a list has one part for each entry",
    when=(
        r"\blist\b(?! comprehension)",
        r"\b(?:tips|ideas|suggestions|recommendations|advice)\b",
        r"\b(?:give|name|suggest|recommend|provide|propose|tell) (?:me |us )?"
        r"(?:some|a few|several|\d+|two|three|four|five|six|seven|eight|nine|ten)\b",
        rf"\bwhat are\b.{{0,60}}\b(?:{_PARTS})\b",
        rf"\b(?:{_PARTS}) (?:to|of|for|why|that|in)\b",
    ),
    example=(
        "What are the reasons to keep a garden?",
        "1. Fresh food\n2. Time outdoors\n3. Calm and beauty\n4. Room for wildlife\n5. Pride in growing",
    ),
)
EXPLANATION = Template(
    name="explanation",
    fits="an explanation has one part for each aspect",
    when=(
        r"\b(?:explain|describe|discuss|outline|elaborate|analy[sz]e|examine|explore)\b",
        r"^(?:so |and )?why\b",
        r"^how (?:do|does|did|is|are|was|were|has|have)\b",
        r"\btell (?:me|us) (?:more )?about\b",
        r"\bwhat (?:would|will|might|could) happen\b",
        r"\b(?:overview|introduction|summary of the topic|background) (?:of|to|on)\b",
        r"\b(?:essay|article|report|blog post) (?:about|on)\b",
        r"\b(?:impact|effects?|influence|importance|role|significance|history|meaning) of\b",
    ),
    example=("How does a bicycle work?", "1. Pedals and chain\n2. Gears\n3. Wheels and tyres\n4. Steering\n5. Brakes"),
)
BUILT_IN = (COMPARISON, HOWTO, LIST, EXPLANATION)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    template: list[Template]


def load_templates(path: Path) -> tuple[Template, ...]:
    """`[[template]]` tables of a TOML file, before the built-in ones; one with a built-in's name replaces it.

    Raises UsageError.
    """
    try:
        own = msgspec.toml.decode(path.read_bytes(), type=_File).template
    except OSError as error:
        raise UsageError(f"cannot read the outline templates {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the outline templates {path} cannot be used: {error}") from None
    names = {template.name for template in own}
    return (*own, *(template for template in BUILT_IN if template.name not in names))


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _fill(text: str, **values: str) -> str:
    """Single-pass substitution: braces inside a value are kept."""
    return re.sub(r"\{(\w+)\}", lambda m: values.get(m[1], m[0]), text)
