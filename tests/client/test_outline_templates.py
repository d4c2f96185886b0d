"""The prompts begin alike, values stay values, and a user's own file is checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.errors import UsageError
from swarm_client.outline.parser import OutlineParser
from swarm_client.outline.templates import BUILT_IN, MAX_POINTS, Template, load_templates

TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "Explain {title} to me."},
]


@pytest.mark.parametrize("template", BUILT_IN, ids=lambda t: t.name)
def test_prompts_share_a_prefix_and_keep_their_values(template: Template) -> None:
    asked = template.outline_prompt(TALK, 5)
    assert asked[:3] == TALK[:3]
    assert asked[-1]["content"].startswith("Explain {title} to me.\n")  # its braces are not ours
    assert "4 to 5" in asked[-1]["content"]
    points = [template.point_prompt(TALK, ["Sleep", "{question}"][:n], n) for n in (1, 2)]
    assert points[0][:-1] == points[1][:-1] == TALK[:3]
    first, second = (messages[-1]["content"] for messages in points)
    alike = first[: first.index("1. Sleep") + len("1. Sleep\n")]
    assert "Explain {title} to me." in alike
    assert second.startswith(alike + "2. {question}\n")
    assert second.endswith(": {question}")
    for messages in (asked, *points):
        roles = [m["role"] for m in messages[1:]]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
    assert "Sleep" in template.heading(1, "Sleep")


@pytest.mark.parametrize("template", BUILT_IN, ids=lambda t: t.name)
def test_the_example_is_an_outline(template: Template) -> None:
    parser = OutlineParser(MAX_POINTS)
    parser.push(template.example[1])
    parser.finish(cut=False)
    assert len(parser.titles) >= 4
    assert template.matches(template.example[0])


def test_a_file_of_ones_own_comes_first(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(
        '[[template]]\nname = "recipe"\nfits = "a recipe has steps"\nwhen = ["\\\\brecipe\\\\b"]\npoints = 4\n'
        '[[template]]\nname = "list"\nfits = "mine"\nwhen = []\n'
    )
    templates = load_templates(file)
    assert [t.name for t in templates] == ["recipe", "list", "comparison", "how-to", "explanation"]
    assert templates[0].matches("A RECIPE for bread")
    assert templates[1].fits == "mine"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[[template]]\nname = 3", "cannot be used"),
        ("no toml", "cannot be used"),
        ("\xff", "cannot be used"),
        ('[[template]]\nname = "a"\nfits = "b"\nwhen = ["("]', "not a regular expression"),
        ('[[template]]\nname = "a"\nfits = "b"\nwhen = []\npoints = 40', "points must be"),
        ('[[template]]\nname = "a"\nfits = "b"\nwhen = []\npoint_tokens = 0', "must be 1 to"),
        ('[[template]]\nname = "a"\nfits = "b"\nwhen = []\noutline = "list it"', "needs {question}"),
        ('[[template]]\nname = "a"\nfits = "b"\nwhen = []\nfoo = 1', "foo"),
    ],
)
def test_a_wrong_file_is_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=sentence) as caught:
        load_templates(file)
    assert "\n" not in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        load_templates(tmp_path / "none.toml")


def test_the_template_in_the_documentation_works(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guide" / "outline.md").read_text()
    file = tmp_path / "recipe.toml"
    file.write_text(page.split("```toml\n")[1].split("```")[0])
    recipe = load_templates(file)[0]
    assert recipe.matches("How can I cook beans?")
    asked = recipe.point_prompt(TALK, ["Soak", "Boil"], 2)[-1]["content"]
    assert asked.endswith("1. Soak\n2. Boil\n\nExplain stage 2 in three sentences: Boil")
