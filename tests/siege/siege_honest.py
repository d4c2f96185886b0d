"""An honest client that asks one question after the other, and what it sees of the map.

Owns the answers, when each token came, and whether the tokens were right. Knows nothing of attacks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from siege_speed import Interval, Window, ratio_range, token_times_s, tokens_per_s

from swarm.errors import NetworkError, SwarmError
from swarm.types import PeerId
from swarm_client import SwarmClient

QUESTIONS = ("Why is the sky blue?", "Name five fruits.", "Write a short poem about the sea.")
TOKENS = 16  # short: several answers in each window
READ_INTERVAL_S = 0.5
READ_TIMEOUT_S = 3.0
GIVE_UP_S = 60.0


@dataclass
class Ended:
    """One answer that ended. `right` only means something if it did not fail."""

    begun: float
    ended: float
    right: bool
    error: str = ""
    repairs: int = 0


@dataclass
class HonestClient:
    """`truth` is learned before anybody attacks. Times are `time.monotonic()`."""

    client: SwarmClient
    truth: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tokens: list[float] = field(default_factory=list)  # when each came
    answers: list[Ended] = field(default_factory=list)
    intervals: list[Interval] = field(default_factory=list)
    _since: float = 0.0  # the last token, or when it began to ask

    async def learn(self) -> None:
        for question in QUESTIONS:
            answer = await self.client.chat(_messages(question), max_new_tokens=TOKENS, decoding="sequential")
            self.truth[question] = answer.token_ids

    async def ask_on(self) -> None:
        """Until cancelled."""
        number = 0
        self._since = time.monotonic()
        while True:
            await self._ask(QUESTIONS[number % len(QUESTIONS)])
            number += 1
            if self.answers[-1].error:
                await asyncio.sleep(0.2)

    async def _ask(self, question: str) -> None:
        begun, first = time.monotonic(), True
        stream = self.client.chat_stream(_messages(question), max_new_tokens=TOKENS, decoding="sequential")
        try:
            async with asyncio.timeout(GIVE_UP_S), stream:
                async for piece in stream:
                    if piece.token_ids:
                        self._came(len(piece.token_ids), first)
                        first = False
            result = stream.result
            right = result.token_ids == self.truth[question]
            self.answers.append(Ended(begun, time.monotonic(), right, repairs=len(result.repairs)))
        except (SwarmError, TimeoutError) as error:
            words = f"{type(error).__name__}: {error}"
            self._came(0, first)
            self.answers.append(Ended(begun, time.monotonic(), right=True, error=words))

    def _came(self, tokens: int, first: bool) -> None:
        now = time.monotonic()
        self.tokens += [now] * tokens
        self.intervals.append(Interval(self._since, now, first, len(self.answers), tokens))
        self._since = now

    def speed(self, windows: Sequence[Window]) -> float:
        """Tokens a second. Call it when the answers that ran in the windows have ended."""
        return tokens_per_s(self.intervals, windows, TOKENS)

    def token_times_s(self, windows: Sequence[Window]) -> tuple[float, float]:
        return token_times_s(self.intervals, windows)

    def ratio_range(self, quiet: Sequence[Window], attacked: Sequence[Window]) -> tuple[float, float]:
        return ratio_range(self.intervals, quiet, attacked, TOKENS)

    def rate(self, begin: float, end: float) -> float:
        """Tokens a second that came in one window."""
        return sum(begin <= at < end for at in self.tokens) / (end - begin)

    def recovered_after(self, begin: float, rate: float, window_s: float = 2.0) -> float | None:
        """Seconds from `begin` until a window of `window_s` starts with at least `rate` tokens a second."""
        now = time.monotonic()
        for at in [begin, *(token for token in self.tokens if token > begin)]:
            if at + window_s <= now and self.rate(at, at + window_s) >= rate:
                return at - begin
        return None


@dataclass(frozen=True)
class Look:
    """What a reader of the map saw: how many honest nodes serve, and if not all, why as far as it is known."""

    honest: int
    why: str = ""


async def watch_map(client: SwarmClient, honest: Collection[PeerId], looks: list[Look]) -> None:
    """Append what this reader sees, until cancelled."""
    while True:
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                snapshot = await client.snapshot()
            serving = {node.peer for node in snapshot.serving()} & set(honest)
            listed = sum(node.peer in honest for node in snapshot.nodes)
            looks.append(Look(len(serving), f"{listed} honest nodes of {len(snapshot.nodes)} are listed"))
        except (NetworkError, TimeoutError) as error:
            looks.append(Look(0, f"{type(error).__name__}: {error}"))
        await asyncio.sleep(READ_INTERVAL_S)


async def fresh_client(peers: list[str], within_s: float) -> float:
    """Seconds until a client that is new to the swarm has its first token; `within_s` if it never has."""
    begun = time.monotonic()
    asking = asyncio.create_task(_first_token(peers))
    try:
        await asyncio.wait({asking}, timeout=within_s)
        served = asking.done() and not asking.cancelled() and asking.exception() is None
        return asking.result() - begun if served else within_s
    finally:
        asking.cancel()
        await asyncio.wait({asking}, timeout=within_s)


async def _first_token(peers: list[str]) -> float:
    """When it came, by `time.monotonic()`; the client has left by then. Raises SwarmError."""
    came = float("inf")
    async with SwarmClient(peers=peers) as client:
        stream = client.chat_stream(_messages(QUESTIONS[0]), max_new_tokens=2, decoding="sequential")
        async with stream:
            async for piece in stream:
                if piece.token_ids:
                    came = min(came, time.monotonic())
    return came


def _messages(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]
