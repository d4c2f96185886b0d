"""The wire protocol: one msgspec Struct a message. Bodies (hidden states) follow as raw bytes, see `codec`.

Owns the names, fields and size bounds of all messages between peers. Does not know sockets or tensors.

    client -> hop   OpenSession, Reroute, Step (to the first hop), DropInFlight, ProgressQuery, AuditQuery,
                    EndDrafts, CloseSession, Ping
    hop -> hop      Step (body: hidden states), CarriedTaps, SessionFailed, KvFetch, KvBlocks (keys and values), Ping
    hop -> client   SessionOpened, SessionFailed, StepResult (from the tail), Step (on an edge that the client relays),
                    ProgressReport, AuditReport, TapRows, TailDraft, Pong
    hop -> experts  ExpertRows (body: rows), answered with ExpertOutputs or ExpertsRefused (`expert_messages`)
    any -> hop      RecordsQuery, answered with Records (`gossip_messages`)

Any of them may be followed by PathSwitch, when their connection migrates to another path.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from swarm.audit_messages import MAX_CLAIMED, AuditQuery, AuditReport
from swarm.block_hash import HASH_BYTES
from swarm.expert_messages import ExpertOutputs, ExpertRows, ExpertsRefused
from swarm.gossip_messages import Records, RecordsQuery
from swarm.kv_token import KEY_BYTES, TOKEN_BYTES
from swarm.receipts import WorkReceipt
from swarm.tap_messages import DraftMessages, TapRows, WireTaps
from swarm.types import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_SLOTS, Grammar, Sampling, TokenLogprobs
from swarm.wire_types import Count, Message, Serial, SessionId, Text, TokenId

MAX_ROWS = 1024  # new tree nodes in one step
MAX_SAMPLED_ROWS = 128  # causal rows of one step that are sampled after
MAX_HISTORY = 1 << 18  # token ids in one `OpenSession`
MAX_HOPS = 256
MAX_NEG_MICRONATS = (1 << 31) - 1  # of a log-probability
MAX_MEDUSA_HEADS = 16  # at a tail
MAX_MEDUSA_CANDIDATES = 8  # of one head for one row
MAX_KV_BLOCKS = 4096  # in one frame
MAX_BLOCK_HASHES = 4096  # of one session

Bias = Annotated[float, Meta(ge=-1e4, le=1e4)]
NegMicronats = Annotated[int, Meta(ge=0, le=MAX_NEG_MICRONATS)]
Slot = Annotated[int, Meta(ge=0, lt=MAX_SLOTS)]
Parent = Annotated[int, Meta(ge=-1, lt=MAX_SLOTS)]
SessionCount = Annotated[int, Meta(ge=1, le=1 << 16)]
BlockHashes = Annotated[
    list[Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]], Meta(max_length=MAX_BLOCK_HASHES)
]
KvKey = Annotated[bytes, Meta(max_length=KEY_BYTES)]
KvToken = Annotated[bytes, Meta(max_length=TOKEN_BYTES)]
Slots = Annotated[list[Slot], Meta(max_length=MAX_SLOTS)]


class WireSampling(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`types.Sampling` with bounds, as it comes from an untrusted peer."""

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] = 1.0
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-100.0, le=100.0)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-100.0, le=100.0)] = 0.0
    logit_bias: Annotated[list[tuple[TokenId, Bias]], Meta(max_length=MAX_LOGIT_BIAS)] = []
    grammar: Grammar | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    @classmethod
    def of(cls, sampling: Sampling) -> WireSampling:
        values = {name: getattr(sampling, name) for name in cls.__struct_fields__}
        return cls(**{**values, "logit_bias": list(sampling.logit_bias)})

    def to_sampling(self) -> Sampling:
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return Sampling(**{**values, "logit_bias": tuple(self.logit_bias)})


class WireLogprobs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`types.TokenLogprobs` without the token: -1e6 ln p of it, then ids and -1e6 ln p of the likeliest ones."""

    neg_micronats: NegMicronats
    top_ids: Annotated[list[TokenId], Meta(max_length=MAX_LOGPROBS)] = []
    top_neg_micronats: Annotated[list[NegMicronats], Meta(max_length=MAX_LOGPROBS)] = []

    @classmethod
    def of(cls, logprobs: TokenLogprobs) -> WireLogprobs:
        return cls(
            _neg_micronats(logprobs.logprob),
            [token for token, _ in logprobs.top],
            [_neg_micronats(value) for _, value in logprobs.top],
        )

    def to_logprobs(self, token: int) -> TokenLogprobs:
        top = zip(self.top_ids, self.top_neg_micronats, strict=False)
        return TokenLogprobs(token, -self.neg_micronats / 1e6, tuple((other, -value / 1e6) for other, value in top))


def _neg_micronats(logprob: float) -> int:
    return round(max(0.0, min(float(MAX_NEG_MICRONATS), -logprob * 1e6)))  # a logit of -inf is the largest


class OpenSession(Message, frozen=True, tag="open"):
    """Start a session on one hop. The sender becomes the session's client; only it may drop steps or close.

    `max_tokens`: KV tokens to reserve a layer. `upstream`: the peer that will send the steps, "" for the client itself.
    `downstream`: the peer to forward outputs to, "" on the tail. `sampling` goes to the tail only, and if it needs them
    (`Sampling.needs_history`) `history`, all tokens so far, of which the first `prompt_tokens` are the prompt.
    `epoch`: steps of an older one are dropped; the reply repeats it.

    `replay_silent_until`: for the replacement of a lost hop. Rows at positions before it are computed and logged, but
    neither forwarded (the hops downstream have them) nor answered with a StepResult.

    `block_hashes`: of the text (`swarm.block_hash`), salted by the hops before this one. A hop that has cached a prefix
    for this client shares its blocks.

    `num_medusa_candidates`: candidates of each of its Medusa heads, if any, that the tail sends with every token.

    `claimed`: of an audit's replay, for the tail: the tokens after the first `prompt_tokens`, as others sampled them.

    `kv_source`: a node that has left this session, with the same layers, and still holds its first `kv_source_tokens`
    tokens. The hop fetches them from there if it can, by `kv_source_token`; `SessionOpened.cached_tokens` is the
    outcome. `kv_key`: of this hop, for the tokens of those who may fetch from it once it has left (`kv_token`).

    `taps`: hidden states that are wanted of this hop. Peers are named by id alone: where they are dialed is in
    their own records, which the hop reads itself.
    """

    max_header: ClassVar[int] = 2 << 20  # a history of MAX_HISTORY takes 1.3 MB, and a grammar up to 0.25 MB

    session: SessionId
    model: Text
    weight_hash: Text
    dtype: Annotated[str, Meta(max_length=16)]
    start: Count
    end: Count
    max_tokens: Count
    upstream: Annotated[str, Meta(max_length=128)] = ""
    downstream: Annotated[str, Meta(max_length=128)] = ""
    sampling: WireSampling | None = None
    history: Annotated[list[TokenId], Meta(max_length=MAX_HISTORY)] = []
    prompt_tokens: Count = 0
    epoch: Serial = 0
    replay_silent_until: Count = 0
    block_hashes: BlockHashes = []
    num_medusa_candidates: Annotated[int, Meta(ge=0, le=MAX_MEDUSA_CANDIDATES)] = 0
    kv_source: Annotated[str, Meta(max_length=128)] = ""
    kv_source_tokens: Count = 0
    kv_source_token: KvToken = b""
    kv_key: KvKey = b""
    claimed: Annotated[list[TokenId], Meta(max_length=MAX_CLAIMED)] = []
    taps: WireTaps | None = None


class SessionOpened(Message, frozen=True, tag="opened"):
    """The hop is ready, or has applied its new route. `epoch` is that of the OpenSession or Reroute which this answers.

    `client_relays_next_edge`: it cannot reach its downstream; the client must relay that edge. `cached_tokens`: how
    many of the first tokens it has in its KV cache, from a shared prefix or a KV transfer. The first step may start at
    any position up to there.
    """

    max_header: ClassVar[int] = 256

    session: SessionId
    client_relays_next_edge: bool = False
    epoch: Serial = 0
    cached_tokens: Count = 0


class Reroute(Message, frozen=True, tag="reroute"):
    """To a surviving hop next to a replaced one: take steps from `upstream`, send outputs to `downstream`.

    Handled in order among the session's steps, but steps of an epoch before `epoch` are dropped from its arrival on.
    Answered with SessionOpened; then the outputs for the first `replay` committed tokens are sent to `downstream` as
    causal steps of `epoch` that sample nothing, before any other step. SessionFailed with `log_lost` if they were
    evicted.
    """

    max_header: ClassVar[int] = 8 << 10

    session: SessionId
    epoch: Serial
    upstream: Annotated[str, Meta(max_length=128)] = ""
    downstream: Annotated[str, Meta(max_length=128)] = ""
    replay: Count = 0


class Step(Message, frozen=True, tag="step"):
    """New rows for one session: prompt or committed tokens, draft-tree nodes, or both.

    First the tree slots in `commit_slots` move, in order, into the committed KV blocks. Then come the new rows:
    `causal_rows` rows that are committed on arrival, from position `committed_before + len(commit_slots)` on, then one
    row for each of `parents` / `slots`: tree nodes whose parent is a tree slot, or -1 for the last committed token.
    `tokens` has an id for every row on the first hop. On later hops the body is a `[rows, hidden]` tensor in the
    session's dtype, and `tokens` is empty, or has all ids if `forward_tokens` says that the tail needs them: the
    penalties and the grammar of a tree row depend on the draft tokens above it.

    `committed_before`: committed tokens before this step. A hop with fewer refuses it. A hop with more has run steps
    that others dropped: it skips those of `commit_slots` that it has committed, and if it has more than
    `committed_before + len(commit_slots)` it truncates to that, provided that the step begins a new epoch. `sample`:
    the tail samples a token after the last causal row and after each tree row. `trace`: (queue ms, compute ms) of each
    hop so far. `sample_all`: it samples after every causal row (at most MAX_SAMPLED_ROWS) unless its sampling needs the
    tokens before it. `active_sessions`: how many sessions the busiest of these hops decodes for now, including this.
    """

    max_header: ClassVar[int] = 64 << 10

    session: SessionId
    epoch: Serial
    step: Serial
    committed_before: Count
    causal_rows: Annotated[int, Meta(ge=0, le=MAX_ROWS)]
    sample: bool = True
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_ROWS)] = []
    parents: Annotated[list[Parent], Meta(max_length=MAX_ROWS)] = []
    slots: Annotated[list[Slot], Meta(max_length=MAX_ROWS)] = []
    commit_slots: Slots = []
    trace: Annotated[list[tuple[float, float]], Meta(max_length=MAX_HOPS)] = []
    active_sessions: SessionCount = 1
    forward_tokens: bool = False
    sample_all: bool = False

    @property
    def rows(self) -> int:
        return self.causal_rows + len(self.slots)


class StepResult(Message, frozen=True, tag="result"):
    """From the tail: the tokens sampled in step `step`, if it samples: after its last causal row, if any, then after
    each of its tree rows in order. The client matches them with its draft tokens; the tail does not verify.

    `medusa_ids`: for each of these tokens, the candidates of `num_medusa_heads` Medusa heads for 1, 2, ... positions
    after it: `OpenSession.num_medusa_candidates` ids of each head, likeliest first; `medusa_neg_logprob_centinats`:
    -100 ln of their probabilities.

    `logprobs`: of each of `tokens`, if `Sampling.logprobs` asks for them. `prompt_logprobs`: of the tokens after each
    causal row that lies in the prompt, if asked for; also in results of steps that sample nothing.
    """

    max_header: ClassVar[int] = 1 << 20

    session: SessionId
    epoch: Serial
    step: Serial
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_ROWS)] = []
    trace: Annotated[list[tuple[float, float]], Meta(max_length=MAX_HOPS)] = []
    active_sessions: SessionCount = 1
    num_medusa_heads: Annotated[int, Meta(ge=0, le=MAX_MEDUSA_HEADS)] = 0
    medusa_ids: Annotated[list[TokenId], Meta(max_length=MAX_ROWS * MAX_MEDUSA_CANDIDATES)] = []
    medusa_neg_logprob_centinats: Annotated[
        list[Annotated[int, Meta(ge=0, le=1 << 14)]], Meta(max_length=MAX_ROWS * MAX_MEDUSA_CANDIDATES)
    ] = []
    logprobs: Annotated[list[WireLogprobs], Meta(max_length=MAX_ROWS)] = []
    prompt_logprobs: Annotated[list[WireLogprobs], Meta(max_length=MAX_ROWS)] = []


class DropInFlight(Message, frozen=True, tag="drop_in_flight"):
    """Out of band: drop these tree slots, and queued steps of an epoch before `epoch`."""

    max_header: ClassVar[int] = 16 << 10

    session: SessionId
    epoch: Serial
    slots: Slots = []


class ProgressQuery(Message, frozen=True, tag="progress_query"):
    """Out of band: asks for the progress of this session's steps. Answered at once with ProgressReport."""

    max_header: ClassVar[int] = 64

    session: SessionId


class ProgressReport(Message, frozen=True, tag="progress_report"):
    """The newest step received, and the newest computed and forwarded: their numbers plus 1, 0 if none.

    `compute_ms`: how long the step now being computed has been running, 0 if none is.
    """

    max_header: ClassVar[int] = 128

    session: SessionId
    received: Serial
    completed: Serial
    compute_ms: Annotated[float, Meta(ge=0.0)] = 0.0


class CloseSession(Message, frozen=True, tag="close"):
    """The client is done with the session; the hop frees its KV blocks.

    `retain_prefix`: block hashes of all that was computed, salted as in OpenSession; the hop may keep it for sessions
    with the same prefix. Empty if the rows did not all come from the same hops.
    """

    max_header: ClassVar[int] = 64 << 10

    session: SessionId
    retain_prefix: BlockHashes = []


class SessionFailed(Message, frozen=True, tag="failed"):
    """This session cannot continue here. `error` is a code of `swarm.errors`, `detail` a sentence for people.

    `unreachable_next_hop`: the sender has lost this next hop of the session; it keeps its KV cache and waits for a
    Reroute. Without it the session is gone from the sender, except that it keeps the keys and values of the first
    `kv_retained_tokens` tokens for a few seconds, for a KV transfer (`OpenSession.kv_source`) or until CloseSession.
    `epoch`: the session's at the sender, so that an outdated report is recognized.
    """

    max_header: ClassVar[int] = 8 << 10

    session: SessionId
    error: Annotated[str, Meta(max_length=64)]
    detail: Text
    retry_after_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 0.0
    unreachable_next_hop: Annotated[str, Meta(max_length=128)] = ""
    epoch: Serial = 0
    kv_retained_tokens: Count = 0


class KvFetch(Message, frozen=True, tag="kv_fetch"):
    """To a node that has left a session: request `num_blocks` blocks, from `first_block` on, of its first `tokens`
    tokens in layer `layer` of the model. Authorized by `token`, which the session's client made for this fetcher
    (`kv_token`). Answered with KvBlocks or SessionFailed.

    A block holds 16 tokens: `[kv_heads, head_dim, 16]` for keys and `[kv_heads, 16, head_dim]` for values, as in
    memory; the rest of the last one is zero. Of a layer with a recurrent state, a block is 64 KiB of it
    (`swarm_kernels.kvcache.layer_transfer`).
    """

    max_header: ClassVar[int] = 256

    session: SessionId
    layer: Count
    first_block: Count
    num_blocks: Annotated[int, Meta(ge=1, le=MAX_KV_BLOCKS)]
    tokens: Count
    token: KvToken = b""


class KvBlocks(Message, frozen=True, tag="kv_blocks"):
    """The body has the keys of all requested blocks, then their values; or the requested part of a recurrent state."""

    max_header: ClassVar[int] = 128

    session: SessionId
    layer: Count
    first_block: Count


class Ping(Message, frozen=True, tag="ping"):
    """Answered at once with the same nonce; half the round-trip time is ρ."""

    max_header: ClassVar[int] = 64

    nonce: Serial


class Pong(Message, frozen=True, tag="pong"):
    max_header: ClassVar[int] = 64
    nonce: Serial


class PathSwitch(Message, frozen=True, tag="path_switch"):
    """The last frame of one direction of a connection that migrates to another path, and the first on the new path that
    its dialer opened; see `net.pool.migratable_link`. Peers match the paths by the nonce."""

    max_header: ClassVar[int] = 64

    nonce: Serial


OutsideSessions = Ping | Pong | PathSwitch | RecordsQuery | Records | ExpertRows | ExpertOutputs | ExpertsRefused
"""Messages without a session id."""

AnyMessage = (
    OpenSession
    | SessionOpened
    | Reroute
    | Step
    | StepResult
    | DropInFlight
    | ProgressQuery
    | ProgressReport
    | CloseSession
    | SessionFailed
    | KvFetch
    | KvBlocks
    | OutsideSessions
    | WorkReceipt
    | AuditQuery
    | AuditReport
    | TapRows
    | DraftMessages
)
