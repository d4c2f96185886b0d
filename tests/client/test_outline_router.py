"""Which requests are answered by an outline, and what is said of those that are not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_client.outline.router import route
from swarm_client.outline.templates import BUILT_IN, MAX_POINTS, MIN_POINTS

FITS = [
    ("What are the benefits of regular exercise?", "list"),
    ("List the planets of the solar system and describe each.", "list"),
    ("Give me some tips for learning a new language.", "list"),
    ("Suggest five ideas for a birthday party.", "list"),
    ("What are the main causes of climate change?", "list"),
    ("What are some ways to save water at home?", "list"),
    ("Name three reasons to visit Iceland.", "list"),
    ("Can you recommend some books about the sea?", "list"),
    ("What are the symptoms of the flu?", "list"),
    ("I need advice on buying my first car.", "list"),
    ("Compare cats and dogs as pets.", "comparison"),
    ("What is the difference between a virus and a bacterium?", "comparison"),
    ("What are the pros and cons of working from home?", "comparison"),
    ("Electric cars versus petrol cars: which should a family buy?", "comparison"),
    ("Contrast democracy and monarchy.", "comparison"),
    ("How do frogs and toads differ?", "comparison"),
    ("What are the differences between a novel and a film?", "comparison"),
    ("Compare Python and Java for beginners.", "comparison"),
    ("How do I prepare for a job interview?", "how-to"),
    ("How to start a vegetable garden?", "how-to"),
    ("Could you please write a step-by-step guide to brewing coffee?", "how-to"),
    ("What is the best way to learn chess?", "how-to"),
    ("How can we protect the oceans?", "how-to"),
    ("Explain how photosynthesis works.", "explanation"),
    ("Describe the culture of Japan.", "explanation"),
    ("Why did the Roman Empire fall?", "explanation"),
    ("How does a nuclear power plant work?", "explanation"),
    ("What would happen if the Moon disappeared?", "explanation"),
    ("Please tell me about the history of jazz.", "explanation"),
    ("Hello! Could you explain the importance of sleep?", "explanation"),
    ("Write an essay about renewable energy.", "explanation"),
    ("Discuss the impact of social media on teenagers.", "explanation"),
]
DOES_NOT = [
    ("Write a Python function that reverses a list.", "code"),
    ("How do I write a function to sort numbers in Java?", "code"),
    ("Fix this: ```for i in range(3) print(i)```", "code"),
    ("Implement quicksort in Rust.", "code"),
    ("Create a SQL query for all customers of 2020.", "code"),
    ("What is wrong with my code?", "code"),
    ("What is 12 * 17?", "mathematics"),
    ("Solve the equation x + 3 = 7.", "mathematics"),
    ("Prove that the square root of 2 is irrational.", "mathematics"),
    ("Calculate the area of a circle with a radius of 3.", "mathematics"),
    ("How many apples are left if Ann eats two of seven?", "mathematics"),
    ("What is the derivative of x squared?", "mathematics"),
    ("Think step by step: who is taller, Ann or Bob?", "reasoning"),
    ("Solve this riddle: what has keys and no locks?", "reasoning"),
    ("Pretend to be a pirate and explain your ship.", "reasoning"),
    ("Translate 'good morning' into French.", "translation"),
    ("How do you say thank you in Japanese?", "translation"),
    ("Rewrite this sentence in the passive: the dog bit the man.", "given text"),
    ("Summarize the following article: the sea is rising.", "given text"),
    ("Correct the grammar of this text: he go home.", "given text"),
    ("Extract all dates from the letter.", "given text"),
    ("Write a short story about a baker.", "thread"),
    ("Compose a haiku on autumn.", "thread"),
    ("Write an email to my landlord about the heating.", "thread"),
    ("Tell me a joke.", "thread"),
    ("A poem about the sea", "thread"),
    ("Explain gravity in one sentence.", "short"),
    ("Briefly, what are the benefits of tea?", "short"),
    ("List five fruits, one a line.", "short"),
    ("Name three colours, just the names.", "short"),
    ("What is the capital of France?", "fact"),
    ("Who wrote Hamlet?", "fact"),
    ("When did the war end?", "fact"),
    ("How tall is Mount Everest?", "fact"),
    ("Is the Earth flat?", "fact"),
    ("Hi there!", "fact"),
    ("And the second one?", "parts"),
    ("Give me 40 ideas for presents.", "40 points"),
]


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(("request_text", "kind"), FITS)
def test_it_fits(request_text: str, kind: str) -> None:
    routing = route(ask(request_text), 512)
    assert routing.template is not None, routing.reason
    assert routing.template.name == kind
    assert routing.reason == routing.template.fits


@pytest.mark.parametrize(("request_text", "word"), DOES_NOT)
def test_it_does_not_fit_and_gives_the_reason(request_text: str, word: str) -> None:
    routing = route(ask(request_text), 512)
    assert not routing.fits
    assert word in routing.reason


@pytest.mark.parametrize(
    ("request_text", "points"), [("Give me 3 tips for sleep.", 3), ("Suggest ten good ideas.", 10)]
)
def test_the_request_says_how_many_points(request_text: str, points: int) -> None:
    assert route(ask(request_text), 512).points == points


def test_an_answer_that_may_not_be_long_has_no_room_for_points() -> None:
    routing = route(ask("Compare cats and dogs."), 60)
    assert not routing.fits
    assert "60 tokens" in routing.reason


def test_only_the_last_message_counts() -> None:
    talk = [*ask("Write a poem."), {"role": "assistant", "content": "No."}, *ask("Explain why the sky is blue.")]
    assert route(talk, 512).fits
    assert not route(talk[:2], 512).fits


@given(st.text(max_size=3000) | st.text(alphabet="aw ,.12+-=howist\n", max_size=3000))
def test_any_text_gets_an_answer(text: str) -> None:
    routing = route(ask(text), 512)
    assert routing.reason
    assert (routing.template in BUILT_IN) == (MIN_POINTS <= routing.points <= MAX_POINTS)


@pytest.mark.parametrize(
    "word", ["please ", "how many ", "1 + ", "write in ", "what are ", "difference ", "   ", "hi, "]
)
def test_no_pattern_backtracks_without_end(word: str) -> None:
    assert route(ask(word * 100_000), 512).reason  # or it would take hours
