"""Which conversation a prompt goes on with."""

from __future__ import annotations

from swarm_client.routing.conversations import MAX_PROMPTS, MIN_TOKENS, TURN_TOKENS, Conversations

SYSTEM = list(range(100, 140))
TURN = [1, 2, 3, 4, 5]  # what a template ends a prompt with


def test_a_prompt_that_goes_on_stays_and_any_other_changes() -> None:
    of = Conversations()
    assert of.first_hop([*SYSTEM, 7, *TURN]) == ("", "")
    of.note([*SYSTEM, 7, *TURN], "p")
    assert of.first_hop([*SYSTEM, 7, *TURN]) == ("p", "")
    assert of.first_hop([*SYSTEM, 8, 9, 9, 9, *TURN]) == ("", "p")
    of.note([*SYSTEM, 8, 9, 9, 9, *TURN], "q")
    assert of.first_hop([*SYSTEM, 7, *TURN, 50, 51, 52, *TURN]) == ("p", "")
    assert of.first_hop([*SYSTEM, 8, 9, 9, 9, *TURN, 60]) == ("q", "")
    assert of.first_hop([*SYSTEM, 4, 4, 4, 4, *TURN]) == ("", "q")


def test_a_template_may_write_the_end_of_a_turn_differently_later() -> None:
    of = Conversations()
    text = list(range(MIN_TOKENS + 1))
    of.note(text, "p")
    assert of.first_hop([*text[:-TURN_TOKENS], 99, 98])[0] == "p"
    assert of.first_hop([*text[: -TURN_TOKENS - 1], 99, 98])[0] == ""


def test_short_prompts_are_told_apart_whole() -> None:
    of = Conversations()
    of.note([5, 6], "p")
    assert of.first_hop([5, 7]) == ("", "p")
    assert of.first_hop([5, 6, 7]) == ("p", "")


def test_a_repaired_conversation_goes_on_where_it_went() -> None:
    of = Conversations()
    of.note([5, 6], "p")
    of.note([5, 6], "q")
    assert of.first_hop([5, 6, 7]) == ("q", "")


def test_the_oldest_are_forgotten() -> None:
    of = Conversations()
    for i in range(MAX_PROMPTS + 1):
        of.note([i, i], f"p{i}")
    assert len(of._prompts) == MAX_PROMPTS
    assert of.first_hop([0, 0])[0] == ""
    assert of.first_hop([1, 1])[0] == "p1"
