"""Audits finished answers: asks the hops what went through them, lets other nodes compute the same text, and compares.

Owns which answers are audited, and what a client concludes: it routes around a hop that two others contradict. Runs
beside the generations, in tasks of its own. The comparison is `planner.auditing`'s.

The audit is drawn when the answer is complete: by then every row has been sent, and the next hop, or this client, holds
what a hop would have to deny. So it does not matter who recognizes a replay.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from swarm.config import Limits
from swarm.errors import NetworkError, NoRoute, ProtocolError
from swarm.net.base.tasks import TaskSet
from swarm.planner.auditing.policy import POLICY, AuditPolicy
from swarm.planner.auditing.verdict import (
    Comparison,
    Contradiction,
    HopReport,
    blame,
    compare,
    deviations,
    inconsistency,
    same_inputs,
)
from swarm.receipts import WorkReceipt
from swarm.types import Chain, Hop, ModelId, PeerId
from swarm_client.auditing.replay import replay
from swarm_client.auditing.reports import Evidence, SignedReport, hop_report, signed_report
from swarm_client.auditing.result import AuditResult
from swarm_client.home.ends import HomeEnds
from swarm_client.home.local_layers import foreign, is_home
from swarm_client.home.trusted_ends import TrustedEnds
from swarm_client.network.connection import ClientNetwork
from swarm_client.routing.prefix_locations import PrefixLocations
from swarm_client.routing.router import ChainRouter
from swarm_client.session.hop_links import HopFailed
from swarm_client.session.inference_session import InferenceSession
from swarm_client.session.session_messages import SessionSpec
from swarm_client.trust.failures import AuditFailed
from swarm_kernels.audit.row_distance import wire_distance
from swarm_kernels.audit.wire_rows import row_bytes
from swarm_kernels.models.row_layout import RowLayout

logger = logging.getLogger(__name__)

KEPT_FINDINGS = 16
REMEMBERED = 4096  # hops, by how many audits they have had


@dataclass(frozen=True, slots=True)
class _Answer:
    """What is audited: `text`, of which the first `prompt` tokens are the prompt, and how it was asked for.

    `positions`: of the rows that the hops are to send in full. `drafted`: some rows came as drafts, computed in another
    order than in a replay.
    """

    text: tuple[int, ...]
    prompt: int
    spec: SessionSpec
    positions: tuple[int, ...]
    drafted: bool

    @property
    def model(self) -> ModelId:
        return ModelId(self.spec.model, self.spec.weight_hash, self.spec.dtype)


@dataclass(frozen=True, slots=True)
class _Run:
    """One chain's reports on an answer."""

    chain: Chain
    signed: tuple[SignedReport, ...]
    reports: list[HopReport]
    replayed: bool = False


@dataclass(slots=True)
class Auditor:
    """One a client. `rate`: of the answers, 0 for none. `draw`: random numbers in [0, 1), which nobody can foresee."""

    router: ChainRouter
    network: ClientNetwork
    limits: Limits
    layout: RowLayout
    context_length: int
    rate: float
    policy: AuditPolicy = POLICY
    draw: Callable[[], float] = random.SystemRandom().random
    prefix_locations: PrefixLocations = field(default_factory=PrefixLocations)
    ends: HomeEnds | TrustedEnds | None = None  # the hops at this client itself, which count as the client; or nodes
    _findings: deque[AuditResult] = field(default_factory=lambda: deque(maxlen=KEPT_FINDINGS))
    _convicted: OrderedDict[PeerId, float] = field(default_factory=OrderedDict)  # -> when, loop time
    _trials: OrderedDict[PeerId, int] = field(default_factory=OrderedDict)  # audits of hops
    _tasks: TaskSet = field(default_factory=lambda: TaskSet("audits"))

    @property
    def home(self) -> HomeEnds | None:
        return self.ends if isinstance(self.ends, HomeEnds) else None

    async def close(self) -> None:
        await self._tasks.close()

    def convicted(self, peers: Collection[PeerId], since: float) -> PeerId | None:
        """One of `peers` that failed an audit after `since` (loop time): an answer that it takes part in is spoiled."""
        return next((peer for peer in peers if self._convicted.get(peer, -math.inf) > since), None)

    def take_findings(self) -> list[AuditResult]:
        """Those that nobody has taken yet."""
        found = list(self._findings)
        self._findings.clear()
        return found

    def wants(self, session: InferenceSession, text: Sequence[int], prompt: int) -> bool:
        """Whether to audit this answer. Only sessions that are whole can be."""
        if not self.rate or session.failed_hops or len(text) - prompt < self.policy.min_answer:
            return False
        return any(self._is_new(hop.peer) for hop in foreign(session.chain.hops)) or self.draw() < self.rate

    def _is_new(self, peer: PeerId) -> bool:
        """No audit has confirmed it yet, in this run or an earlier one, and not too many have tried."""
        if self.router.memory.of(peer).audits_passed:
            return False
        return self._trials.get(peer, 0) < self.policy.max_trials

    def start(
        self,
        session: InferenceSession,
        text: Sequence[int],
        prompt: int,
        *,
        drafted: bool,
        receipt: Callable[[bytes, Hop], WorkReceipt] | None = None,
    ) -> asyncio.Task[AuditResult]:
        """Take over a session whose answer is complete: it is closed, with receipts, once its hops have reported."""
        for peer in (hop.peer for hop in foreign(session.chain.hops)):
            self._note(peer, self._trials.get(peer, 0) + 1)
        close = partial(session.close, tuple(text), receipt)
        return self._tasks.start(self._audit(session, close, tuple(text), prompt, drafted), "audit")

    async def _audit(
        self,
        session: InferenceSession,
        close: Callable[[], Awaitable[None]],
        text: tuple[int, ...],
        prompt: int,
        drafted: bool,
    ) -> AuditResult:
        policy = self.policy
        short = text[: min(policy.max_text, self.context_length)]
        try:
            async with asyncio.timeout(policy.timeout_s):
                try:
                    if prompt + policy.min_answer > len(short):
                        return AuditResult(reason="the prompt alone is longer than what is replayed")
                    answer = self._answer(session.spec, short, prompt, drafted)
                    audited = await self._report(session, answer)
                finally:
                    await close()
                found = await self._examine(audited, answer)
                if found.liars or found.disputed:
                    self._findings.append(found)
                return found
        except HopFailed as failed:  # also one that will not report
            self.router.block(failed.peer, failed.cause)
            return AuditResult(reason=f"{failed.peer}: {failed}")
        except (NetworkError, NoRoute, TimeoutError) as error:
            logger.info("an answer was not audited: %s", error)
            return AuditResult(reason=str(error) or "the replay took too long")

    def _answer(self, spec: SessionSpec, text: tuple[int, ...], prompt: int, drafted: bool) -> _Answer:
        drawn = range(min(self.policy.sink_tokens, len(text) - 2), len(text) - 1)
        positions = {drawn[int(self.draw() * len(drawn))] for _ in range(self.policy.rows)}
        sampling = replace(spec.sampling, logprobs=None, prompt_logprobs=None)
        spec = replace(
            spec,
            max_tokens=len(text),
            num_medusa_candidates=0,
            sampling=sampling,
            prompt_tokens=prompt,
            claimed=text[prompt:],
        )
        return _Answer(text, prompt, spec, tuple(sorted(positions)), drafted)

    async def _examine(self, audited: _Run, answer: _Answer) -> AuditResult:
        """Raises NetworkError, NoRoute."""
        wrong = inconsistency(audited.reports, answer.text)
        if wrong is not None:
            evidence = Evidence(answer.model, answer.text, (audited.signed,))
            peers = tuple(peer for peer in wrong.peers if not is_home(peer))
            if len(peers) != 1:  # one of them lies, and nobody else has seen this edge
                return AuditResult(disputed=peers, position=wrong.position, evidence=evidence)
            return self._leave(peers, "it denies what it was sent, or has sent", wrong.position, evidence)
        around = await self.router.route_around(
            audited.chain, sorted(audited.chain.peers, key=lambda _: self.draw()), answer.spec.max_tokens
        )
        other = await self._replay(around, answer)
        comparisons = self._compare(audited, other, answer)
        disputes = deviations(comparisons)
        if not disputes:
            return self._confirm(audited, other, comparisons)
        runs = [audited, other]
        for found in disputes:
            apart = f"{found.agreement.value}, {found.distance:.3f} apart"
            logger.warning("audit: %s and %s do not agree (%s)", found.peers, found.other_peers, apart)
            guilty = await self._decide(found, runs, answer)
            if len(guilty) == 1:
                evidence = Evidence(answer.model, answer.text, tuple(run.signed for run in runs))
                return self._leave(guilty, f"two other nodes contradict it ({apart})", found.position, evidence)
        disputed = tuple(sorted({*disputes[0].peers, *disputes[0].other_peers}))
        evidence = Evidence(answer.model, answer.text, tuple(run.signed for run in runs))
        return AuditResult(disputed=disputed, position=disputes[0].position, evidence=evidence)

    async def _decide(self, found: Comparison, runs: list[_Run], answer: _Answer) -> tuple[PeerId, ...]:
        """Who is wrong in a dispute of the first two of `runs`, to which the further ones are added; () if nobody
        decides.

        The third chain is the audited one with others in place of those that are disputed, so that these get the same
        inputs. They do not if the rows before them came as drafts, or depend on how they are batched: then the audited
        chain itself computes the text once more, and is held to that.
        """
        audited, other = runs[:2]
        avoid = set(other.chain.peers).difference(audited.chain.peers)
        try:
            changed = await self.router.replace_hops(audited.chain, found.peers, avoid, answer.spec.max_tokens)
            third = await self._replay(changed, answer)
            runs.append(third)
            ours = audited
            if not same_inputs(ours.reports, third.reports, found.start):
                ours = await self._replay(audited.chain, answer)
                runs.append(ours)
        except (NetworkError, NoRoute) as error:
            logger.info("no third replica decides: %s", error)
            return ()
        with_ours, with_theirs = (
            Contradiction(self._compare(one, third, answer), same_inputs(one.reports, third.reports, found.start))
            for one in (ours, other)
        )
        return blame(found, with_ours, with_theirs)

    def _confirm(self, audited: _Run, other: _Run, comparisons: Sequence[Comparison]) -> AuditResult:
        """Hops that are in both chains have confirmed nothing."""
        replayed = set(other.chain.peers)
        checked = sorted({peer for found in comparisons for peer in found.peers} - replayed)
        for peer in checked:
            self.router.audited(peer, passed=True)
        return AuditResult(checked=tuple(checked))

    def _note(self, peer: PeerId, trials: int) -> None:
        self._trials.pop(peer, None)
        self._trials[peer] = trials
        if len(self._trials) > REMEMBERED:
            self._trials.popitem(last=False)

    def _leave(self, liars: tuple[PeerId, ...], why: str, position: int, evidence: Evidence) -> AuditResult:
        for peer in liars:
            logger.warning("node %s failed an audit: %s", peer, why)
            self.router.block(peer, AuditFailed(why))
            self.router.audited(peer, passed=False)
            self._trials.pop(peer, None)
            self._convicted[peer] = asyncio.get_running_loop().time()
            self._convicted.move_to_end(peer)
            if len(self._convicted) > REMEMBERED:
                self._convicted.popitem(last=False)
        self.prefix_locations.lost(liars)  # what hops behind them cached came from their rows
        return AuditResult(liars=liars, position=position, reason=why, evidence=evidence)

    def _compare(self, one: _Run, other: _Run, answer: _Answer) -> list[Comparison]:
        def distance(layer: int, a: bytes, b: bytes) -> float:
            return wire_distance(a, b, answer.spec.dtype, self.layout.parts(layer))

        drafted = answer.drafted and not (one.replayed and other.replayed)
        home = self.home.layers if self.home is not None else None
        return compare(
            [report for report in one.reports if not is_home(report.peer)],
            [report for report in other.reports if not is_home(report.peer)],
            self.layout.num_layers + (home is not None),  # no tail: the client samples itself
            distance,
            self.policy,
            dtype=answer.spec.dtype,
            drafted=drafted,
            first_layer=0 if home is None else home.first,
        )

    async def _replay(self, chain: Chain, answer: _Answer) -> _Run:
        """Compute the answer along a chain. Raises NetworkError."""
        nodes = {node.peer: node for node in (await self.router.snapshot()).nodes}
        network = self.network
        prompt = answer.text[: answer.prompt]
        session = await InferenceSession.open(
            chain, nodes, answer.spec, prompt, network.pool, network.demux, self.limits, ends=self.ends
        )
        try:
            await replay(session, answer.text, answer.prompt)
            run = replace(await self._report(session, answer), replayed=True)
            told = self.home is not None or run.signed[-1].message.margins
            if not (told or answer.spec.sampling.needs_history):
                raise session.mark_failed(
                    chain.peers[-1], ProtocolError("it does not say how likely the answer's tokens are")
                )
            return run
        finally:
            await session.close()

    async def _report(self, session: InferenceSession, answer: _Answer) -> _Run:
        """Raises HopFailed, also for a report that cannot be right."""
        signed: list[SignedReport] = []
        reports: list[HopReport] = []
        for hop, reply in zip(session.chain.hops, await session.audit(answer.positions), strict=True):
            try:
                signed.append(signed_report(hop, reply, answer.positions))
                size = row_bytes(self.layout.width(hop.end), answer.spec.dtype)
                reports.append(hop_report(signed[-1], size, answer.text))
            except ProtocolError as error:
                raise session.mark_failed(hop.peer, error) from None
        others = tuple(one for one in signed if not is_home(one.peer))
        return _Run(session.chain, others, reports)
