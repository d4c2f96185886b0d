"""The processes that a test has started, without the one that renders chat templates for the whole program."""

from __future__ import annotations

import psutil


def children() -> set[psutil.Process]:
    return {
        child for child in psutil.Process().children() if "swarm_kernels.tokenizer.template_worker" not in _words(child)
    }


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:  # it has ended
        return []
