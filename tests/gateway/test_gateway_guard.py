"""Who may ask a gateway: keys, hosts, origins, addresses to bind to; and how requests take turns."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from gateway_swarm import MODEL, gateway_swarm
from virtual_clock import virtual_time

from swarm.config import GatewayConfig, SwarmEntry, load
from swarm.errors import UsageError
from swarm.net.discovery.invite import Invite
from swarm_gateway.errors import ApiError
from swarm_gateway.server.cli import checked
from swarm_gateway.server.swarms import swarms_of
from swarm_gateway.serving.admission import Admission, AdmissionPolicy

MODELS = "/v1/models"
PEER = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWAkwEYAZ21mdLbKEcBshKQCC3GDGjH2hrUMhtVGz7k4hq"


@virtual_time
async def test_any_of_the_keys_opens_and_no_other() -> None:
    async with gateway_swarm(config=GatewayConfig(api_keys=("first-key", "second-key"))) as gateway:
        for headers in ({"authorization": "Bearer first-key"}, {"authorization": "bearer second-key"}):
            assert (await gateway.http.get(MODELS, headers=headers)).status_code == 200
        assert (await gateway.http.get(MODELS, headers={"x-api-key": "second-key"})).status_code == 200
        wrong: list[dict[str, Any]] = [{}, {"authorization": "first-key"}, {"authorization": "Bearer "}]
        wrong += [{"authorization": "Bearer first-ke"}, {"authorization": "Bearer first-key2"}, {"x-api-key": ""}]
        wrong += [{"authorization": "Basic first-key"}, {"x-api-key": "é".encode("latin-1")}]
        for headers in wrong:
            answer = await gateway.http.get(MODELS, headers=headers)
            assert answer.status_code == 401, headers
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert (await gateway.http.get("/health")).status_code == 200  # whoever watches it has no key
        assert (await gateway.http.get("/metrics")).status_code == 401
        with pytest.raises(openai.AuthenticationError):
            await gateway.openai(api_key="wrong").models.list()
        assert [m.id async for m in await gateway.openai(api_key="first-key").models.list()] == [MODEL]


@virtual_time
async def test_pages_of_other_origins_are_refused() -> None:
    async with gateway_swarm() as gateway:
        for origin in (
            "http://evil.example",
            "null",
            "http://127.0.0.1:1",
            "https://127.0.0.1.evil.example",
            "http://[",
        ):
            answer = await gateway.http.post("/v1/completions", json={"prompt": "x"}, headers={"origin": origin})
            assert answer.status_code == 403, origin
            assert "access-control-allow-origin" not in answer.headers
        own = await gateway.http.get(MODELS, headers={"origin": "http://127.0.0.1:11435"})
        assert own.status_code == 200
        for host in ("evil.example", "127.0.0.1.evil.example:11435", "", "evil.example:11435"):
            rebound = await gateway.http.get(MODELS, headers={"host": host, "origin": f"http://{host}"})
            assert rebound.status_code == 403, host
        for host in ("localhost:11435", "[::1]:11435", "127.0.0.1"):
            assert (await gateway.http.get(MODELS, headers={"host": host})).status_code == 200, host


@virtual_time
async def test_an_allowed_origin_gets_its_cors_headers() -> None:
    origin = "https://chat.example"
    config = GatewayConfig(allow_origins=(origin,), api_keys=("k",), allow_hosts=("gate.example",))
    async with gateway_swarm(config=config) as gateway:
        asked = {"origin": origin, "access-control-request-method": "POST"}
        preflight = await gateway.http.options("/v1/completions", headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == origin
        answer = await gateway.http.get(MODELS, headers={"origin": origin, "x-api-key": "k", "host": "gate.example"})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == origin
        other = await gateway.http.get(MODELS, headers={"origin": "https://other.example", "x-api-key": "k"})
        assert other.status_code == 403


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "gate.example", ""])
def test_other_addresses_need_a_key_and_it_says_why(host: str) -> None:
    with pytest.raises(UsageError, match=r"other machines could use this gateway: give --api-key"):
        checked(GatewayConfig(host=host))
    assert checked(GatewayConfig(host=host, api_keys=("k",))).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.9.1"])
def test_the_loopback_needs_none(host: str) -> None:
    assert checked(GatewayConfig(host=host)).host == host


@pytest.mark.parametrize("key", ["", " ", "a b", "schlüssel", "a\n"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(UsageError, match="printable ASCII"):
        checked(GatewayConfig(api_keys=(key,)))


def test_swarms_of_flags_and_of_a_file(tmp_path: Any) -> None:
    token = Invite((PEER,), "invited-model", secret="hidden").token()
    file = tmp_path / "gateway.toml"
    file.write_text(
        f'port = 1\n[[swarm]]\nname = "a"\ninvite = "{token}"\n[[swarm]]\nmodel = "m"\npeers = ["{PEER}"]\n'
    )
    config = load(GatewayConfig, {"swarms": (token,)})
    assert list(swarms_of(config, find=lambda c: c)) == ["invited-model"]
    config = load(GatewayConfig, {}, file)
    found = swarms_of(config, find=lambda c: c)
    assert {name: (c.model, c.peers, c.secret) for name, c in found.items()} == {
        "a": ("invited-model", (PEER,), "hidden"),
        "m": ("m", (PEER,), ""),
    }
    assert "hidden" not in repr(config)
    with pytest.raises(UsageError, match="two swarms"):
        swarms_of(GatewayConfig(swarms=(SwarmEntry(model="m"), SwarmEntry(model="m"))), find=lambda c: c)
    file.write_text('[[swarm]]\ncolour = "red"\n')
    with pytest.raises(UsageError):
        load(GatewayConfig, {}, file)


@virtual_time
async def test_callers_take_turns() -> None:
    admission = Admission(AdmissionPolicy(max_running=1, max_queued=9, timeout_s=100))
    order: list[str] = []

    async def ask(caller: str, name: str) -> None:
        async with admission.turn(caller):
            order.append(name)
            await asyncio.sleep(1)

    async with asyncio.TaskGroup() as tasks:
        for caller, name in [("x", "x1"), ("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("b", "b2")]:
            tasks.create_task(ask(caller, name))
    assert order == ["x1", "a1", "b1", "a2", "b2", "a3"]
    assert (admission.running, admission.queued) == (0, 0)


@virtual_time
async def test_whoever_leaves_the_queue_leaves_no_trace() -> None:
    admission = Admission(AdmissionPolicy(max_running=1, max_queued=2, timeout_s=5))

    async def ask(seconds: float) -> None:
        async with admission.turn("one"):
            await asyncio.sleep(seconds)

    first, second, third = (asyncio.ensure_future(ask(s)) for s in (20, 1, 1))
    await asyncio.sleep(1)
    with pytest.raises(ApiError, match="too many requests"):
        admission.check()
    second.cancel()
    results = await asyncio.gather(first, second, third, return_exceptions=True)
    assert results[0] is None
    assert isinstance(results[1], asyncio.CancelledError)
    assert isinstance(results[2], ApiError)
    assert results[2].status == 429
    assert (admission.running, admission.queued) == (0, 0)


@virtual_time
async def test_health_names_the_missing_layers_and_figures_count() -> None:
    async with gateway_swarm() as gateway:
        body = {"prompt": "x", "max_tokens": 3}
        assert (await gateway.http.post("/v1/completions", json=body)).status_code == 200
        assert (await gateway.http.get("/health")).json()["status"] == "ok"
        text = (await gateway.http.get("/metrics")).text
        assert 'swarm_gateway_requests_total{endpoint="/v1/completions",status="200"} 1.0' in text
        assert f'swarm_gateway_generated_tokens_total{{model="{MODEL}"}} 3.0' in text
        gateway.swarm.kill(gateway.swarm.peers[1])
        await asyncio.sleep(30)  # its record expires
        health = await gateway.http.get("/health")
        assert health.status_code == 503
        assert health.json()["models"][0]["missing"] == [[2, 4]]
        refused = await gateway.http.post("/v1/completions", json=body)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers


@virtual_time
async def test_the_openapi_file_names_every_path_and_resolves() -> None:
    async with gateway_swarm() as gateway:
        file = (await gateway.http.get("/openapi.json")).json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics"} <= set(file["paths"])
    text = str(file)
    for name in file["components"]["schemas"]:
        assert f"#/components/schemas/{name}'" in text
    assert file["paths"]["/v1/models/{model}"]["get"]["parameters"][0]["name"] == "model"
