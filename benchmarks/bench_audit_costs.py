"""What audits cost: digests in time and bytes, replays as a part of all work, and how soon a cheat meets one.

    nice python benchmarks/bench_audit_costs.py [--isa NAME] [--tokens 400]

What a replay costs, as a part of an answer's own work, is measured with SmolLM2 on one core: a prefill of `--tokens`,
of which half are prompt, in the chunks that replays use and with the logits of the answer; and decoding the same answer
after its prompt. In turn, the median of the rounds. A node that serves many sessions at once decodes in batches, where
a token is cheaper, so that is measured for eight too. The rest is arithmetic on `AuditPolicy`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from audit_machines import EDGES, MACHINES
from audit_recording import SAMPLED, ChainOfHops, Rows, prefilled

from swarm.audit_messages import DIGEST_BYTES, MARGIN_BYTES, row_digests, token_digests
from swarm.planner.auditing.policy import POLICY
from swarm_kernels.kvcache.cache import StepRequest
from swarm_kernels.models.open import open_model
from swarm_kernels.ops.cpu import cpu_library
from swarm_kernels.runtime.span import Span


def digest_us(row_bytes: int, rows: int = 64, rounds: int = 50) -> float:
    """Microseconds a row, the best of the rounds: other work only adds."""
    body = bytes(row_bytes * rows)
    best = math.inf
    for _ in range(rounds):
        started = time.perf_counter()
        row_digests(body, rows)
        best = min(best, time.perf_counter() - started)
    return best * 1e6 / rows


def measure(isa: str, tokens: int, rounds: int, sessions: int) -> tuple[float, float]:
    """Seconds of decoding an answer and of replaying its text, of so many sessions in one batch. The prompt's prefill
    is half of a replay's, and not in the first."""
    cpu_library.set_threads(1)
    hops = replace(MACHINES["avx2"], isa=isa).spans(open_model("smollm2-135m"), "bf16")
    prompt = tokens // 2
    text = [100 + i * 7 % 40000 for i in range(tokens)]
    decodes, replays = [], []
    for _ in range(rounds):
        replays.append(_timed(lambda: _logits(hops, prefilled(hops, (text, prompt)))))
        decodes.append(_decode(hops, text, prompt, sessions))
    return statistics.median(decodes), statistics.median(replays)


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _logits(hops: Sequence[Span], rows: Rows) -> None:
    last = rows[EDGES[-1]]
    for at in range(0, len(last), SAMPLED):
        hops[-1].logits(last[at : at + SAMPLED])


def _decode(hops: Sequence[Span], text: list[int], prompt: int, sessions: int) -> float:
    """Seconds a session."""
    chain = ChainOfHops(hops, sessions * (len(text) + 16))
    for number in range(sessions):
        chain.open(bytes([number]), len(text))
        chain.step(text[:prompt], [StepRequest(bytes([number]), 0, prompt)])
    started = time.perf_counter()
    for at in range(prompt, len(text)):
        rows = chain.step([text[at]] * sessions, [StepRequest(bytes([n]), at, 1) for n in range(sessions)])
        hops[-1].logits(rows[EDGES[-1]])
    return (time.perf_counter() - started) / sessions


def replayed_part(rate: float, replay: float, replays: float = 1.0) -> float:
    """Of the work of all answers. `replay`: of one answer's own work."""
    return rate * replays * replay


def answers_until_found(rate: float, found_by_one: float, probability: float) -> int:
    """Answers of a cheat until it has been found with `probability`, if each is audited at `rate`."""
    return math.ceil(math.log(1 - probability) / math.log(1 - rate * found_by_one))


def report(decode: float, replay: float, sessions: int) -> Iterator[str]:
    """`decode`, `replay`: seconds of an answer's tokens, and of the whole text as a replay."""
    part = replay / (decode + replay / 2)  # the prompt, half of the text, is prefilled for the answer too
    affordable = 0.01 / part
    yield (
        f"digest of a row: {digest_us(1152):.2f} us (576 bf16), {digest_us(16384):.2f} us (8192 bf16); "
        f"of 64 token ids {_token_us():.2f} us each"
    )
    yield (
        f"bytes of a report a token and edge: {2 * DIGEST_BYTES}, a replay's tail {MARGIN_BYTES} more, and "
        f"{POLICY.rows} rows a hop; on average over all answers {2 * DIGEST_BYTES * POLICY.rate:.1f}"
    )
    yield (
        f"{sessions} sessions at once: decoding {decode * 1e3:.0f} ms a session, a replay {replay * 1e3:.0f} ms: "
        f"{part:.1%} of the answer's own work"
    )
    yield f"at the default rate of {POLICY.rate:.4f}, of the swarm's work: {replayed_part(POLICY.rate, part):.2%}"
    yield f"the rate that costs 1%: {affordable:.4f}, one answer in {1 / affordable:.0f}"
    for rate in (POLICY.rate, affordable):
        yield (
            f"a hop that begins to cheat later, found with p >= .999 at a rate of {rate:.4f}: within "
            f"{answers_until_found(rate, 1.0, 0.999)} answers if all hops are replayed elsewhere, "
            f"{answers_until_found(rate, 1 / 3, 0.999)} if one of three is"
        )


def _token_us() -> float:
    best = math.inf
    for _ in range(50):
        started = time.perf_counter()
        token_digests(range(64))
        best = min(best, time.perf_counter() - started)
    return best * 1e6 / 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", default="best")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for sessions in (1, 8):
        for line in report(*measure(options.isa, options.tokens, options.rounds, sessions), sessions):
            print(line, flush=True)


if __name__ == "__main__":
    main()
