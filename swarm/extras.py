"""What a client does without: the packages of the extra `node`. Owns whether they are here, and what is said if not."""

from __future__ import annotations

import importlib.util

from swarm.errors import UsageError

INSTALL_NODE = "pip install 'swarm-llm[node]'"
NODE_PACKAGES = frozenset(
    {"gguf", "hivemind", "msgpack", "multiaddr", "psutil", "safetensors", "segno", "torch", "transformers"}
)


def _is_here(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


HAS_HIVEMIND = _is_here("hivemind")
HAS_TORCH = _is_here("torch")


def needs(package: str, what: str) -> UsageError:
    """The error of `what`, which cannot be done without a package of the extra."""
    return UsageError(f"{what} needs {package}, which is not installed: {INSTALL_NODE}")


def needs_torch(what: str) -> None:
    """Raises UsageError where there is none."""
    if not HAS_TORCH:
        raise needs("torch", what)
