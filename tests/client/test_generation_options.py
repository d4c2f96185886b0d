"""GenerationOptions: a value of the wrong type is one sentence, before anything is sent."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec
import pytest

from swarm.errors import InvalidRequest
from swarm.messages import WireSampling
from swarm.types import MAX_GRAMMAR_LENGTH, MAX_LOGIT_BIAS, MAX_LOGPROBS, Grammar, GrammarKind, Sampling
from swarm_client.api.options import GenerationKeywords, GenerationOptions, check_messages

GRAMMAR = Grammar(GrammarKind.REGEX, "a+")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 2.5),
        ("max_new_tokens", "12"),
        ("max_new_tokens", True),
        ("max_new_tokens", None),
        ("top_k", 1.0),
        ("seed", 3.5),
        ("temperature", "hot"),
        ("temperature", None),
        ("top_p", "1"),
        ("repetition_penalty", False),
        ("stop", 5),
        ("stop", (5,)),
        ("min_p", "0"),
        ("frequency_penalty", None),
        ("presence_penalty", True),
        ("logit_bias", [(1, 2)]),
        ("logit_bias", {"1": 2.0}),
        ("logit_bias", {True: 2.0}),
        ("logit_bias", {1.0: 2.0}),
        ("logit_bias", {1: "2"}),
        ("logit_bias", {1: None}),
        ("grammar", "a+"),
        ("grammar", Grammar("regex", "a+")),
        ("grammar", Grammar(GrammarKind.REGEX, 5)),
        ("logprobs", 2.0),
        ("logprobs", True),
        ("prompt_logprobs", "1"),
        ("ignore_eos", 1),
        ("skip_special_tokens", None),
        ("decoding", 1),
        ("point_decoding", None),
    ],
)
def test_a_wrong_type_is_one_sentence(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match="; it must be ") as error:
        GenerationOptions(**{name: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", math.nan),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("min_p", math.nan),
        ("frequency_penalty", 100.5),
        ("frequency_penalty", -math.inf),
        ("presence_penalty", -101),
        ("presence_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {1 << 31: 0.0}),
        ("logit_bias", {1: 1e5}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: -math.inf}),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
        ("grammar", Grammar(GrammarKind.REGEX, "")),
        ("grammar", Grammar(GrammarKind.REGEX, "a" * (MAX_GRAMMAR_LENGTH + 1))),
        ("logprobs", -1),
        ("logprobs", MAX_LOGPROBS + 1),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", MAX_LOGPROBS + 1),
        ("seed", 1 << 63),
        ("stop", ("",)),
        ("decoding", "magic"),
    ],
)
def test_a_value_out_of_range_is_one_sentence(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as error:
        GenerationOptions(**{name: value})
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200


def test_a_grammar_needs_the_end_of_turn() -> None:
    with pytest.raises(InvalidRequest, match="leave out ignore_eos"):
        GenerationOptions(grammar=GRAMMAR, ignore_eos=True)


@pytest.mark.parametrize("given", [{"grammar": GRAMMAR}, {"logprobs": 0}, {"prompt_logprobs": 0}, {"ignore_eos": True}])
def test_what_an_outline_cannot_have_is_named(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="choose another decoding"):
        GenerationOptions(decoding="outline", **given)
    assert GenerationOptions(decoding="outline").excludes_outline == ""


def test_every_field_reaches_the_wire() -> None:
    options = GenerationOptions(
        temperature=0.5,
        top_p=0.6,
        top_k=7,
        repetition_penalty=1.1,
        seed=9,
        min_p=0.1,
        frequency_penalty=-0.5,
        presence_penalty=2,
        logit_bias={5: -1, 2: 3.5},
        grammar=GRAMMAR,
        logprobs=MAX_LOGPROBS,
        prompt_logprobs=0,
    )
    sampling = options.sampling()
    assert sampling == Sampling(0.5, 0.6, 7, 1.1, 9, 0.1, -0.5, 2, ((2, 3.5), (5, -1)), GRAMMAR, MAX_LOGPROBS, 0)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(WireSampling.of(sampling)), type=WireSampling)
    assert decoded.to_sampling() == sampling


def test_messages_are_checked() -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    user = {"role": "user", "content": "hi"}
    check_messages(
        [user, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": ""}]
    )
    check_messages([{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "5"}])
    bad: list[Any] = ["hi", None, {"role": "user"}, {"role": "user", "content": None}, {"content": "x"}]
    bad += [{"role": "assistant", "content": None}, {"role": "user", "content": None, "tool_calls": [call]}]
    bad += [{"role": "tool", "content": None}, {"role": 5, "content": "x"}]
    for message in bad:
        with pytest.raises(InvalidRequest, match="chat message"):
            check_messages([user, message])
    for empty in ([], [{"role": "user", "content": " "}], [{"role": "system", "content": "x"}]):
        with pytest.raises(InvalidRequest, match="empty"):
            check_messages(empty)


def test_a_whole_number_is_a_float_too() -> None:
    assert GenerationOptions(temperature=1, top_p=1, repetition_penalty=2).sampling().temperature == 1


def test_the_keywords_are_the_fields() -> None:
    assert set(GenerationKeywords.__annotations__) == {f.name for f in dataclasses.fields(GenerationOptions)}
