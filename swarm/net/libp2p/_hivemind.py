"""The only place that imports hivemind: it takes seconds, brings torch along, warns and sets up logging of its own.

Owns the list of hivemind's parts that we use, and that py-libp2p can be imported beside it. Import it only where the
p2p daemon or the DHT is really used.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import warnings
from importlib import resources
from pathlib import Path
from typing import Any

from swarm.net.libp2p.hivemind_task_scope import CancelWithParent


def _register_bare(package: str) -> None:
    """Make submodules of `package` importable without running its `__init__`.

    hivemind's imports its optimisers, mixture of experts and scipy: over a second that neither the daemon nor
    the DHT needs.
    """
    spec = importlib.util.find_spec(package)
    if spec is not None and package not in sys.modules:
        sys.modules[package] = importlib.util.module_from_spec(spec)


def _share_crypto() -> None:
    """Have hivemind use py-libp2p's `crypto.pb`: protobuf takes each message name from one file only, and both bring it
    along. py-libp2p's has all that hivemind's has. Taken from its file, as its package takes seconds to import.
    """
    name = "libp2p.crypto.pb.crypto_pb2"
    package = importlib.util.find_spec("libp2p")
    if name not in sys.modules and package is not None and package.submodule_search_locations:
        path = Path(package.submodule_search_locations[0], "crypto", "pb", "crypto_pb2.py")
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            return
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    if name in sys.modules:
        sys.modules["hivemind.proto.crypto_pb2"] = sys.modules[name]


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its dependencies' deprecations, nothing a user could act on
    _register_bare("hivemind")
    _share_crypto()
    import hivemind.dht.node
    import hivemind.dht.traverse
    import hivemind.hivemind_cli
    from hivemind.dht.node import DHTNode
    from hivemind.dht.protocol import DHTProtocol
    from hivemind.dht.protocol import ValidationError as DHTValidationError
    from hivemind.dht.routing import DHTID, KBucket, RoutingTable
    from hivemind.dht.traverse import traverse_dht
    from hivemind.p2p import P2P, P2PContext, PeerID
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
    from hivemind.proto import dht_pb2, p2pd_pb2
    from hivemind.utils.multiaddr import Multiaddr as HivemindMultiaddr
    from hivemind.utils.timed_storage import get_dht_time

hivemind.dht.node.asyncio = hivemind.dht.traverse.asyncio = CancelWithParent()
logging.getLogger("hivemind").setLevel(logging.ERROR)

P2PD = resources.files(hivemind.hivemind_cli).joinpath("p2pd")

HIVEMIND_CALL_ERRORS = (P2PDaemonError, P2PHandlerError)
"""What a remote call raises besides Python's own errors."""


def use_protocol(protocol: type[Any]) -> None:
    """From now on, a `DHTNode` speaks this subclass of `DHTProtocol`; it has no other way to be told."""
    hivemind.dht.node.DHTProtocol = protocol


__all__ = [
    "DHTID",
    "HIVEMIND_CALL_ERRORS",
    "P2P",
    "P2PD",
    "DHTNode",
    "DHTProtocol",
    "DHTValidationError",
    "HivemindMultiaddr",
    "KBucket",
    "P2PContext",
    "PeerID",
    "RoutingTable",
    "dht_pb2",
    "get_dht_time",
    "p2pd_pb2",
    "traverse_dht",
    "use_protocol",
]
