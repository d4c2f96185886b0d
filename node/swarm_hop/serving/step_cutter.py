"""Cuts a large step into pieces that have the same effect one after the other, and joins what they return.

Each piece is a step of its own by the rules of the protocol: the causal rows before the tree rows, parents before their
children, the commits with the first piece. So whatever runs steps runs pieces. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from swarm.codec import Buffer
from swarm.messages import Step
from swarm_hop.serving.executor import StepOutcome, StepOutput
from swarm_kernels.runtime.taps import StepTaps


def cut(step: Step, body: Buffer, rows: int) -> tuple[tuple[Step, Buffer], tuple[Step, Buffer] | None]:
    """The first `rows` rows of a step, at least 1, and what is left of it."""
    if step.rows <= rows:
        return (step, body), None
    causal = min(step.causal_rows, rows)
    tree = rows - causal
    whole = causal == step.causal_rows
    row_bytes = len(memoryview(body)) // step.rows
    first = msgspec.structs.replace(
        step,
        causal_rows=causal,
        sample=step.sample and (whole or step.sample_all),
        tokens=step.tokens[:rows],
        parents=step.parents[:tree],
        slots=step.slots[:tree],
    )
    rest = msgspec.structs.replace(
        step,
        committed_before=step.committed_before + len(step.commit_slots) + causal,
        commit_slots=[],
        causal_rows=step.causal_rows - causal,
        tokens=step.tokens[rows:],
        parents=step.parents[tree:],
        slots=step.slots[tree:],
    )
    data = memoryview(body)
    return (first, data[: rows * row_bytes]), (rest, data[rows * row_bytes :])


def join(pieces: Sequence[StepOutcome]) -> StepOutcome:
    """The outcome of a step whose pieces have run, in their order."""
    if len(pieces) == 1:
        return pieces[0]
    outputs = [piece.output for piece in pieces]
    return StepOutcome(
        StepOutput(
            b"".join(output.body for output in outputs),
            tuple(token for output in outputs for token in output.tokens),
            max(output.num_medusa_heads for output in outputs),
            tuple(token for output in outputs for token in output.medusa_ids),
            tuple(value for output in outputs for value in output.medusa_neg_logprob_centinats),
            tuple(logprobs for output in outputs for logprobs in output.logprobs),
            tuple(logprobs for output in outputs for logprobs in output.prompt_logprobs),
            tuple(margin for output in outputs for margin in output.margins),
            _joined_taps([output.taps for output in outputs]),
        ),
        sum(piece.queue_ms for piece in pieces),
        sum(piece.compute_ms for piece in pieces),
        max(piece.sessions for piece in pieces),
        sum(piece.plan_ms for piece in pieces),
        sum(piece.handover_ms for piece in pieces),
    )


def _joined_taps(pieces: Sequence[StepTaps]) -> StepTaps:
    """Of each tap the rows of all pieces; the first ones may have none."""
    rows: dict[int, list[bytes]] = {}
    for layer, part in (tap for piece in pieces for tap in piece):
        rows.setdefault(layer, []).append(part)
    return tuple((layer, b"".join(parts)) for layer, parts in sorted(rows.items()))
