"""Decides from a request alone whether its points can be generated in parallel, and gives the reason.

Lists, explanations, comparisons and guides can. Code, mathematics, stories, short answers and work on a given text
cannot: there each part needs the one before it, or there are no parts (Jupiter §V-B and Table VII). Owns the rules that
reject a request; templates have the patterns that accept one. A pure function, with rules for English; a request that
matches no rule gets an ordinary answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarm_client.outline.templates import BUILT_IN, MAX_POINTS, MIN_POINTS, Template

MIN_POINT_TOKENS = 24  # two sentences do not fit into less
_EDGE_CHARS = 600  # matched at either end of a request: the instruction is there, a pasted text in between


@dataclass(frozen=True, slots=True)
class OutlineDecision:
    """`template` is None when an outline does not fit; `reason` is a sentence without its full stop in both cases."""

    template: Template | None
    reason: str
    points: int = 0

    @property
    def fits(self) -> bool:
        return self.template is not None


@dataclass(frozen=True, slots=True)
class _Rule:
    reason: str
    pattern: re.Pattern[str]


def _rule(reason: str, *patterns: str) -> _Rule:
    return _Rule(reason, re.compile("|".join(f"(?:{p})" for p in patterns), re.IGNORECASE))


_LANGUAGES = (
    r"(?:python|java|javascript|typescript|rust|golang|kotlin|swift|ruby|php|perl|haskell|scala|sql|bash|html|css)"
)
_CODE_NOUNS = (
    r"(?:code|functions?|class|classes|methods?|scripts?|programs?|quer(?:y|ies)|regex|regular expressions?|unit tests?"
    r"|algorithms?|snippets?|websites?|web ?pages?|macros?|dockerfile|makefile|api|cli|list comprehensions?)"
)
_NARRATIVES = (
    r"(?:story|stories|tale|poems?|poetry|haiku|limerick|sonnet|songs?|lyrics|novel|screenplay|dialogue|jokes?|scene"
    r"|monologue|rap|fable)"
)
_NUMBERS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_NUMBER = rf"\d{{1,4}}|{'|'.join(_NUMBERS)}"

# The first rule that matches gives the reason, so the more specific ones come first.
_REJECTED = (
    _rule(
        "code is written from the first line to the last",
        r"```",
        r"\bdef \w+\(|#include|\bselect\b.{1,80}\bfrom\b.{1,40}\bwhere\b|[{;]\s*$",
        rf"\b(?:write|implement|create|make|build|generate|fix|debug|refactor|optimi[sz]e|complete|finish|port|test)\b"
        rf".{{0,60}}\b{_CODE_NOUNS}\b(?! of (?:the )?(?:heart|body|life|exercise|training))",
        rf"\b(?:write|implement|create|fix|debug|refactor|sort|parse|print)\b.{{0,80}}"
        rf"\b(?:in|using|with) {_LANGUAGES}\b",
        r"\bwhat(?:'s| is) wrong with (?:this|my) (?:code|function|program|script)\b",
    ),
    _rule(
        "reasoning goes step by step, and each step needs the one before it",
        r"\b(?:think|reason|work|go) (?:about |through )?(?:it |this )?step[ -]by[ -]step\b",
        r"\b(?:riddle|puzzle|sudoku|crossword|logic problem)\b",
        r"\bif all \w+ are\b",
        r"\bplay (?:a game|chess|tic)",
        r"\bact as\b|\bpretend (?:to be|you)\b|\brole-?play\b",
    ),
    _rule(
        "mathematics goes step by step, and each step needs the one before it",
        r"\d\s*(?:[+*/^=×÷]|-(?=\s*\d))\s*[\d(x]",
        r"\bsolve (?:for|the (?:\w+ )?(?:equations?|system|integral|problem|inequality)|this|it)\b",
        r"\b(?:prove|proof|calculate|compute|evaluate|integrate|differentiate|factori[sz]e)\b",
        r"\b(?:integral|derivative|determinant|square root|equation|probability|remainder|sum|product) (?:of|that)\b",
        r"\bhow (?:many|much) .{1,160}\b(?:if|left|altogether|in total|remain|each)\b",
        r"\b(?:simplify|expand) the expression\b",
    ),
    _rule(
        "a translation follows its text",
        r"\btranslat(?:e|ion|ing)\b",
        r"\bhow do (?:you|i) say\b",
        r"\b(?:into|to|in) (?:french|german|spanish|italian|dutch|chinese|japanese|russian|latin|english)\s*[:.?]",
    ),
    _rule(
        "work on a given text follows that text",
        r"\b(?:rewrite|rephrase|paraphrase|reword|proofread|shorten|summari[sz]e|repeat|transcribe|extract|reformat)\b",
        r"\b(?:correct|fix|check|improve|edit) (?:the|this|my|these|any)\b.{0,40}"
        r"\b(?:grammar|spelling|text|sentences?|paragraphs?|essay|errors?|mistakes?)\b",
        r"\b(?:copy|continue|complete|finish|classify|sort|convert) (?:the|this|these|my)\b",
        r"\b(?:summary|tl;?dr|sentiment) of (?:the|this|these|my)\b",
    ),
    _rule(
        "a story, a poem or a letter is one thread from its beginning to its end",
        rf"\b(?:write|compose|make up|create|invent|generate|draft|sing|recite|continue)\b.{{0,40}}\b{_NARRATIVES}\b",
        rf"\b(?:tell|give|sing) (?:(?:me|us) )?(?:an?|another|some|your) (?:\w+ ){{0,3}}{_NARRATIVES}\b",
        rf"^(?:an? )?(?:\w+ ){{0,2}}{_NARRATIVES} (?:about|on|of|where|in which)\b",
        r"\b(?:write|draft|compose)\b.{0,40}\b(?:letter|e-?mail|message|tweet|speech|toast|reply|response|caption"
        r"|slogan|cover letter|obituary|diary|invitation)\b",
    ),
    _rule(
        "it asks for a short answer",
        r"\bin (?:one|a|a single|1|two|2|a few|three|3|\d{1,2}|(?:at most|under|less than|fewer than) \w+) "
        r"(?:short )?(?:words?|sentences?|lines?|phrases?|paragraph)\b",
        r"\b(?:briefly|in short|in brief|short answer|one-word|one-line|one-sentence|yes or no|true or false|tl;?dr)\b",
        r"\b(?:just|only|simply) (?:the|give|say|tell|answer|name|list|write|one)\b",
        r"\bone (?:a|per|each) line\b|\b(?:comma|space)[ -]separated\b|\bwithout (?:any )?explanations?\b",
        r"\bas (?:json|csv|xml|yaml|a table)\b",
    ),
)
_FACTUAL = _rule(
    "a fact is a short answer",
    r"^(?:who|whom|whose|when|where|which)\b",
    r"^(?:what|which) (?:year|day|date|time|colou?r|country|city|language|number|age|company|animal|planet|word)\b",
    r"^what(?:'s| is| was| were| are) (?:the |a |an )?(?:\w+ ){0,3}"
    r"(?:capital|population|name|author|date|height|length|weight|age|price|speed|distance|temperature|currency"
    r"|formula|symbol|largest|smallest|tallest|longest|highest|fastest"
    r"|oldest|plural|opposite|definition|synonym|boiling point|president)\b",
    r"^how (?:many|much|old|tall|far|long|big|deep|high|fast|heavy|often|hot|cold)\b",
    r"^(?:is|are|was|were|am|do|does|did|can|could|should|will|would|has|have|had)\b",
    r"^(?:hi|hello|hey|thanks|thank you|ok|okay|yes|no|good (?:morning|evening|night))\b[\s!.,]*(?:there)?[\s!.]*$",
)
_GREETINGS = re.compile(
    r"^(?:\s*(?:(?:hi|hello|hey)(?: there)?[,!. ]+(?=\w+\s)|please,?\s|kindly\s|(?:can|could|would|will) you\s"
    r"|i(?:'d| would) like (?:you to|to know)\s|i (?:want|need) (?:you to|to know)\s|help me (?:to )?(?=understand)))+",
    re.IGNORECASE,
)
_COUNT = re.compile(
    rf"\b(?P<count>{_NUMBER})\s+(?:\w+\s+){{0,3}}?(?:tips|ideas|reasons|ways|benefits|advantages|disadvantages|causes"
    r"|examples|steps|things|points|facts|suggestions|types|kinds|effects|factors|uses|risks|strategies|methods"
    r"|features|pros|recommendations|books|places|foods|exercises|habits|activities|questions)\b",
    re.IGNORECASE,
)


def route(
    messages: Sequence[Mapping[str, str]], max_new_tokens: int, templates: Sequence[Template] = BUILT_IN
) -> OutlineDecision:
    """Whether the last message requests an answer with several points. The first template that matches it is used.

    `max_new_tokens`: for the whole answer, split evenly between its points.
    """
    if messages[-1]["role"] != "user":
        return OutlineDecision(None, "the last message is not a question")
    request = _instruction(messages[-1]["content"])
    for rule in _REJECTED:
        if rule.pattern.search(request):
            return OutlineDecision(None, rule.reason)
    template = next((t for t in templates if t.matches(request)), None)
    if template is None:
        factual = _FACTUAL.pattern.search(request)
        return OutlineDecision(
            None, _FACTUAL.reason if factual else "nothing in the request shows that its answer has parts"
        )
    points = _requested_points(request) or template.points
    if not MIN_POINTS <= points <= MAX_POINTS:
        return OutlineDecision(None, f"it asks for {points} points, and an outline has {MIN_POINTS} to {MAX_POINTS}")
    if max_new_tokens < points * MIN_POINT_TOKENS:
        return OutlineDecision(
            None, f"{max_new_tokens} tokens are too few for {points} points of at least {MIN_POINT_TOKENS} each"
        )
    return OutlineDecision(template, template.fits, points)


def _instruction(text: str) -> str:
    """Both ends of a request in one line, without greetings and polite phrases."""
    if len(text) > 2 * _EDGE_CHARS:
        text = f"{text[:_EDGE_CHARS]} ... {text[-_EDGE_CHARS:]}"
    return " ".join(_GREETINGS.sub("", text, count=1).split())


def _requested_points(request: str) -> int | None:
    """The number of points in the request, if it has one."""
    match = _COUNT.search(request)
    if match is None:
        return None
    word = match["count"].lower()
    return _NUMBERS.get(word) or int(word)
