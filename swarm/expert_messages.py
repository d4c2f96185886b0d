"""The wire messages between a hop's leader and the nodes that hold experts of its layers.

Owns these messages. A leader asks for outputs of experts row by row and gets them one by one: it adds them up itself,
in the order in which one machine would. What a body holds is read and written by `swarm_hop.experts.rows`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from swarm.wire_types import Count, Message, Serial, Text

MAX_EXPERT_ROWS = 1024  # of one frame
MAX_PAIRS = 8192  # of a row and one of its experts, in one frame


class ExpertRows(Message, frozen=True, tag="expert_rows"):
    """From a leader: compute experts of `layer` for these rows. Answered with ExpertOutputs or ExpertsRefused.

    The body is a `[rows, hidden]` tensor, in bf16 where the experts are and else in fp32, then for each of `pairs` the
    number of its row and that of its expert, 16 bits each. `weight_hash`, `dtype`: of the model that is meant; experts
    of any other would change the text without a trace.
    """

    max_header: ClassVar[int] = 256

    request: Serial
    layer: Count
    rows: Annotated[int, Meta(ge=1, le=MAX_EXPERT_ROWS)]
    pairs: Annotated[int, Meta(ge=1, le=MAX_PAIRS)]
    weight_hash: Annotated[str, Meta(max_length=64)]
    dtype: Annotated[str, Meta(max_length=16)]


class ExpertOutputs(Message, frozen=True, tag="expert_outputs"):
    """The body is a `[pairs, hidden]` tensor in fp32, in the request's order."""

    max_header: ClassVar[int] = 64

    request: Serial


class ExpertsRefused(Message, frozen=True, tag="experts_refused"):
    """`error` is a code of `swarm.errors`, `detail` a sentence for people."""

    max_header: ClassVar[int] = 4 << 10

    request: Serial
    error: Annotated[str, Meta(max_length=64)]
    detail: Text
