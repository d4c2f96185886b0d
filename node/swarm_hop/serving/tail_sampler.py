"""What a tail makes of the last hidden rows: tokens, log-probabilities of them and of the prompt, Medusa candidates.

Owns which rows of a batch are sampled from, and with what. A step whose rows cannot be sampled fails alone. Called in
the compute thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from swarm.errors import InvalidRequest, ModelError, SwarmError
from swarm.types import TokenLogprobs
from swarm_hop.serving.executor import ScheduledStep, StepOutput
from swarm_kernels.draft.medusa import MedusaHeads
from swarm_kernels.runtime.llama_span import LlamaSpan
from swarm_kernels.runtime.span import Span
from swarm_kernels.sampling.logprobs import token_logprobs
from swarm_kernels.sampling.margin import token_margins
from swarm_kernels.sampling.processors import penalizes
from swarm_kernels.sampling.sampler import RowContext, sample_rows

MAX_NEG_LOGPROB = 1 << 14  # the bound of `messages.StepResult.medusa_neg_logprob_centinats`
PROMPT_ROWS = 64  # whose logits are in memory at a time: 32 MB with a vocabulary of 128k

_StepRows = tuple[ScheduledStep, range]  # a step, and which rows of the batch are its own


class TailSampler:
    """Of a span with the last layer."""

    def __init__(self, span: Span, heads: MedusaHeads | None = None) -> None:
        """`heads`: Medusa heads, whose candidates go to the sessions that request them."""
        self._span = span
        self._medusa_heads = heads

    def outputs(
        self, steps: Sequence[ScheduledStep], hidden: torch.Tensor, positions: torch.Tensor
    ) -> list[StepOutput | SwarmError]:
        """For every step with `sample` set: a token after its last causal row (or each) and one after each tree row.

        The token sampled from the row at position p belongs to position p + 1. For every step, sampling or not: the
        log-probabilities of the prompt, if its session wants them.
        `hidden [rows, hidden]`, `positions [rows]`.
        """
        sampled: list[_StepRows] = []
        at = 0
        outputs: list[StepOutput | SwarmError] = []
        for scheduled in steps:
            step, end = scheduled.arrival.step, at + scheduled.rows
            if step.sample:
                every = step.sample_all and not scheduled.session.sampling.needs_history
                sampled.append((scheduled, range(at if every else at + max(step.causal_rows - 1, 0), end)))
            outputs.append(self._prompt_output(scheduled, hidden[at:end]))
            at = end
        if not sampled:
            return outputs
        tokens = iter(self._sample(sampled, hidden, positions))
        return [
            _joined(output, next(tokens)) if scheduled.arrival.step.sample else output
            for scheduled, output in zip(steps, outputs, strict=True)
        ]

    def _sample(
        self, sampled: Sequence[_StepRows], hidden: torch.Tensor, positions: torch.Tensor
    ) -> list[StepOutput | SwarmError]:
        rows = [row for _, part in sampled for row in part]
        picked, following = hidden[rows], [position + 1 for position in positions[rows].tolist()]
        logits = self._span.logits(picked).float().cpu()
        outputs: list[StepOutput | SwarmError] = []
        at = 0
        for scheduled, part in sampled:
            end = at + len(part)
            outputs.append(_sample_step(scheduled, logits[at:end], following[at:end]))
            at = end
        return self._medusa_candidates(picked, sampled, outputs)

    def _prompt_output(self, scheduled: ScheduledStep, hidden: torch.Tensor) -> StepOutput | SwarmError:
        """The prompt's log-probabilities, from the step's own rows `hidden [rows, hidden]`."""
        tokens, session = scheduled.arrival.tokens, scheduled.session
        count = session.sampling.prompt_logprobs
        if count is None or tokens is None or session.is_replay(scheduled.arrival.step):
            return StepOutput()
        logprobs: list[TokenLogprobs] = []
        targets = tokens.prompt_targets.tolist()
        try:
            for start in range(0, len(targets), PROMPT_ROWS):
                part = targets[start : start + PROMPT_ROWS]
                logprobs += token_logprobs(self._span.logits(hidden[start : start + len(part)]), part, count)
        except ModelError as error:
            return error
        return StepOutput(prompt_logprobs=tuple(logprobs))

    def _medusa_candidates(
        self, hidden: torch.Tensor, sampled: Sequence[_StepRows], outputs: list[StepOutput | SwarmError]
    ) -> list[StepOutput | SwarmError]:
        """`outputs`, with the Medusa candidates of the sessions that requested them. `hidden [m, hidden]`."""
        width = max(scheduled.session.num_medusa_candidates for scheduled, _ in sampled)
        if self._medusa_heads is None or not isinstance(self._span, LlamaSpan) or not width:
            return outputs
        ids, logprobs = self._medusa_heads.propose(self._span.final_hidden(hidden), width)  # [heads, m, width]
        neg_logprobs = (logprobs * -100).round().clamp(0, MAX_NEG_LOGPROB).int()
        at = 0
        for i, (scheduled, rows) in enumerate(sampled):
            output, candidates = outputs[i], scheduled.session.num_medusa_candidates
            part = slice(at, at + len(rows)), slice(0, candidates)
            at += len(rows)
            if isinstance(output, StepOutput) and candidates:
                token_ids, neg_logprob = (
                    tuple(values[:, *part].transpose(0, 1).flatten().tolist()) for values in (ids, neg_logprobs)
                )
                outputs[i] = replace(
                    output,
                    num_medusa_heads=len(self._medusa_heads),
                    medusa_ids=token_ids,
                    medusa_neg_logprob_centinats=neg_logprob,
                )
        return outputs


def _sample_step(scheduled: ScheduledStep, logits: torch.Tensor, positions: Sequence[int]) -> StepOutput | SwarmError:
    """One step's `logits [m, vocab]` -> its tokens for `positions [m]`, or why it alone fails."""
    sampling = scheduled.session.sampling
    try:
        tokens = tuple(sample_rows(logits, _contexts(scheduled, positions)))
        margins = _margins(scheduled, logits, positions)
        if sampling.logprobs is None:
            return StepOutput(tokens=tokens, margins=margins)
        logprobs = tuple(token_logprobs(logits, tokens, sampling.logprobs))
        return StepOutput(tokens=tokens, logprobs=logprobs, margins=margins)
    except (ModelError, InvalidRequest) as error:
        return error


def _margins(scheduled: ScheduledStep, logits: torch.Tensor, positions: Sequence[int]) -> tuple[float | None, ...]:
    """Of the tokens that are claimed for `positions [m]`, () if none are."""
    session = scheduled.session
    if not session.claimed:
        return ()
    claims = [(i, token) for i, position in enumerate(positions) if (token := session.claim(position)) is not None]
    known = [i for i, _ in claims]
    contexts = [RowContext(session.sampling, positions[i]) for i in known]
    found = dict(zip(known, token_margins(logits[known], contexts, [token for _, token in claims]), strict=True))
    return tuple(found.get(i) for i in range(len(positions)))


def _contexts(scheduled: ScheduledStep, positions: Sequence[int]) -> Iterator[RowContext]:
    """One at a time: each may have a copy of a long text."""
    sampling, tokens = scheduled.session.sampling, scheduled.arrival.tokens
    if tokens is None:
        yield from (RowContext(sampling, position) for position in positions)
        return
    masks = scheduled.arrival.masks or [None] * len(positions)
    for position, path, mask in zip(positions, tokens.paths, masks, strict=True):
        history = path.token_ids() if penalizes(sampling) else ()
        yield RowContext(sampling, position, history, tokens.prompt_tokens, mask)


def _joined(prompt: StepOutput | SwarmError, sampled: StepOutput | SwarmError) -> StepOutput | SwarmError:
    """One step's prompt log-probabilities and samples as one output."""
    if isinstance(prompt, SwarmError) or isinstance(sampled, SwarmError):
        return prompt if isinstance(prompt, SwarmError) else sampled
    return replace(sampled, prompt_logprobs=prompt.prompt_logprobs)
