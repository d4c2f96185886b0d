"""Checks of sampling parameters, as they come from callers and from the wire."""

from __future__ import annotations

from swarm.errors import InvalidRequest
from swarm.types import MAX_LOGIT_BIAS, MAX_LOGPROBS, Sampling

MAX_BIAS = 1e4
MAX_PENALTY = 100.0


def validate_sampling(sampling: Sampling, vocab_size: int | None = None) -> Sampling:
    """`sampling` itself if every value is in range; `logit_bias` also against the vocabulary, if its size is given.

    Whether its grammar compiles is not checked. Raises InvalidRequest.
    """
    _check_range("temperature", sampling.temperature, 0.0, 100.0)
    _check_range("top_p", sampling.top_p, 0.0, 1.0)
    if sampling.top_p == 0:
        raise InvalidRequest("top_p must be above 0; 1 turns it off")
    _check_range("min_p", sampling.min_p, 0.0, 1.0)
    _check_range("repetition_penalty", sampling.repetition_penalty, 0.01, 100.0)
    _check_range("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_range("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_whole("top_k", sampling.top_k, 1 << 20)
    _check_whole("seed", sampling.seed, (1 << 63) - 1)
    if sampling.logprobs is not None:
        _check_whole("logprobs", sampling.logprobs, MAX_LOGPROBS)
    if sampling.prompt_logprobs is not None:
        _check_whole("prompt_logprobs", sampling.prompt_logprobs, MAX_LOGPROBS)
    _check_bias(sampling.logit_bias, (1 << 31) if vocab_size is None else vocab_size)
    return sampling


def _check_bias(logit_bias: tuple[tuple[int, float], ...], vocab_size: int) -> None:
    if len(logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias has {len(logit_bias)} tokens; at most {MAX_LOGIT_BIAS}")
    for token, bias in logit_bias:
        _check_whole("a token of logit_bias", token, vocab_size - 1)
        _check_range("a value of logit_bias", bias, -MAX_BIAS, MAX_BIAS)
    if len({token for token, _ in logit_bias}) != len(logit_bias):
        raise InvalidRequest("logit_bias names a token twice")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high:
        raise InvalidRequest(f"{name} must be a number from {low:g} to {high:g}, not {value!r}")


def _check_whole(name: str, value: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= high:
        raise InvalidRequest(f"{name} must be a whole number from 0 to {high}, not {value!r}")
