"""The numbers that tune how files are fetched, and those that bound what a hub or a model's author can make us do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HubPolicy:
    """Fetching from a hub."""

    parallel_files: int = 4
    """Files fetched at a time: one connection seldom fills a fast line; many disturb each other on a slow one."""
    parallel_ranges: int = 8
    """Small pieces read at a time: each takes one or two round trips and no bandwidth."""
    timeout_s: float = 15.0
    """Without a byte for so long, a connection is given up and another one tried."""
    retries: int = 5
    """Attempts in a row that bring no new byte, before fetching fails; what has come is kept for the next time."""
    retry_wait_s: float = 0.5
    """Before the first of them; doubled each time ..."""
    max_retry_wait_s: float = 8.0
    """... up to so long."""
    chunk_bytes: int = 1 << 20
    """Written at a time: what a cut connection can cost again, and the buffer of each file."""
    free_bytes: int = 64 << 20
    """Left free on the disk: a full disk disturbs every other program."""
    max_files: int = 1 << 14
    """Of one repository; the largest have some hundreds."""
    max_file_bytes: int = 1 << 40
    """Of one file; the hub takes none above 500 GB."""
    max_json_bytes: int = 1 << 26
    """Of one file that is fetched as a model is opened: its config, index and tokenizer."""
    max_json_files: int = 64
    """Of these, so many."""
    max_kept_bytes: int = 1 << 28
    """Of a listing or of pieces that were kept: a larger file is not ours."""


POLICY = HubPolicy()
