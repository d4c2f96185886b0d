"""The gateway on real processes: what it costs over SwarmClient, many open streams, and a long load while nodes die.

    python benchmarks/bench_gateway.py [--only overhead] [--only streams] [--only load] [--guidellm PROGRAM]

`overhead`: the same prompts through SwarmClient and through the gateway, in turns, on one private swarm. `streams`: 100
answers at once on one gateway process. `load`: 1,000 requests by guidellm (a program of its own: `pip install guidellm`
into another environment, and give its path) over three spans of two replicas, of which one node is killed every 20 s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "chaos"))

from process_swarm import ProcessSwarm
from stream_tap import StreamTap, tapped

from swarm.types import LayerSpan
from swarm_client import SwarmClient

SPANS = (LayerSpan(0, 10), LayerSpan(10, 20), LayerSpan(20, 30))
MODEL = "smollm2-135m"
QUESTIONS = (
    "How do bees find their way home?",
    "Write a letter to a landlord about a broken heater.",
    "What is the difference between a virus and a bacterium?",
    "List the steps to change a bicycle tyre.",
    "Explain inflation to a child.",
    "Describe a market in the morning.",
    "Which planets have rings?",
    "Write a function that reverses a string, and explain it.",
)


@asynccontextmanager
async def gateway(peers: Sequence[str], *flags: str) -> AsyncIterator[tuple[int, int]]:
    """`swarm-gateway` as a process. -> (its port, its pid)."""
    command = [sys.executable, "-m", "swarm_gateway.server.cli", "--json", "--port", "0", *flags]
    for peer in peers:
        command += ["--peer", peer]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL)
    try:
        assert process.stdout is not None
        async for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                port = int(event["address"].rsplit(":", 1)[1].split("/")[0])
                await _healthy(port)
                yield port, process.pid
                break
        else:
            raise RuntimeError(f"the gateway ended with {await process.wait()}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _healthy(port: int) -> None:
    """Until every layer is served."""
    async with asyncio.timeout(120), httpx.AsyncClient() as http:
        while (await http.get(f"http://127.0.0.1:{port}/health")).status_code != 200:  # noqa: ASYNC110  a process
            await asyncio.sleep(0.2)


def body(question: str, tokens: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": MODEL, "messages": messages, "max_tokens": tokens, "stream": True, "ignore_eos": True, **more}


async def stream(http: httpx.AsyncClient, port: int, question: str, tokens: int) -> tuple[float, float, str]:
    """-> (first token after s, tokens/s after it, text). Greedy; the number of tokens is the gateway's own count."""
    started, first, last, text, count = time.perf_counter(), 0.0, 0.0, "", 0
    options = {"temperature": 0, "stream_options": {"include_usage": True}}
    request = http.stream(
        "POST", f"http://127.0.0.1:{port}/v1/chat/completions", json=body(question, tokens, **options)
    )
    async with request as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            count = (chunk.get("usage") or {}).get("completion_tokens", count)
            piece = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            if piece:
                last = time.perf_counter()
                first, text = first or last, text + piece
    return first - started, (count - 1) / (last - first) if last > first else 0.0, text


async def direct(client: SwarmClient, question: str, tokens: int) -> tuple[float, float, str]:
    """The same through SwarmClient."""
    started, first, last, text = time.perf_counter(), 0.0, 0.0, ""
    messages = [{"role": "user", "content": question}]
    async with client.chat_stream(messages, max_new_tokens=tokens, ignore_eos=True) as answer:
        async for chunk in answer:
            if chunk.text:
                last = time.perf_counter()
                first, text = first or last, text + chunk.text
    count = len(answer.result.token_ids)
    return first - started, (count - 1) / (last - first) if last > first else 0.0, text


async def overhead(rounds: int, tokens: int) -> dict[str, Any]:
    """The same prompts both ways, in turns, so that a noisy machine disturbs both alike."""
    with tempfile.TemporaryDirectory() as home:
        async with (
            ProcessSwarm(Path(home), SPANS, replicas=1) as swarm,
            gateway(swarm.addresses) as (port, _),
            SwarmClient(MODEL, swarm.addresses) as client,
            httpx.AsyncClient(timeout=120) as http,
        ):
            pairs = []
            for turn, question in itertools.product(range(rounds + 1), QUESTIONS):
                ways = [direct(client, question, tokens), stream(http, port, question, tokens)]
                measured: list[Any] = [None, None]
                for way in (0, 1) if turn % 2 else (1, 0):
                    measured[way] = await ways[way]
                if measured[0][2] != measured[1][2]:
                    raise RuntimeError(f"other text through the gateway: {question!r}")
                if turn:  # the first answers load caches and drafters
                    pairs.append(measured)
    rates = [through[1] / plain[1] for plain, through in pairs]
    delays_ms = [(through[0] - plain[0]) * 1e3 for plain, through in pairs]
    return {
        "answers": len(pairs),
        "tokens_per_second_ratio": {
            "median": round(statistics.median(rates), 3),
            "geometric_mean": round(statistics.geometric_mean(rates), 3),
            "worst": round(min(rates), 3),
        },
        "first_token_later_ms": {
            "median": round(statistics.median(delays_ms), 1),
            "mean": round(statistics.mean(delays_ms), 1),
            "worst": round(max(delays_ms), 1),
        },
        "direct_tokens_per_second": round(statistics.median(plain[1] for plain, _ in pairs), 1),
    }


async def many_streams(count: int, tokens: int) -> dict[str, Any]:
    """`count` answers at once through one gateway process: all end, with the tokens asked for."""
    with tempfile.TemporaryDirectory() as home:
        room = Path(home) / "swarm.toml"
        room.write_text(f"[limits]\nmax_sessions = {count}\nmax_sessions_per_peer = {count}\n")
        swarm = ProcessSwarm(Path(home), SPANS, more_flags=("--config", str(room)))
        async with swarm, gateway(swarm.addresses, "--max-running", str(count)) as (port, pid):
            limits = httpx.Limits(max_connections=count)
            async with tapped(port) as tap, httpx.AsyncClient(timeout=600, limits=limits) as http:
                await stream(http, port, QUESTIONS[0], 8)
                started = time.perf_counter()
                answers = await asyncio.gather(
                    *(stream(http, tap.port, f"{QUESTIONS[i % 8]} ({i})", tokens) for i in range(count)),
                    return_exceptions=True,
                )
                took_s = time.perf_counter() - started
                failed = [str(answer) for answer in answers if isinstance(answer, BaseException)]
                return {
                    "streams": count,
                    "failed": len(failed),
                    "failures": sorted(set(failed))[:5],
                    "seconds": round(took_s, 1),
                    "tokens_per_second": round(count * tokens / took_s, 1),
                    "gateway_rss_mb": round(psutil.Process(pid).memory_info().rss / 1e6),
                    "gateway_cpu_share": round(sum(psutil.Process(pid).cpu_times()[:2]) / took_s, 3),
                    **gaps(tap),
                }


async def load(guidellm: str, requests: int, streams: int, tokens: int, kill_every_s: float) -> dict[str, Any]:
    """guidellm's requests, while every `kill_every_s` one node is killed and started again."""
    with tempfile.TemporaryDirectory() as home:
        async with (
            ProcessSwarm(Path(home), SPANS, replicas=2) as swarm,
            gateway(swarm.addresses) as (port, _),
            tapped(port) as tap,
        ):
            killing = asyncio.create_task(_kill_now_and_then(swarm, kill_every_s))
            try:
                report = await _guidellm(guidellm, Path(home), tap.port, requests, streams, tokens)
            finally:
                killing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await killing
            return {**report, **gaps(tap)}


KILLED: list[int] = []  # numbers of the nodes, in order


async def _kill_now_and_then(swarm: ProcessSwarm, every_s: float) -> None:
    """One node at a time, never the last replica: the one before it serves again first."""
    rng = random.Random(7)
    while True:
        await asyncio.sleep(every_s)
        victim = rng.choice(swarm.nodes)
        await victim.kill()
        KILLED.append(victim.number)
        await asyncio.sleep(2.0)
        await victim.start()


async def _guidellm(program: str, folder: Path, port: int, requests: int, streams: int, tokens: int) -> dict[str, Any]:
    prompts, report = folder / "prompts.jsonl", folder / "report.json"
    rows = ({"prompt": f"{QUESTIONS[i % 8]} Answer {i}.", "output_tokens_count": tokens} for i in range(requests))
    prompts.write_text("\n".join(map(json.dumps, rows)))
    process = await asyncio.create_subprocess_exec(
        *(program, "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target=http://127.0.0.1:{port},model={MODEL}"),
        *("--data", f"kind=json_file,path={prompts}"),
        *("--profile", f"kind=concurrent,streams={streams}"),
        *("--constraint", f"kind=max_requests,count={requests}"),
        *("--output", f"kind=json,path={report}"),
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=DEVNULL,
        stderr=DEVNULL,
    )
    try:
        await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    figures = json.loads(report.read_text())["benchmarks"][0]
    totals = figures["metrics"]["request_totals"]
    return {
        "requests": totals["total"],
        "successful": totals["successful"],
        "errored": totals["errored"],
        "incomplete": totals["incomplete"],
        "seconds": round(figures["duration"], 1),
        "killed": len(KILLED),
    }


def gaps(tap: StreamTap) -> dict[str, Any]:
    """Of streamed answers: the longest time without a token within each, and how many did not end."""
    streamed = tap.streamed()
    longest = sorted(answer.longest_gap_s for answer in streamed)
    return {
        "streamed": len(streamed),
        "not_ended": sum(not answer.done for answer in streamed),
        "longest_gap_s": {
            "median": round(statistics.median(longest), 3),
            "p95": round(longest[int(0.95 * len(longest))], 3),
            "worst": round(longest[-1], 3),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=("overhead", "streams", "load"))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--guidellm", default="guidellm", help="path of the program")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--answer-tokens", type=int, default=16, help="of each request under load")
    parser.add_argument("--kill-every", type=float, default=20.0)
    args = parser.parse_args()
    chosen = args.only or ["overhead", "streams", "load"]
    report: dict[str, Any] = {}
    if "overhead" in chosen:
        report["overhead"] = asyncio.run(overhead(args.rounds, args.tokens))
    if "streams" in chosen:
        report["streams"] = asyncio.run(many_streams(args.streams, args.answer_tokens))
    if "load" in chosen:
        report["load"] = asyncio.run(
            load(args.guidellm, args.requests, args.concurrency, args.answer_tokens, args.kill_every)
        )
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
