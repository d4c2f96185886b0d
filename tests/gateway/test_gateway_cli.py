"""`swarm-gateway` on the command line: every mistake is one sentence and exit code 2, before anything is dialled."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarm.config import GatewayConfig
from swarm_gateway.server import cli

PEER = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWAkwEYAZ21mdLbKEcBshKQCC3GDGjH2hrUMhtVGz7k4hq"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--host", "0.0.0.0"], "give --api-key"),
        (["--port", "70000"], "--port is 70000"),
        (["--api-key", "a b"], "printable ASCII"),
        (["--swarm", "nonsense"], "is not an invitation"),
        (["--invite", "nonsense"], "is not an invitation"),
        (["--config", "/no/such/file"], "/no/such/file"),
        (["--max-running", "0"], "--max-running is 0"),
    ],
)
def test_a_wrong_value_is_one_sentence(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, [*arguments, "--peer", PEER], env={"SWARM_HOME": str(tmp_path)})
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_without_a_swarm_it_says_how_to_start_one(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["--json"], env={"SWARM_HOME": str(tmp_path)})
    assert result.exit_code == 2
    assert "swarm-node local" in result.stderr
    assert json.loads(result.stdout)["event"] == "error"


def test_a_port_in_use_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(cli.app, ["--port", port, "--peer", PEER], env={"SWARM_HOME": str(tmp_path)})
    assert result.exit_code == 2
    assert f"port {port}" in result.stderr


def test_flags_variables_and_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[GatewayConfig] = []
    monkeypatch.setattr(cli, "start", seen.append)
    file = tmp_path / "gateway.toml"
    file.write_text('port = 1\nhost = "::1"\nallow_origins = ["https://a.example"]\n')
    variables = {"SWARM_HOME": str(tmp_path), "SWARM_PORT": "2", "SWARM_API_KEY": "key-a,key-b"}
    arguments = ["--peer", PEER, "--config", str(file), "--allow-host", "gate"]
    assert CliRunner().invoke(cli.app, arguments, env=variables).exit_code == 0
    (config,) = seen
    assert (config.host, config.port, config.api_keys) == ("::1", 2, ("key-a", "key-b"))
    assert (config.allow_origins, config.allow_hosts, config.peers) == (("https://a.example",), ("gate",), (PEER,))
    assert "key-a" not in repr(config)


def test_the_first_lines_are_an_address_and_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    cli._report_ready("http://127.0.0.1:1", ["m"], GatewayConfig(api_keys=("k",)))
    text = capsys.readouterr().out
    assert "m at http://127.0.0.1:1/v1" in text
    assert "curl http://127.0.0.1:1/v1/chat/completions" in text
    assert "Bearer $SWARM_API_KEY" in text
    cli._report_ready("http://127.0.0.1:1", ["m"], GatewayConfig(json=True))
    ready = json.loads(capsys.readouterr().out)
    assert (ready["event"], ready["address"], ready["models"]) == ("ready", "http://127.0.0.1:1", ["m"])
    assert "token ids" in ready["exposure"]
