"""`swarm-chat` on the command line: every mistake is one sentence and exit code 2, before anything is dialled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarm.config import ClientConfig
from swarm.types import Grammar, GrammarKind
from swarm_client.cli import chat
from swarm_client.cli.chat import OneShotRequest, app

PEER = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWAkwEYAZ21mdLbKEcBshKQCC3GDGjH2hrUMhtVGz7k4hq"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--top-p", "0"], "top_p is 0.0"),
        (["--top-p", "1.5"], "top_p is 1.5"),
        (["--top-k", "-3"], "top_k is -3"),
        (["--min-p", "1.1"], "min_p is 1.1"),
        (["--repetition-penalty", "-2"], "repetition_penalty is -2.0"),
        (["--frequency-penalty", "101"], "frequency_penalty is 101.0"),
        (["--presence-penalty", "nan"], "presence_penalty is nan"),
        (["--regex", ""], "a grammar must have 1 to"),
        (["--regex", "a", "--json-schema", "x.json"], "not both"),
        (["--json-schema", "/no/such/schema.json"], "cannot read /no/such/schema.json"),
        (["--regex", "a", "--decoding", "outline"], "cannot have a grammar"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--seed", "-1"], "seed is -1"),
        (["--stop", ""], "stop string"),
        (["--decoding", "magic"], "decoding is 'magic'"),
        (["--model", "/no/such/model.gguf"], "/no/such/model.gguf"),
        (["--peer", "nonsense"], "nonsense"),
    ],
)
def test_a_wrong_value_is_one_sentence(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    arguments = [*arguments, "--prompt", "hi"]
    if "--peer" not in arguments:
        arguments += ["--peer", PEER]
    result = CliRunner().invoke(app, arguments, env={"SWARM_HOME": str(tmp_path)})
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_an_empty_prompt(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--prompt", "  ", "--peer", PEER], env={"SWARM_HOME": str(tmp_path)})
    assert result.exit_code == 2
    assert "empty" in result.stderr


def test_without_a_swarm_it_says_how_to_start_one(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--prompt", "hi"], env={"SWARM_HOME": str(tmp_path)})
    assert result.exit_code == 2
    assert "swarm-node local" in result.stderr


def test_with_json_the_error_is_an_object_too(tmp_path: Path) -> None:
    arguments = ["--prompt", "hi", "--json", "--top-p", "7", "--peer", PEER]
    result = CliRunner().invoke(app, arguments, env={"SWARM_HOME": str(tmp_path)})
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"] == "invalid_request"


def test_json_needs_a_prompt(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--json", "--peer", PEER], env={"SWARM_HOME": str(tmp_path)})
    assert result.exit_code == 2
    assert "--prompt" in result.stderr


@pytest.mark.parametrize("text", [b"{", b"\xff", b"[" * 50_000, b'"' + b"x" * (64 << 10) + b'"'])
def test_a_file_that_is_no_schema(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_bytes(text)
    arguments = ["hi", "--peer", PEER, "--json-schema", str(tmp_path / "schema.json")]
    result = CliRunner().invoke(app, arguments, env={"SWARM_HOME": str(tmp_path)})
    assert result.exit_code == 2
    assert "schema.json is no JSON schema" in result.stderr
    assert result.stderr.count("\n") == 1


def test_sampling_flags_become_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[dict[str, object]] = []

    async def answer_once(settings: ClientConfig, prompt: str, request: OneShotRequest) -> None:
        seen.append(request.options)

    monkeypatch.setattr(chat, "answer_once", answer_once)
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    flags = ["--min-p", "0.1", "--frequency-penalty", "0.5", "--presence-penalty", "-1"]
    for grammar in (["--json-schema", str(tmp_path / "schema.json")], ["--regex", "a+"]):
        result = CliRunner().invoke(app, ["hi", "--peer", PEER, *flags, *grammar], env={"SWARM_HOME": str(tmp_path)})
        assert result.exit_code == 0, result.output
    assert [(o["min_p"], o["frequency_penalty"], o["presence_penalty"]) for o in seen] == [(0.1, 0.5, -1.0)] * 2
    assert [o["grammar"] for o in seen] == [
        Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'),
        Grammar(GrammarKind.REGEX, "a+"),
    ]


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts that were answered once."""
    prompts: list[str] = []

    async def answer_once(settings: ClientConfig, prompt: str, request: OneShotRequest) -> None:
        prompts.append(prompt)

    monkeypatch.setattr(chat, "answer_once", answer_once)
    return prompts


@pytest.mark.parametrize("arguments", [["why?"], ["--prompt", "why?"], ["--once", "why?"]])
def test_a_prompt_is_answered_once(arguments: list[str], answered: list[str], tmp_path: Path) -> None:
    environment = {"SWARM_HOME": str(tmp_path)}
    result = CliRunner().invoke(app, [*arguments, "--peer", PEER], env=environment, input="not read")
    assert result.exit_code == 0, result.output
    assert answered == ["why?"]


def test_piped_text_is_the_prompt(answered: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--peer", PEER], env={"SWARM_HOME": str(tmp_path)}, input="one\ntwo\n")
    assert result.exit_code == 0, result.output
    assert answered == ["one\ntwo"]


@pytest.mark.parametrize(("arguments", "sentence"), [([], "stdin is empty"), (["a", "--prompt", "b"], "twice")])
def test_no_prompt_or_two(arguments: list[str], sentence: str, answered: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*arguments, "--peer", PEER], env={"SWARM_HOME": str(tmp_path)})
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert answered == []
