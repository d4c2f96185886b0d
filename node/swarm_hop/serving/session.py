"""A hop's state of one session, and the rules that its steps must keep.

Owns a session's route, its epoch and its count of committed tokens. Uses neither sockets nor tensors: a `PeerChannel`
is whatever can send a message, and KV blocks belong to the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from swarm import kv_token
from swarm.audit_messages import AuditQuery
from swarm.codec import DEFAULT_LIMITS, Buffer
from swarm.errors import ContextOverflow, InvalidRequest, NodeBusy, ProtocolError
from swarm.messages import (
    MAX_HOPS,
    MAX_SAMPLED_ROWS,
    AnyMessage,
    CloseSession,
    DropInFlight,
    OpenSession,
    ProgressQuery,
    ProgressReport,
    Reroute,
    Step,
)
from swarm.planner.scheduling.fair_shares import Share
from swarm.receipts import WorkReceipt
from swarm.tap_messages import CarriedTaps, EndDrafts, WireTaps
from swarm.types import KvSource, LayerSpan, PeerId, Sampling, layers_of_hop, tapped_row_bytes
from swarm_hop.drafting.carried_taps import CarriedBuffer, joined, taken_apart
from swarm_hop.drafting.tail_drafts import DraftedText
from swarm_hop.serving.token_history import StepTokens, TokenHistory
from swarm_kernels.models.row_layout import RowLayout
from swarm_kernels.runtime.taps import StepTaps
from swarm_kernels.sampling.grammar import GrammarState, TokenMask
from swarm_kernels.sampling.validate import validate_sampling

MAX_WAITING_STEPS = 64  # of one session; a client with more in flight ignores our replies
NO_SHARE = Share()
PREVIOUS_UPSTREAMS = 8  # that may send a late step without a protocol violation

OfOwnSession = DropInFlight | ProgressQuery | AuditQuery | CloseSession | EndDrafts | WorkReceipt
"""What only a session's client may send."""


class PeerChannel(Protocol):
    """The sending half of a connection."""

    @property
    def peer(self) -> PeerId: ...

    @property
    def remote(self) -> str:
        """The IP address that the peer was seen at, "" if it is unknown."""
        ...

    async def send(self, message: AnyMessage, body: Buffer = b"") -> None:
        """Raises ConnectionLost."""
        ...


@dataclass(frozen=True, slots=True)
class ActivationSpec:
    """The shapes this hop accepts: rows and bytes an element of the session's dtype, the vocabulary, and the most
    tokens of a text."""

    layout: RowLayout
    element_bytes: int
    vocab_size: int
    context_length: int

    @property
    def num_layers(self) -> int:
        return self.layout.num_layers

    def row_bytes(self, cut: int) -> int:
        """Of a row that layer `cut` reads."""
        return self.layout.width(cut) * self.element_bytes


@dataclass(frozen=True, slots=True)
class InboundStep:
    """A step as it came in, and once it is admitted what a tail's sampling needs of it: the tokens around its rows, and
    what a grammar allows after each row that is sampled from (none: everything)."""

    step: Step
    body: Buffer
    tokens: StepTokens | None = None
    masks: Sequence[TokenMask | None] = ()
    arrived_s: float = 0.0  # its frame, by `time.perf_counter`


@dataclass(slots=True, eq=False)
class HopSession:
    """One session on one hop. `key` names its blocks in the engine and is never reused."""

    id: bytes
    key: int
    client: PeerChannel
    upstream: PeerId
    downstream: PeerId  # "" on the tail; the client itself where it holds the layers after this hop
    span: LayerSpan
    rows: ActivationSpec
    max_tokens: int
    sampling: Sampling
    share: Share = NO_SHARE  # on whose account its steps run
    first: bool = False  # whether rows arrive as token ids: not from a client that holds the embedding itself
    reserved: int = 0  # tokens of KV memory; less than `max_tokens` once others needed the rest
    active_s: float = 0.0  # when its last step came, by the server's clock
    history: TokenHistory | None = None  # of a tail whose sampling depends on it
    grammar: GrammarState | None = None  # of `sampling.grammar`, once it is compiled; for one thread at a time
    num_medusa_candidates: int = 0  # of each Medusa head, with every sampled token
    claimed: Sequence[
        int
    ] = ()  # of an audit's replay: the tokens from position `claimed_from` on, as others sampled them
    claimed_from: int = 0
    replay_silent_until: int = 0  # rows at positions before it are neither forwarded nor answered
    epoch: int = 0  # the newest that has arrived; older steps are dropped
    ran_epoch: int = 0  # of the last step that ran here
    committed: int = 0
    received: int = 0  # number of the newest step, plus 1; `completed`: of the newest that ran
    completed: int = 0
    started_s: float | None = None  # when the step that is being computed started, by the event loop's clock
    next_hop: PeerChannel | None = None  # where outputs go; the client itself when it relays this edge
    stalled: bool = False  # the next hop is lost: steps are dropped until a Reroute names another
    notified_epoch: int = 0  # of the step for which the client was last notified of it
    sending: asyncio.Timeout | None = None  # around a send to the next hop
    kv_key: bytes = b""  # for the token of who may fetch its keys and values, once it is detached
    kv_source: KvSource | None = None
    taps: WireTaps | None = None  # that its client is sent, or the tail's drafter
    carried: CarriedBuffer = field(default_factory=CarriedBuffer)  # taps of steps to come, from the hops before
    drafted: DraftedText | None = None  # at a tail whose drafter it uses
    drafts_ended: bool = False
    acknowledged: bool = False  # its client has sent a receipt
    detached: bool = False  # it goes on elsewhere; its KV cache is kept for a transfer
    closed: bool = False
    previous_upstreams: deque[PeerId] = field(default_factory=lambda: deque(maxlen=PREVIOUS_UPSTREAMS))
    waiting: asyncio.Queue[InboundStep | Reroute] = field(default_factory=lambda: asyncio.Queue(MAX_WAITING_STEPS))

    @classmethod
    def of(
        cls, message: OpenSession, client: PeerChannel, key: int, rows: ActivationSpec, share: Share = NO_SHARE
    ) -> HopSession:
        """Raises ContextOverflow, InvalidRequest for sampling parameters out of range, ProtocolError for an impossible
        history or taps that are not here."""
        if len(message.history) > rows.context_length:  # at once: to copy and check the longest takes 20 ms
            raise ContextOverflow(f"a text of {len(message.history)} tokens for a context of {rows.context_length}")
        sampling, history = Sampling(), None
        if not message.downstream and message.sampling is not None:
            sampling = validate_sampling(message.sampling.to_sampling(), rows.vocab_size)
            if sampling.needs_history:
                history = TokenHistory(message.history, message.prompt_tokens, message.max_tokens, rows.vocab_size)
        if message.taps is not None:
            if rows.layout.streams > 1:
                raise InvalidRequest(f"hidden states of {rows.layout.streams} streams are no input of a drafter")
            is_tail = message.end == rows.num_layers and not message.downstream
            check_taps(message.taps, layers_of_hop(message.start, message.end), rows.num_layers, tail=is_tail)
        return cls(
            id=message.session,
            key=key,
            client=client,
            first=message.start == 0 and not message.upstream,
            upstream=message.upstream or client.peer,
            downstream=message.downstream,
            span=layers_of_hop(message.start, message.end),
            rows=rows,
            max_tokens=message.max_tokens,
            sampling=sampling,
            share=share,
            history=history,
            num_medusa_candidates=message.num_medusa_candidates,
            claimed=() if sampling.needs_history else message.claimed,
            claimed_from=message.prompt_tokens,
            replay_silent_until=message.replay_silent_until,
            epoch=message.epoch,
            ran_epoch=message.epoch,
            kv_key=message.kv_key,
            taps=message.taps,
            kv_source=KvSource(message.kv_source, message.kv_source_tokens, message.kv_source_token)
            if message.kv_source_tokens
            else None,
        )

    def start_from(self, cached: int) -> None:
        """Begin with `cached` tokens of the KV cache; the first step may roll some of them back."""
        self.committed = cached
        if cached:
            self.ran_epoch = self.epoch - 1

    @property
    def tail(self) -> bool:
        """Whether this hop samples the tokens."""
        return self.span.end == self.rows.num_layers and not self.downstream

    def claim(self, position: int) -> int | None:
        """The token that others are said to have sampled for `position`."""
        at = position - self.claimed_from
        return self.claimed[at] if 0 <= at < len(self.claimed) else None

    def allows(self, sender: PeerId) -> bool:
        """Whether `sender` may send steps."""
        return sender in (self.upstream, self.client.peer)

    def allows_fetch(self, heir: PeerId, token: bytes) -> bool:
        """Whether the client has named `heir` to go on with this session."""
        return kv_token.allows(self.kv_key, self.id, heir, token)

    def accept(self, sender: PeerId, message: Step | CarriedTaps, body: Buffer) -> None:
        """What comes from the hop before. Raises as `arrive` and `carry`."""
        if isinstance(message, CarriedTaps):
            self.carry(sender, message, body)
        else:
            self.arrive(sender, InboundStep(message, body, arrived_s=time.perf_counter()))

    def arrive(self, sender: PeerId, arrival: InboundStep) -> None:
        """Queue a step of `sender`. Raises ProtocolError when its form is wrong and NodeBusy when too many wait.

        A step of an older epoch is dropped silently: it was sent before its sender learned of the new one. So is one
        of a sender that was our upstream before a Reroute.
        """
        if not self.allows(sender):
            if sender in self.previous_upstreams:
                return
            raise ProtocolError("a step from a peer that is neither this session's upstream nor its client")
        check_form(arrival.step, len(memoryview(arrival.body)), self.first, self.span, self.rows)
        if arrival.step.epoch < self.epoch:
            return
        self.epoch = arrival.step.epoch
        self.received = max(self.received, arrival.step.step + 1)
        self._enqueue(arrival)

    def carry(self, sender: PeerId, message: CarriedTaps, body: Buffer) -> None:
        """Keep taps of a step to come. Raises ProtocolError for those that nobody asked for."""
        if not self.allows(sender) and sender not in self.previous_upstreams:
            raise ProtocolError("hidden states from a peer that is neither this session's upstream nor its client")
        if self.drafts_ended or not self.allows(sender) or message.epoch < self.epoch:
            return
        if self.taps is None or not self.taps.for_tail:
            raise ProtocolError("hidden states that this session does not carry")
        taps = taken_apart(message.layers, body, self.tap_row_bytes, self.span)
        if message.step >= self.completed:
            self.carried.keep(message.step, taps)

    @property
    def tap_row_bytes(self) -> int:
        return tapped_row_bytes(self.rows.layout.hidden_size, self.taps.bits if self.taps is not None else 8)

    def taps_for_tail(self, step: int, own: StepTaps) -> StepTaps:
        """Those of a step that has run, this hop's own with those before them. Forgets older ones."""
        return joined(self.carried.take(step), own, self.tap_row_bytes)

    def end_drafts(self) -> None:
        """Its client wants no more drafts of the tail; taps that are under way go nowhere."""
        self.drafts_ended, self.drafted = True, None
        self.carried = CarriedBuffer()
        if self.taps is not None and self.taps.for_tail:
            self.taps = None

    def redirect(self, message: Reroute) -> None:
        """Queue a new route. Raises ProtocolError when it does not fit this hop, NodeBusy when too much waits."""
        if bool(message.downstream) == self.tail:
            raise ProtocolError("a hop has a next one unless it holds the last layer")
        if self.tail and message.replay:
            raise ProtocolError("there is no hop after the last layer to replay to")
        if self.sending is not None and not self.sending.expired():
            self.sending.reschedule(asyncio.get_running_loop().time())  # its receiver was replaced
        self.epoch = max(self.epoch, message.epoch)
        self._enqueue(message)

    def _enqueue(self, item: InboundStep | Reroute) -> None:
        try:
            self.waiting.put_nowait(item)
        except asyncio.QueueFull:
            raise NodeBusy(f"more than {MAX_WAITING_STEPS} steps of this session wait here", self.client.peer) from None

    async def next(self) -> InboundStep | Reroute:
        """The next item, in order of arrival: a step of the current epoch, or a new route."""
        while True:
            item = await self.waiting.get()
            if isinstance(item, Reroute) or item.step.epoch >= self.epoch:
                return item

    def acknowledge(self) -> None:
        """Its client has sent a receipt. Raises ProtocolError the second time."""
        if self.acknowledged:
            raise ProtocolError("a second receipt for one session")
        self.acknowledged = True

    def progress(self) -> ProgressReport:
        """How many steps have come and were completed, and how long the current one has been computing."""
        now = asyncio.get_running_loop().time()
        return ProgressReport(
            self.id, self.received, self.completed, 0.0 if self.started_s is None else (now - self.started_s) * 1e3
        )

    def admit(self, step: Step) -> Step:
        """Check a step's turn, count what it commits, and return it as this hop has to run it.

        Hops drop the steps of an older epoch, each when it learns of the new one, so they may have committed different
        numbers of tokens; `committed_before` and `commit_slots` are those of the hop that has committed the fewest. A
        hop that is ahead skips the commits it has made. One that is ahead of all that the step commits rolls back, and
        only where an epoch begins: its caller sees that by a `committed_before` below the `committed` of before.

        Raises ProtocolError and ContextOverflow.
        """
        held, target = self.committed, step.committed_before + len(step.commit_slots)
        if held < step.committed_before:
            raise ProtocolError(
                f"step {step.step} begins after {step.committed_before} committed tokens and this hop holds {held}"
            )
        if held > target and step.epoch <= self.ran_epoch:
            raise ProtocolError(f"step {step.step} commits up to {target} tokens and this hop holds {held}")
        after = target + step.causal_rows
        if after > self.max_tokens:
            raise ContextOverflow(f"step {step.step} makes {after} tokens and the session reserved {self.max_tokens}")
        if (after < self.replay_silent_until and step.slots) or target < self.replay_silent_until < after:
            raise ProtocolError(f"step {step.step} has rows both before and after position {self.replay_silent_until}")
        self.committed, self.ran_epoch = after, step.epoch
        base = min(held, target)
        if base == step.committed_before:
            return step
        return msgspec.structs.replace(
            step, committed_before=base, commit_slots=step.commit_slots[base - step.committed_before :]
        )

    def is_replay(self, step: Step) -> bool:
        """Whether a step that has run only rebuilt what the hops behind hold already."""
        return not step.slots and self.committed <= self.replay_silent_until

    def prune(self, message: DropInFlight) -> None:
        """Steps of an epoch before the message's are dropped when their turn comes."""
        self.epoch = max(self.epoch, message.epoch)
        if self.history is not None:
            self.history.prune(message.slots)


def check_form(step: Step, body_bytes: int, first: bool, span: LayerSpan, rows: ActivationSpec) -> None:
    """Check what does not depend on the session's state. Raises ProtocolError."""
    n = step.rows
    if n == 0:
        raise ProtocolError(f"step {step.step} has no rows")
    # What we forward must be within the bounds of the next hop, or it would count a violation against us.
    row_bytes = rows.row_bytes(span.start)
    if n * max(row_bytes, rows.row_bytes(span.end)) > DEFAULT_LIMITS.body:
        raise ProtocolError(f"step {step.step} has {n} rows, more than one frame holds")
    if len(step.trace) >= MAX_HOPS:
        raise ProtocolError(f"step {step.step} claims to have passed {len(step.trace)} hops")
    if step.sample_all and step.causal_rows > MAX_SAMPLED_ROWS:
        raise ProtocolError(f"step {step.step} samples after {step.causal_rows} rows; {MAX_SAMPLED_ROWS} are the most")
    if len(step.parents) != len(step.slots):
        raise ProtocolError(f"step {step.step} has {len(step.parents)} parents for {len(step.slots)} slots")
    if len(set(step.slots)) != len(step.slots) or len(set(step.commit_slots)) != len(step.commit_slots):
        raise ProtocolError(f"step {step.step} names a tree slot twice")
    if first:
        if body_bytes or len(step.tokens) != n:
            raise ProtocolError(f"step {step.step} has {len(step.tokens)} token ids for {n} rows on the first hop")
    else:
        expected = n * row_bytes
        if body_bytes != expected:
            raise ProtocolError(f"step {step.step} has a body of {body_bytes} bytes where {n} rows take {expected}")
        if step.tokens and len(step.tokens) != n:
            raise ProtocolError(f"step {step.step} has {len(step.tokens)} token ids for {n} rows")
    if max(step.tokens, default=0) >= rows.vocab_size:
        raise ProtocolError(f"step {step.step} has a token id beyond the vocabulary of {rows.vocab_size}")


def check_taps(taps: WireTaps, span: LayerSpan, num_layers: int, *, tail: bool) -> None:
    """Raises ProtocolError unless they are different, ascending and those of the hop with the layers `span`, and go
    where a hop such as this may send them."""
    if taps.onward if tail else taps.draft is not None:
        raise ProtocolError("taps go onward to the tail, which alone drafts")
    if not taps.layers and taps.for_tail:
        return
    last = span.end if span.end == num_layers else span.end - 1
    ordered = taps.layers == sorted(set(taps.layers)) != []
    if not ordered or not span.start <= taps.layers[0] <= taps.layers[-1] <= last:
        raise ProtocolError(f"taps {taps.layers} of a hop that has those from {span.start} to {last}")
