"""Settings from flags, SWARM_* and TOML: precedence, every flag by its variable, old names, and wrong values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from swarm.command_line import old_flags
from swarm.config import ClientConfig, GatewayConfig, Limits, NodeConfig, load, parse_bytes
from swarm.errors import UsageError
from swarm.types import Grammar, GrammarKind
from swarm_client.cli import chat
from swarm_client.network import discovery
from swarm_gateway.server import cli as gateway
from swarm_node.commands import cli, flags

MADDRS = "/ip4/10.0.0.1/tcp/1/p2p/a,/ip4/10.0.0.2/tcp/2/p2p/b"
SECRET, INVITED = "a secret of many letters", "swarm:"  # no token: that it is read shows in the error
TEXT = {  # flag -> (its variable's text, the field and its value in the config)
    "gpu": ("1", "gpu", 1),
    "cpu": ("1", "gpu", None),
    "model": ("toy", "model", "toy"),
    "peer": (MADDRS, "peers", tuple(MADDRS.split(","))),
    "listen": (MADDRS, "listen", tuple(MADDRS.split(","))),
    "layers": ("0:4", "layers", "0:4"),
    "experts": ("0:8", "experts", "0:8"),
    "lead": ("yes", "lead", True),
    "max-memory": ("6GB", "max_memory", 6 * 10**9),
    "dtype": ("int8", "dtype", "int8"),
    "medusa-heads": ("a.heads", "medusa_heads", Path("a.heads")),
    "name": ("bob", "name", "bob"),
    "region": ("eu", "region", "eu"),
    "identity": ("id", "identity", Path("id")),
    "owner": ("one,two", "owner", ("one", "two")),
    "threads": ("2", "threads", 2),
    "join-timeout": ("1.5", "join_timeout_s", 1.5),
    "model-fraction": ("1/3", "model_fraction", Fraction(1, 3)),
    "max-sessions": ("7", "max_sessions", 7),
    "upload-limit": ("2MB", "upload_limit", 2 * 10**6),
    "active-hours": ("22:00-08:00", "active_hours", "22:00-08:00"),
    "pause-when-busy": ("yes", "pause_when_busy", True),
    "log-format": ("json", "log_format", "json"),
    "metrics-port": ("0", "metrics_port", 0),
    "metrics-host": ("::", "metrics_host", "::"),
    "secret": (SECRET, "secret", SECRET),
    "network": ("friends", "network", "friends"),
    "no-discovery": ("1", "discovery", False),
    "transport": ("libp2p", "transport", "libp2p"),
    "libp2p": ("python", "libp2p_impl", "python"),
    "direct-port": ("9", "direct_port", 9),
    "relay-server": ("true", "relay_server", True),
    "relay-via": (MADDRS, "relay_via", tuple(MADDRS.split(","))),
    "json": ("1", "json", True),
    "local-layers": ("1:2", "local_layers", "1:2"),
    "trust": ("12D3a,12D3b", "trust", ("12D3a", "12D3b")),
    "apart": ("both", "apart", "both"),
    "known-first": ("1", "known_first", True),
    "vary-first": ("yes", "vary_first", True),
    "decoding": ("tree", "decoding", "tree"),
    "drafter": ("medusa", "drafter", "medusa"),
    "prompt": ("hello", "prompt", "hello"),
    "system": ("be brief", "system", "be brief"),
    "greedy": ("1", "temperature", 0.0),
    "max-new-tokens": ("3", "max_new_tokens", 3),
    "temperature": ("0.5", "temperature", 0.5),
    "top-p": ("0.5", "top_p", 0.5),
    "top-k": ("5", "top_k", 5),
    "repetition-penalty": ("1.1", "repetition_penalty", 1.1),
    "min-p": ("0.1", "min_p", 0.1),
    "frequency-penalty": ("0.5", "frequency_penalty", 0.5),
    "presence-penalty": ("-0.5", "presence_penalty", -0.5),
    "regex": ("a+", "grammar", Grammar(GrammarKind.REGEX, "a+")),
    "seed": ("5", "seed", 5),
    "stop": ("a b, c", "stop", ("a b", "c")),
    "host": ("::1", "host", "::1"),
    "port": ("9", "port", 9),
    "api-key": ("one,two", "api_keys", ("one", "two")),
    "allow-origin": ("https://a.example", "allow_origins", ("https://a.example",)),
    "allow-host": ("a.example", "allow_hosts", ("a.example",)),
    "swarm": (INVITED, "swarms", (INVITED,)),
    "max-running": ("7", "max_running", 7),
}


def flags_of(app: typer.Typer, name: str | None = None) -> list[str]:
    top: Any = typer.main.get_command(app)
    params = (top.commands[name] if name else top).params
    flags = (max(p.opts, key=len) for p in params if p.expose_value and not p.is_eager)
    return sorted(flag[2:] for flag in flags if flag.startswith("--"))  # arguments are no flags


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """What the two programs would have done, and runs them: `join(*arguments, **variables)`, `ask(...)`."""
    seen = SimpleNamespace(config=None, options={}, stderr="", code=0)
    monkeypatch.delenv("SWARM_DISCOVERY")
    monkeypatch.setenv("SWARM_HOME", str(tmp_path))
    monkeypatch.setattr(discovery, "with_peers", lambda settings: settings)

    def node(given: Mapping[str, Any]) -> NodeConfig:
        seen.config = flags_config(given)
        raise UsageError("that will do")

    async def answer(settings: ClientConfig, prompt: str, request: chat.OneShotRequest) -> None:
        seen.config, seen.options = settings, {**request.options, "prompt": prompt, "system": request.system}

    flags_config = flags.config_of
    monkeypatch.setattr(flags, "config_of", node)
    monkeypatch.setattr(chat, "answer_once", answer)
    monkeypatch.setattr("swarm_node.commands.runner.hard_exit", _end)

    def runner(app: typer.Typer, *first: str) -> Any:
        def run(*arguments: str, **variables: str) -> SimpleNamespace:
            env = {f"SWARM_{name.upper().replace('-', '_')}": text for name, text in variables.items()}
            seen.config = None
            result = CliRunner().invoke(app, [*first, *arguments], env=env)
            seen.stderr, seen.code = result.stderr, result.exit_code
            return seen

        return run

    monkeypatch.setattr(gateway, "start", lambda settings: setattr(seen, "config", settings))
    seen.join, seen.ask, seen.serve = runner(cli.app, "join"), runner(chat.app), runner(gateway.app)
    return seen


def _end(code: int) -> None:
    raise typer.Exit(code)


@pytest.mark.parametrize("flag", flags_of(cli.app, "join"))
def test_every_flag_of_join_has_its_variable(flag: str, seen: SimpleNamespace, tmp_path: Path) -> None:
    if flag == "private":
        assert len(seen.join(private="1").config.secret) == 22
        assert seen.join("--secret", SECRET, private="1").config.secret == SECRET
    elif flag == "invite":
        assert "invit" in seen.join(invite=INVITED).stderr
    elif flag == "config":
        file = tmp_path / "swarm.toml"
        file.write_text('name = "carol"\n')
        assert seen.join(config=str(file)).config.name == "carol"
    elif flag == "verbose":
        assert seen.join(verbose="1").config == seen.join().config
    else:
        text, name, value = TEXT[flag]
        assert getattr(seen.join(**{flag: text, **({"gpu": "1"} if flag == "cpu" else {})}).config, name) == value
        assert flag == "cpu" or getattr(NodeConfig(), name) != value, "the test would see nothing"


@pytest.mark.parametrize("flag", flags_of(chat.app))
def test_every_flag_of_chat_has_its_variable(flag: str, seen: SimpleNamespace, tmp_path: Path) -> None:
    if flag == "invite":
        assert "invit" in seen.ask("--prompt", "hi", invite=INVITED).stderr
    elif flag == "config":
        file = tmp_path / "swarm.toml"
        file.write_text('network = "friends"\n')
        assert seen.ask("--prompt", "hi", config=str(file)).config.network == "friends"
    elif flag == "json-schema":
        file = tmp_path / "schema.json"
        file.write_text("{}")
        found = seen.ask("--prompt", "hi", json_schema=str(file))
        assert found.options["grammar"] == Grammar(GrammarKind.JSON_SCHEMA, "{}")
    elif flag in ("verbose", "json"):
        assert seen.ask("--prompt", "hi", **{flag: "1"}).config is not None
    else:
        text, name, value = TEXT[flag]
        found = seen.ask(*([] if flag == "prompt" else ["--prompt", "hi"]), **{flag: text})
        assert (found.options[name] if name in found.options else getattr(found.config, name)) == value


@pytest.mark.parametrize("flag", flags_of(gateway.app))
def test_every_flag_of_the_gateway_has_its_variable(flag: str, seen: SimpleNamespace, tmp_path: Path) -> None:
    if flag == "invite":
        assert "invit" in seen.serve(invite=INVITED).stderr
    elif flag == "config":
        file = tmp_path / "swarm.toml"
        file.write_text('network = "friends"\n')
        assert seen.serve(config=str(file)).config.network == "friends"
    elif flag == "verbose":
        assert seen.serve(verbose="1").config == seen.serve().config
    else:
        text, name, value = TEXT[flag]
        assert getattr(seen.serve(**{flag: text}).config, name) == value
        assert getattr(GatewayConfig(), name) != value, "the test would see nothing"


OLD = [  # old spelling, new spelling, field
    (("--carrier", "daemon"), ("--transport", "libp2p"), "transport"),
    (("--carrier", "auto"), ("--transport", "auto"), "transport"),
    (("--transport", "py"), ("--libp2p", "python"), "libp2p_impl"),
    (("--transport", "daemon"), ("--libp2p", "go"), "libp2p_impl"),
    (("--via", "/ip4/1.2.3.4/tcp/1/p2p/a"), ("--relay-via", "/ip4/1.2.3.4/tcp/1/p2p/a"), "relay_via"),
    (("--heads", "a.heads"), ("--medusa-heads", "a.heads"), "medusa_heads"),
    (("--share", "3"), ("--model-fraction", "1/3"), "model_fraction"),
    (("--wait", "2"), ("--join-timeout", "2"), "join_timeout_s"),
    (("--schedule", "22:00-08:00"), ("--active-hours", "22:00-08:00"), "active_hours"),
    (("--max-upload", "2MB"), ("--upload-limit", "2MB"), "upload_limit"),
    (("--relay",), ("--relay-server",), "relay_server"),
]
OLD_OF_CHAT = [
    (("--draft", "heads"), ("--drafter", "medusa"), "drafter"),
    (("--draft", "shipped"), ("--drafter", "bundled"), "drafter"),
    (("--draft", "a.draft"), ("--drafter", "a.draft"), "drafter"),
    (("--strategy", "tree"), ("--decoding", "tree"), "decoding"),
    (("--strategy", "pipelined"), ("--decoding", "pipedec"), "decoding"),
    (("--strategy", "hybrid"), ("--decoding", "pipelined-tree"), "decoding"),
    (("--transport", "py"), ("--libp2p", "python"), "libp2p_impl"),
]


@pytest.mark.parametrize(("old", "new", "name"), OLD)
def test_old_flags_of_join_still_work_and_are_hidden(
    old: tuple[str, ...], new: tuple[str, ...], name: str, seen: SimpleNamespace, tmp_path: Path
) -> None:
    expected = getattr(seen.join(*new).config, name)
    assert getattr(seen.join(*old).config, name) == expected
    assert getattr(seen.join("=".join(old)).config, name) == expected
    text = old[1] if len(old) > 1 else "1"
    assert getattr(seen.join(**{old[0].removeprefix("--"): text}).config, name) == expected
    (file := tmp_path / "old.toml").write_text(f'{old[0].removeprefix("--").replace("-", "_")} = "{text}"\n')
    assert getattr(seen.join("--config", str(file)).config, name) == expected
    hidden(cli.app, old[0], "join")


@pytest.mark.parametrize(("old", "new", "name"), OLD_OF_CHAT)
def test_old_flags_of_chat_still_work_and_are_hidden(
    old: tuple[str, str], new: tuple[str, str], name: str, seen: SimpleNamespace
) -> None:
    expected = getattr(seen.ask("--prompt", "hi", *new).config, name)
    assert getattr(seen.ask("--once", "hi", *old).config, name) == expected
    assert getattr(seen.ask("--once=hi", **{old[0].removeprefix("--"): old[1]}).config, name) == expected
    assert seen.options["prompt"] == "hi"
    hidden(chat.app, old[0])
    hidden(chat.app, "--once")


def hidden(app: typer.Typer, flag: str, *command: str) -> None:
    words = set(re.findall(r"--[a-z0-9-]+", CliRunner().invoke(app, [*command, "--help"]).stdout))
    assert len(words) > 10
    assert flag not in words or (flag == "--transport" and command == ("join",))


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("silence_s", "ping_timeout_s", 2.0),
        ("stall_s", "stall_timeout_s", 2.0),
        ("edge_timeout_s", "next_hop_dial_timeout_s", 2.0),
        ("log_bytes", "activation_log_bytes", 7),
        ("record_lifetime_s", "record_ttl_s", 2.0),
    ],
)
def test_old_limits_still_work(old: str, new: str, value: float, tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text(f"wait_s = 3\nrelays = ['a', 'b']\n[limits]\n{old} = {value}\n")
    config = load(NodeConfig, {}, file)
    assert getattr(config.limits, new) == value
    assert (config.join_timeout_s, config.relay_via) == (3.0, ("a", "b"))


def test_new_names_win_over_old_ones_and_flags_over_variables_over_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "swarm.toml"
    file.write_text('join_timeout_s = 4\nwait = 3\nname = "file"\nregion = "file"\nnetwork = "file"\n')
    monkeypatch.setenv("SWARM_NAME", "variable")
    monkeypatch.setenv("SWARM_REGION", "variable")
    config = load(NodeConfig, {"name": "flag", "region": None}, file)
    assert (config.name, config.region, config.network, config.dtype) == ("flag", "variable", "file", "bf16")
    assert config.join_timeout_s == 4.0
    monkeypatch.setenv("SWARM_WAIT", "5")
    assert load(NodeConfig, {}, file).join_timeout_s == 5.0
    monkeypatch.setenv("SWARM_JOIN_TIMEOUT", "6")
    assert load(NodeConfig, {}, file).join_timeout_s == 6.0
    monkeypatch.setenv("SWARM_JOIN_TIMEOUT", "")
    assert load(NodeConfig, {}, file).join_timeout_s == 5.0, "an empty one says nothing"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[limits]\nmax_sessions = 'lots'", ("max_sessions", "lots", "a whole number")),
        ("[limits]\nmax_sessions = -1", ("max_sessions", "-1", ">= 1")),
        ("[limits]\nmax_sessions = true", ("max_sessions", "True", "a whole number")),
        ("[limits]\nmax_sessions = 1.5", ("max_sessions", "1.5", "a whole number")),
        ("[limits]\nopen_timeout_s = nan", ("open_timeout_s", "nan")),
        ("[limits]\nopen_timeout_s = inf", ("open_timeout_s", "inf", "<= 1000000000")),
        ("[limits]\nopen_timeout_s = -0.5", ("open_timeout_s", "-0.5", "> 0")),
        ("[limits]\npatience = 1", ("[limits]", "'patience'", "ping_timeout_s")),
        ("limits = 5", ("'limits'", "5", "a table")),
        ("limits = [1]", ("'limits'", "a table")),
        ("threads = 'some'", ("'threads'", "some", "a whole number")),
        ("threads = 0", ("'threads'", "0", ">= 1")),
        ("threads = 2024-01-01", ("'threads'", "a whole number")),
        ("model = 5", ("'model'", "5", "text")),
        ("model = {a = 1}", ("'model'", "text")),
        ("peers = [1, 2]", ("'peers'", "text")),
        ("peers = 7", ("'peers'", "a list")),
        ("json = 'perhaps'", ("'json'", "perhaps", "true or false")),
        ("transport = 'pigeon'", ("'transport'", "pigeon", "one of auto, libp2p")),
        ("libp2p_impl = 5", ("'libp2p_impl'", "go")),
        ("identity = 5", ("'identity'", "the path of a file")),
        ("metrics_port = 65536", ("'metrics_port'", "65536", "<= 65535")),
        ("max_memory = 0", ("'max_memory'", "0", ">= 1")),
        ("max_memory = 'much'", ("'max_memory'", "much", "6GB")),
        ("model_fraction = '1/0'", ("'model_fraction'", "1/0", "1/3")),
        ("model_fraction = 2", ("'model_fraction'", "1/3")),
        ("model_fraction = '1e-999999999'", ("'model_fraction'", "1/3")),
        ("share = -3", ("'share'", "1/3")),
        ("secret = 12345678901", ("'secret'", "text")),
        ("magic = 1", ("'magic'", "not one of")),
        ("'' = 1", ("''", "not one of")),
        ("threads = " + "9" * 5000, ("not TOML",)),
        ("threads = " + "9" * 100, ("'threads'", "...", "<=")),
        ("model = " + "[" * 100_000, ("not TOML",)),
        ("model", ("not TOML",)),
        ("model = 'a'\nmodel = 'b'", ("not TOML",)),
    ],
)
def test_a_wrong_file_is_one_sentence(text: str, words: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        load(NodeConfig, {}, file)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert len(sentence) < 800
    assert str(file) in sentence
    assert all(word in sentence for word in words), sentence
    assert "12345678901" not in sentence, "a secret is not shown"


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for file, words in ((tmp_path / "binary", "not TOML"), (tmp_path, "cannot read"), (tmp_path / "no", "cannot read")):
        with pytest.raises(UsageError, match=words):
            load(NodeConfig, {}, file)


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("SWARM_THREADS", "lots", "SWARM_THREADS is 'lots'; it must be a whole number"),
        ("SWARM_GPU", "-1", "SWARM_GPU is '-1'; it must be a whole number >= 0"),
        ("SWARM_WAIT", "nan", "SWARM_WAIT is 'nan'; it must be a number"),
        ("SWARM_NO_DISCOVERY", "perhaps", "SWARM_NO_DISCOVERY is 'perhaps'; it must be true or false"),
        ("SWARM_MAX_MEMORY", "9" * 400, "SWARM_MAX_MEMORY: .* is not an amount of memory"),
        ("SWARM_TRANSPORT", "pigeon", "SWARM_TRANSPORT is 'pigeon'; it must be one of auto, libp2p"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, text: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(UsageError, match=words):
        load(NodeConfig, {})


def test_a_wrong_flag_is_named_and_ends_with_2(seen: SimpleNamespace) -> None:
    for arguments, words in (
        (("--max-sessions", "-4"), "--max-sessions is -4; it must be a whole number >= 1"),
        (("--max-memory", "6 pigs"), "--max-memory: '6 pigs' is not an amount of memory"),
        (("--model-fraction", "1/0"), "--model-fraction is '1/0'; it must be a part of the model"),
        (("--join-timeout", "nan"), "--join-timeout is nan; it must be a number"),
        (("--log-format", "xml"), "--log-format is 'xml'; it must be one of text, json"),
    ):
        found = seen.join(*arguments)
        assert (found.code, words in found.stderr, found.stderr.count("\n")) == (2, True, 1), found.stderr


def test_unknown_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SWARM_SOMETHING", "SWARM_LIMITS", "SWARM_NO_NAME", "SWARM_", "SWARM_NO_LIMITS"):
        monkeypatch.setenv(name, "1")
    config = load(ClientConfig, {})
    assert config.limits == Limits()


def test_arguments_after_two_dashes_and_other_flags_are_unchanged() -> None:
    assert old_flags.arguments(["--name", "x", "--", "--wait", "3"]) == ["--name", "x", "--", "--wait", "3"]
    assert old_flags.arguments(["--wait"]) == ["--join-timeout"]
    assert old_flags.arguments(["-v", "wait", "--relay", "--peer", "a"]) == [
        "-v",
        "wait",
        "--relay-server",
        "--peer",
        "a",
    ]


def test_amounts_of_memory() -> None:
    assert [parse_bytes(t) for t in ("6GB", "512 MiB", "1000000", "1.5k")] == [6 * 10**9, 512 << 20, 10**6, 1500]
    for wrong in ("", "0", "-1", "ib", "6 pigs", "nan", "1e9", "\u0661", "9" * 400):
        with pytest.raises(UsageError):
            parse_bytes(wrong)
