"""GenerationOptions: a value of the wrong type is one sentence, before anything is sent."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from swarm.errors import InvalidRequest
from swarm_client.api.options import GenerationKeywords, GenerationOptions


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
        ("decoding", 1),
        ("point_decoding", None),
    ],
)
def test_a_wrong_type_is_one_sentence(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match="; it must be ") as error:
        GenerationOptions(**{name: value})
    assert "\n" not in str(error.value)


def test_a_whole_number_is_a_float_too() -> None:
    assert GenerationOptions(temperature=1, top_p=1, repetition_penalty=2).sampling().temperature == 1


def test_the_keywords_are_the_fields() -> None:
    assert set(GenerationKeywords.__annotations__) == {f.name for f in dataclasses.fields(GenerationOptions)}
