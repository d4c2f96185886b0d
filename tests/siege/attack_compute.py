"""Attacks on a node's computing: work that costs the attacker little."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence

from hostile import HostileChain, HostileClient, Siege, Victim, session_id

from swarm.errors import NetworkError
from swarm.messages import MAX_HISTORY, CloseSession, SessionFailed, SessionOpened, WireSampling
from swarm.net.transports.tls import TlsTransport
from swarm.types import MAX_LOGIT_BIAS, Grammar, GrammarKind

SESSIONS = 8
TREE_ROWS = 64
MAX_TOKENS = 1024


def _chains(work: Callable[[HostileChain], Awaitable[None]], sessions: int = SESSIONS, max_tokens: int = MAX_TOKENS):  # type: ignore[no-untyped-def]
    """An attack of that many sessions of one identity, each opened again when it has ended."""

    async def prepare(siege: Siege) -> Callable[[], Awaitable[None]]:
        client = HostileClient(siege, await siege.transport())
        nodes = siege.target.nodes
        starts = sorted({node.start for node in nodes})

        async def one(number: int) -> None:
            while siege.running:
                hops = [siege.target.serving(start)[number % len(siege.target.serving(start))] for start in starts]
                chain = HostileChain(client, hops)
                try:
                    await chain.open(max_tokens)
                    while siege.running and not chain.failed:
                        await work(chain)
                except (NetworkError, TimeoutError):
                    siege.counts["refused"] += 1
                    await asyncio.sleep(0.1)
                finally:
                    await chain.close()

        return lambda: siege.all_of(one(number) for number in range(sessions))

    return prepare


async def _tree_step(chain: HostileChain) -> None:
    first = chain.step == 0
    await chain.send(0 if first else 1, int(first), TREE_ROWS)


async def _small_prefill(chain: HostileChain) -> None:
    """16 tokens a step, until the session is full."""
    if (chain.step + 1) * 16 > MAX_TOKENS:
        chain.failed = True
        return
    await chain.send(chain.step * 16, 16, 0)


tree_steps = _chains(_tree_step)
small_prefills = _chains(_small_prefill)


async def grammars(siege: Siege) -> Callable[[], Awaitable[None]]:
    """Large schemas and regular expressions, each another one, from several identities."""
    tails = [node for node in siege.target.nodes if node.end == siege.target.num_layers]
    transports = [await siege.transport() for _ in range(4)]
    await _first_grammar(siege, tails, transports[0])

    def schema() -> str:
        words = [f"{siege.rng.random():.12f}{'x' * siege.rng.randrange(20)}" for _ in range(50)]
        schema = {"type": "object", "properties": {word: {"enum": words[:40]} for word in words}}
        return json.dumps(schema, separators=(",", ":"))

    def expression() -> str:
        return "|".join("".join(siege.rng.choices("abcdefgh.", k=100)) for _ in range(600))

    makers = ((GrammarKind.JSON_SCHEMA, schema), (GrammarKind.REGEX, expression))
    prepared = [Grammar(kind, make()) for _ in range(100) for kind, make in makers]

    async def one(number: int) -> None:
        while siege.running:
            held: list[bytes] = []
            with contextlib.suppress(NetworkError):
                tail = tails[number % len(tails)]
                stream = await siege.link(tail, transports[number])
                while siege.running:
                    grammar = siege.rng.choice(prepared)
                    held.append(session_id())
                    await stream.send(siege.open_message(tail, held[-1], sampling=WireSampling(grammar=grammar)))
                    siege.counts["grammars"] += 1
                    await asyncio.sleep(0.1)
                    if len(held) > 12:
                        await stream.send(CloseSession(held.pop(0)))

    return lambda: siege.all_of(one(number) for number in range(4))


async def _first_grammar(siege: Siege, tails: Sequence[Victim], transport: TlsTransport) -> None:
    """Each tail loads the model's tokenizer with its first grammar, once in its life: before the attack."""
    for tail in tails:
        sampling = WireSampling(grammar=Grammar(GrammarKind.REGEX, "[ab]+"))
        stream = await siege.link(tail, transport, read=False)
        await stream.send(siege.open_message(tail, session_id(), sampling=sampling))
        async with asyncio.timeout(60.0):
            while not isinstance((await stream.receive())[0], SessionOpened | SessionFailed):
                """Pings, perhaps."""
        await stream.close()


async def oversize_sampling(siege: Siege) -> Callable[[], Awaitable[None]]:
    """Opens with the longest logit bias, and with a text as long as the context, or far longer."""
    tails = [node for node in siege.target.nodes if node.end == siege.target.num_layers]
    bias = [(token, 1.0) for token in range(min(MAX_LOGIT_BIAS, siege.target.vocab_size))]
    sampling = WireSampling(logit_bias=bias, repetition_penalty=1.5, frequency_penalty=1.0)

    async def one(number: int) -> None:
        transport = await siege.transport()
        tail = tails[number % len(tails)]
        while siege.running:
            try:
                stream = await siege.link(tail, transport)
                while siege.running:
                    length = siege.rng.choice((1 << 13, 1 << 13, 1 << 13, MAX_HISTORY))
                    session, history = session_id(), [1] * (length - 64)
                    fields = {"sampling": sampling, "history": history, "prompt_tokens": len(history)}
                    await stream.send(siege.open_message(tail, session, max_tokens=length, **fields))
                    await stream.send(CloseSession(session))
                    siege.counts["sent"] += 1
                    await asyncio.sleep(0.005)
            except NetworkError:
                siege.counts["cut off"] += 1
                await asyncio.sleep(0.05)

    return lambda: siege.all_of(one(number) for number in range(4))
