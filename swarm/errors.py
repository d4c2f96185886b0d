"""Every error that users and callers can get, in one tree.

    SwarmError                    base; carries a `code` for machines and one sentence for people
      UsageError                    a wrong flag or argument (exit code 2)
        InvalidRequest                a prompt, sampling value or limit that cannot be served
          ContextOverflow               prompt and answer do not fit the model's context
          UnsupportedRequest            well formed, but this version cannot do it
      ModelError                    a model that cannot be found, read or run
        ModelNotFound
        CorruptModel                  truncated, malformed or of the wrong hash
        UnsupportedModel
        DrafterFailed                 a drafter cannot be used, raised or stalled; generation goes on without it
      ResourceError                 this machine cannot do it
        OutOfMemory                   too little memory for one layer, or no KV pages left
        DiskFull                      too little room on the disk for a model's files
        DeviceUnavailable             the requested GPU is not there
        AddressInUse                  the port to listen on is taken
        ActivationLogEvicted          a hop no longer has the outputs that are to be replayed, or a state to go back to
        IdentityError                 the file with this peer's key cannot be read or written
      KernelError                   tensors or slots that cannot be right, refused before any kernel ran
      PlanError                     a planner's input that has no solution
        Infeasible
        NoRoute                       carries `missing`: the layers without a node
      NetworkError                  something between peers
        PeerUnreachable
          WrongSwarm                    it answered, but belongs to another swarm
        ConnectionLost                the other side, or the link to it, went away
        ProtocolError                 a peer sent what the protocol does not allow
        WrongModel                    a peer serves other weights than ours
        ClockSkew                     this machine's clock is off, so readers would reject its records
        RemoteError                   a peer refused or failed; carries its code and sentence
          NodeBusy                      refused for lack of capacity; carries `retry_after_s`
          NodeLeaving                   the node leaves or changes its layers: continue on another chain

Does not know how errors are shown. Command lines print `str(error)` and exit with `error.exit_code`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class SwarmError(Exception):
    """Base of all errors raised on purpose. `str(error)` is one sentence: what is wrong and what to do."""

    code = "error"
    exit_code = 2


class UsageError(SwarmError):
    """A flag, argument or config value that cannot be right."""

    code = "usage"


class InvalidRequest(UsageError):
    """A generation request that no swarm could serve: empty prompt, negative temperature, ..."""

    code = "invalid_request"


class ContextOverflow(InvalidRequest):
    """The prompt and the answer together are longer than the model's context."""

    code = "context_overflow"


class UnsupportedRequest(InvalidRequest):
    """A well-formed request for something this version cannot do."""

    code = "unsupported"


class ModelError(SwarmError):
    code = "model"


class ModelNotFound(ModelError):
    code = "model_not_found"


class CorruptModel(ModelError):
    code = "corrupt_model"


class UnsupportedModel(ModelError):
    code = "unsupported_model"


class DrafterFailed(ModelError):
    """A drafter cannot be used (any more). Only speed is lost: the sentence names the drafter and the reason."""

    code = "drafter_failed"


class ResourceError(SwarmError):
    code = "resource"


class OutOfMemory(ResourceError):
    code = "out_of_memory"


class DiskFull(ResourceError):
    code = "disk_full"


class DeviceUnavailable(ResourceError):
    code = "device_unavailable"


class AddressInUse(ResourceError):
    code = "address_in_use"


class ActivationLogEvicted(ResourceError):
    """Outputs of a session were evicted for lack of memory, so they cannot be replayed; or the recurrent state that its
    hop is to go back to is not kept any more. The hop is rebuilt."""

    code = "log_lost"


class IdentityError(ResourceError):
    """The identity file is missing its key, unreadable or unwritable; the sentence names it."""

    code = "identity"


class KernelError(SwarmError):
    """A kernel was given tensors, blocks or slots that do not fit together."""

    code = "kernel"


class PlanError(SwarmError):
    code = "plan"


class Infeasible(PlanError):
    """No assignment satisfies the constraints; the sentence names the one that binds."""

    code = "infeasible"


class NoRoute(PlanError):
    """No chain covers every layer.

    `missing`: half-open ranges of layers that no usable node serves.
    """

    code = "no_route"

    def __init__(self, message: str, missing: Sequence[tuple[int, int]] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class NetworkError(SwarmError):
    code = "network"


class PeerUnreachable(NetworkError):
    code = "peer_unreachable"


class WrongSwarm(PeerUnreachable):
    """A reachable peer belongs to another swarm: one is private and the other not, or their secrets differ."""

    code = "not_admitted"


class ConnectionLost(NetworkError):
    code = "connection_lost"


class ProtocolError(NetworkError):
    code = "protocol"


class WrongModel(NetworkError):
    code = "wrong_model"


class ClockSkew(NetworkError):
    """Records expire by the clock: peers' clocks must agree within 3 s."""

    code = "clock"


class RemoteError(NetworkError):
    """A peer replied with an error; `remote_code` is its `code`."""

    code = "remote"

    def __init__(self, message: str, remote_code: str = "error", peer: str = "") -> None:
        super().__init__(message)
        self.remote_code = remote_code
        self.peer = peer


class NodeBusy(RemoteError):
    """A node is full; try elsewhere, or here again after `retry_after_s` seconds."""

    code = "busy"

    def __init__(self, message: str, peer: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(message, "busy", peer)
        self.retry_after_s = retry_after_s


class NodeLeaving(RemoteError):
    """A node is about to leave, or to change its layers; its sessions continue on another chain."""

    code = "leaving"

    def __init__(self, message: str, peer: str = "") -> None:
        super().__init__(message, "leaving", peer)


UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""All that msgspec raises on hostile bytes; for text that is not UTF-8 it has no error of its own."""
