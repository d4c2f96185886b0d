"""The wire: one msgspec Struct a message. Bodies (hidden states) travel beside them as raw bytes, see `codec`.

Owns the names, fields and size bounds of everything peers say to each other. Knows neither sockets nor tensors.

    client -> hop   Open, Reroute, Step (to the first hop), Prune, Locate, Close, Ping
    hop -> hop      Step (with a body of hidden states), Failed, Fetch, Pages (with keys and values), Ping
    hop -> client   Opened, Failed, Result (from the tail), Step (an edge the client relays), Located, Pong
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from swarm.block_hash import HASH_BYTES
from swarm.types import Sampling

MAX_ROWS = 1024  # new tree nodes in one step
MAX_SLOTS = 4096  # tree slots of one session
MAX_TOKENS = 1 << 20  # tokens of one session
MAX_PENALTY_TOKENS = 1 << 18  # token ids in one `OpenSession`
MAX_HOPS = 256
MAX_MEDUSA_HEADS = 16  # of Medusa, at a tail
MAX_MEDUSA_CANDIDATES = 8  # of one head after one row
MAX_KV_BLOCKS = 4096  # of keys and values in one frame
MAX_BLOCK_HASHES = 4096  # digests of one text's beginnings

SessionId = Annotated[bytes, Meta(min_length=16, max_length=16)]
Peer = Annotated[str, Meta(min_length=1, max_length=128)]
Text = Annotated[str, Meta(max_length=1024)]
Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Slot = Annotated[int, Meta(ge=0, lt=MAX_SLOTS)]
Parent = Annotated[int, Meta(ge=-1, lt=MAX_SLOTS)]
SessionCount = Annotated[int, Meta(ge=1, le=1 << 16)]
Serial = Annotated[int, Meta(ge=0, le=(1 << 53))]
BlockHashes = Annotated[
    list[Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]], Meta(max_length=MAX_BLOCK_HASHES)
]
Slots = Annotated[list[Slot], Meta(max_length=MAX_SLOTS)]
Addresses = Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=16)]


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="t"):
    """Base of all messages; the first element of the array is the tag."""


class WireSampling(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`types.Sampling` with the bounds that a stranger must keep."""

    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] = 1.0
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0

    @classmethod
    def of(cls, sampling: Sampling) -> WireSampling:
        return cls(sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty, sampling.seed)

    def to_sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k, self.repetition_penalty, self.seed)


class OpenSession(Message, frozen=True, tag="open"):
    """Start a session on one hop. The sender becomes the session's client; only it may prune or close.

    `max_tokens`: KV tokens to reserve a layer. `upstream`: who will send the steps, "" for the client itself.
    `downstream`: whom to send them on to, "" on the tail. `sampling` and `history` (the tokens so far, for the
    repetition penalty) go to the tail only. `epoch`: steps of an older one are dropped; the answer repeats it.

    `replay_silent_until`: for the replacement of a lost hop. Rows at positions before it are computed and logged, but neither
    sent on (the hops behind hold them) nor answered by a Result.

    `prefix`: names of the text's beginnings (`swarm.block_hash`). A hop that computed one for this client shares it.

    `guesses`: how many guesses of each of its Medusa heads, if it has any, the tail is to send with every token.

    `kv_source`: a node that has left this session, with these very layers, and still holds its first `inherit` tokens.
    The hop fetches them there if it can; `SessionOpened.cached_tokens` says whether.
    """

    session: SessionId
    model: Text
    weight_hash: Text
    dtype: Annotated[str, Meta(max_length=16)]
    start: Count
    end: Count
    max_tokens: Count
    upstream: Annotated[str, Meta(max_length=128)] = ""
    downstream: Annotated[str, Meta(max_length=128)] = ""
    downstream_addresses: Addresses = []
    sampling: WireSampling | None = None
    penalty_tokens: Annotated[list[TokenId], Meta(max_length=MAX_PENALTY_TOKENS)] = []
    epoch: Serial = 0
    replay_silent_until: Count = 0
    block_hashes: BlockHashes = []
    num_medusa_candidates: Annotated[int, Meta(ge=0, le=MAX_MEDUSA_CANDIDATES)] = 0
    kv_source: Annotated[str, Meta(max_length=128)] = ""
    kv_source_addresses: Addresses = []
    kv_source_tokens: Count = 0


class SessionOpened(Message, frozen=True, tag="opened"):
    """The hop is ready, or has taken its new route. `epoch` is that of the Open or Reroute which this answers.

    `relay`: it cannot reach its downstream; the client must carry that edge. `held`: how many of the first tokens it
    has behind it already, because another session of this client began like this one or because it has inherited them.
    The first step may start anywhere up to there.
    """

    session: SessionId
    client_relays_next_edge: bool = False
    epoch: Serial = 0
    cached_tokens: Count = 0


class Reroute(Message, frozen=True, tag="reroute"):
    """To a hop that lives on beside one that was replaced: take steps from `upstream`, send outputs to `downstream`.

    Handled in its turn among the session's steps, but steps of an epoch before `epoch` are dropped from its arrival on.
    Answered by Opened; then the outputs for the first `replay` committed tokens are sent to `downstream` as line steps
    of `epoch` that sample nothing, before any other step. Failed with `log_lost` if they are no longer to be had.
    """

    session: SessionId
    epoch: Serial
    upstream: Annotated[str, Meta(max_length=128)] = ""
    downstream: Annotated[str, Meta(max_length=128)] = ""
    downstream_addresses: Addresses = []
    replay: Count = 0


class Step(Message, frozen=True, tag="step"):
    """A bit of a tree for one session (design section 4).

    First the tree slots in `commit` move, in order, into the committed pages. Then come the new rows: `line` rows that
    are committed on arrival, at positions `base + len(commit)` and on, then one row for each of `parents` / `slots`:
    tree nodes whose parent is a tree slot, or -1 for the last committed token. `tokens` has an id for every row on the
    first hop and is empty on later hops, where the body holds a `[rows, hidden]` tensor in the session's dtype.

    `base`: committed tokens before this step. A hop that holds fewer refuses it. One that holds more has run what
    others dropped: it skips what it has of `commit`, and if it holds more than `base + len(commit)` it forgets the
    rest, provided that the step begins a new epoch. `sample`: the tail draws a token after the last line row and after
    each tree row. `trace`: (queue ms, compute ms) of each hop so far. `sessions`: how many sessions the
    busiest of these decodes for at this time, this one included.
    """

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

    @property
    def rows(self) -> int:
        return self.causal_rows + len(self.slots)


class StepResult(Message, frozen=True, tag="result"):
    """From the tail: the tokens drawn in step `step`, if it samples: after its last line row, if it has one, then after
    each of its tree rows in their order. Which of them come true is for the client to see: it knows what it drafted.

    `guessed`: for each of these tokens, what the tail's `heads` Medusa heads think comes 1, 2, ... places after it: as
    many ids of each as the session asked for, likeliest first; `doubts`: -100 ln of their probabilities.
    """

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


class DropInFlight(Message, frozen=True, tag="drop_in_flight"):
    """Out of band: drop these tree slots, and queued steps of an epoch before `epoch`."""

    session: SessionId
    epoch: Serial
    slots: Slots = []


class ProgressQuery(Message, frozen=True, tag="progress_query"):
    """Out of band: how far have this session's steps come? Answered at once by Located."""

    session: SessionId


class ProgressReport(Message, frozen=True, tag="progress_report"):
    """The newest step that has arrived, and the newest that was computed and sent on: their numbers plus 1, 0: none.

    `compute_ms`: since when it is the turn of the one that is being computed, 0 if none is.
    """

    session: SessionId
    received: Serial
    completed: Serial
    compute_ms: Annotated[float, Meta(ge=0.0)] = 0.0


class CloseSession(Message, frozen=True, tag="close"):
    """The client is done with the session; the hop frees its pages.

    `prefix`: names of the beginnings of all that was computed; the hop may keep it for sessions that begin alike.
    """

    session: SessionId
    retain_prefix: BlockHashes = []


class SessionFailed(Message, frozen=True, tag="failed"):
    """This session cannot go on here. `error` is a code of `swarm.errors`, `detail` a sentence for people.

    `lost`: the sender has lost this next hop of the session; it keeps what it holds and waits for a Reroute. Without
    it the session is gone from the sender; `held`: but it keeps the first so many tokens for a few seconds, for an heir
    (`OpenSession.kv_source`) or until Close. `epoch`: the session's at the sender, so that old news is known as such.
    """

    session: SessionId
    error: Annotated[str, Meta(max_length=64)]
    detail: Text
    retry_after_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 0.0
    unreachable_next_hop: Annotated[str, Meta(max_length=128)] = ""
    epoch: Serial = 0
    kv_retained_tokens: Count = 0


class KvFetch(Message, frozen=True, tag="kv_fetch"):
    """To a node that has left a session: `count` pages from page `page` on of its first `tokens` tokens, in layer
    `layer` of the model. Whoever knows the session's id may ask. Answered by Pages, or by Failed.

    A page holds 16 tokens: `[kv_heads, head_dim, 16]` for keys and `[kv_heads, 16, head_dim]` for values, as they lie
    in memory; the rest of the last one is zero.
    """

    session: SessionId
    layer: Count
    first_block: Count
    num_blocks: Annotated[int, Meta(ge=1, le=MAX_KV_BLOCKS)]
    tokens: Count


class KvBlocks(Message, frozen=True, tag="kv_blocks"):
    """The body has the keys of all pages that were asked for, then their values."""

    session: SessionId
    layer: Count
    first_block: Count


class Ping(Message, frozen=True, tag="ping"):
    """Answered at once with the same nonce; half the round trip is ρ."""

    nonce: Serial


class Pong(Message, frozen=True, tag="pong"):
    nonce: Serial


class PathSwitch(Message, frozen=True, tag="path_switch"):
    """The last frame of one direction of a connection that goes on over another path, and the first on a new path that
    its dialler opened; see `net.link`. Peers pair the paths by the nonce."""

    nonce: Serial


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
    | Ping
    | Pong
    | PathSwitch
)
