"""What audits cost: digests in time and bytes, replays as a part of all work, and how soon a cheat meets one.

    nice python benchmarks/bench_audit_costs.py [--prefill .15]

`--prefill` is what a token costs in a replay's prefill, as a part of decoding it (`bench_audits.py` measures it). The
rest is arithmetic on `AuditPolicy`, for answers and prompts of `--tokens` together, of which half are prompt.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence

from swarm.planner.auditing.policy import POLICY
from swarm.row_digest import DIGEST_BYTES, row_digests, token_digests


def digest_us(row_bytes: int, rows: int = 64, rounds: int = 50) -> float:
    """Microseconds a row, the best of the rounds: other work only adds."""
    body = bytes(row_bytes * rows)
    best = math.inf
    for _ in range(rounds):
        started = time.perf_counter()
        row_digests(body, rows)
        best = min(best, time.perf_counter() - started)
    return best * 1e6 / rows


def replayed_part(rate: float, prefill: float, prompt: int, answer: int, replays: float = 1.0) -> float:
    """Of the work of all answers: a replay computes prompt and answer as one prefill."""
    return rate * replays * prefill * (prompt + answer) / (prefill * prompt + answer)


def answers_until_found(rate: float, found_by_one: float, probability: float) -> int:
    """Answers of a cheat until it has been found with `probability`, if each is audited at `rate`."""
    return math.ceil(math.log(1 - probability) / math.log(1 - rate * found_by_one))


def report(prefill: float, tokens: int) -> Sequence[str]:
    half = tokens // 2
    lines = [
        f"digest of a row: {digest_us(1152):.2f} us (576 bf16), {digest_us(16384):.2f} us (8192 bf16); "
        f"of 64 token ids {_token_us():.2f} us each",
        f"bytes of a report a token and edge: {2 * DIGEST_BYTES}, and {POLICY.rows} rows a hop; "
        f"on average over all answers {2 * DIGEST_BYTES * POLICY.rate:.1f}",
        f"replays at the default rate of {POLICY.rate:.4f}: {replayed_part(POLICY.rate, prefill, half, half):.2%} of "
        f"the swarm's work ({tokens} tokens, prefill {prefill:g} of decoding)",
        f"a new hop's first audit: {replayed_part(1.0, prefill, half, half):.1%} of one answer's work",
        f"the rate that costs 1%: {0.01 / replayed_part(1.0, prefill, half, half):.4f}",
    ]
    for rate in (POLICY.rate, 0.01 / replayed_part(1.0, prefill, half, half)):
        lines.append(
            f"a hop that begins to cheat later, found with p >= .999 at a rate of {rate:.4f}: within "
            f"{answers_until_found(rate, 1.0, 0.999)} answers if all hops are replayed elsewhere, "
            f"{answers_until_found(rate, 1 / 3, 0.999)} if one of three is"
        )
    return lines


def _token_us() -> float:
    best = math.inf
    for _ in range(50):
        started = time.perf_counter()
        token_digests(range(64))
        best = min(best, time.perf_counter() - started)
    return best * 1e6 / 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", type=float, default=0.15)
    parser.add_argument("--tokens", type=int, default=400)
    options = parser.parse_args()
    for line in report(options.prefill, options.tokens):
        print(line)


if __name__ == "__main__":
    main()
