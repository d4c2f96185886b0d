"""The recurrent states of one session: which are kept, up to which token they can be gone back to, and what a step
computes.

Owns positions and the choice of what is kept; the tensors are filled by whoever carries out the plan. A state is kept
at the start of each `Segment`, with the inputs of the tokens after it, from which any state within the segment follows.
Draft rows leave no state, but their inputs: the states of a tree are computed from the last committed one with every
step. So forks share snapshots, a rejected draft leaves nothing behind, and going back to a token within a segment is
exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swarm.errors import ActivationLogEvicted
from swarm_kernels.batch import BLOCK_SIZE
from swarm_kernels.kvcache.sequence import ROOT, StepRequest, TreeNode
from swarm_kernels.kvcache.state_plan import RowInput, RowRun, Source, StatePlan, StateSnapshot

BOUNDARY = 2 * BLOCK_SIZE  # tokens: states of a long run are kept at its last multiple; a block of `swarm.block_hash`
SEGMENT_ROWS = 64  # a segment with so many rows is followed by another
MAX_SEGMENTS = 3
MAX_STATES = MAX_SEGMENTS + 1  # of one session: of its segments, and the newest
MAX_ROWS = SEGMENT_ROWS + BOUNDARY  # of a segment that is transferred
MAX_TREE_ROWS = 512  # of a session with states, live draft rows
_STEPWISE = 8  # rows that are computed one by one with other sessions' rather than together


@dataclass(slots=True, eq=False)
class Segment:
    """The state before the first of `rows`, which follow each other."""

    start: StateSnapshot
    rows: list[RowInput] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start.position + len(self.rows)

    def holds(self, length: int) -> bool:
        """Whether the state after `length` tokens can be computed from it."""
        return self.start.position <= length <= self.end

    def first(self, length: int) -> Segment:
        """The part before position `length`."""
        return Segment(self.start, self.rows[: length - self.start.position])


class SequenceStates:
    """Of one session. The last segment ends with its last committed token."""

    __slots__ = ("head", "segments", "tree")

    def __init__(self, segments: Sequence[Segment] = ()) -> None:
        self.segments = list(segments) or [Segment(StateSnapshot(0))]
        self.head = self.segments[-1].start
        """The newest state, within the last segment."""
        self.tree: dict[int, RowInput] = {}  # by slot; also of slots that are gone, until the next step

    @property
    def length(self) -> int:
        return self.segments[-1].end

    def reachable(self, length: int) -> bool:
        """Whether the session can go back to `length` tokens."""
        return length == 0 or any(segment.holds(length) for segment in self.segments)

    def fork(self, length: int) -> SequenceStates:
        """Another session with the first `length` tokens, which can go back by one of them if this one can. Raises
        ActivationLogEvicted."""
        if length == 0:
            return SequenceStates()
        newest = self._covering(length)
        before = [segment for segment in self.segments if segment.holds(length) and segment.holds(length - 1)]
        chosen = before[-1] if before and len(before[-1].rows) <= MAX_ROWS else newest
        return SequenceStates([chosen.first(length)])

    def truncate(self, length: int) -> None:
        """Drop the tree and all but the first `length` tokens. Raises ActivationLogEvicted before anything changes."""
        segments = [Segment(StateSnapshot(0))]
        if length:
            last = self._covering(length)
            segments = [*self.segments[: self.segments.index(last)], last.first(length)]
        head, start = self.head, segments[-1].start
        self.segments, self.tree = segments, {}
        self.head = head if start.position <= head.position <= length else start

    def forget_all_but_last(self) -> None:
        """Keep no more than what the state after the last token needs."""
        del self.segments[:-1]
        self.tree, self.head = {}, self.segments[-1].start

    def _covering(self, length: int) -> Segment:
        for segment in reversed(self.segments):
            if segment.holds(length):
                return segment
        raise ActivationLogEvicted(f"the recurrent state after {length} of {self.length} tokens is not kept any more")

    def plan(self, request: StepRequest, tree: Mapping[int, TreeNode], row: int, plan: StatePlan) -> None:
        """Add the rows of a step to the `plan` of its batch, in which its first row is `row`.

        `tree`: all draft slots after the step."""
        for slot in request.commit_slots:
            self.segments[-1].rows.append(self.tree.pop(slot))
        last = self.segments[-1]
        sources: list[Source] = list(last.rows[self.head.position - last.start.position :])
        causal = range(row, row + request.causal_rows)
        sources += causal
        start, position = self.head, self.length + len(causal)
        saves = self._keep(causal, position, start, plan) if request.rows else []
        inputs = {slot: RowInput() for slot in request.slots}
        drafts = list(enumerate(request.slots, row + len(causal)))
        plan.kept += [(index, inputs[slot]) for index, slot in drafts]
        self.tree = {slot: kept for slot, kept in self.tree.items() if slot in tree} | inputs
        if not request.rows:
            return
        depth, place = 0, -1
        if len(sources) > _STEPWISE:
            plan.runs.append(RowRun(start, sources, saves))
            start = self.head
        else:
            for done, source in enumerate(sources, 1):
                place = _add(plan, depth, source, place, start)
                plan.levels[depth].saves += [(place, snapshot) for count, snapshot in saves if count == done]
                depth += 1
        self._plan_tree({slot: index for index, slot in drafts}, tree, plan, (depth, place), start)

    def _keep(
        self, causal: range, position: int, start: StateSnapshot, plan: StatePlan
    ) -> list[tuple[int, StateSnapshot]]:
        """Choose what is kept of a run of `causal` rows that ends at `position`. -> the states to save."""
        begin = position - len(causal)
        if position == start.position:
            return []
        self.head = StateSnapshot(position)
        saves = [(position - start.position, self.head)]
        if len(causal) >= BOUNDARY:
            boundary = StateSnapshot((position - 1) // BOUNDARY * BOUNDARY)
            if boundary.position > start.position:
                saves.insert(0, (boundary.position - start.position, boundary))
                self.segments.append(Segment(boundary))
            elif self.segments[-1].start is not start:
                self.segments.append(Segment(start))
            causal = causal[boundary.position - begin :]
        rows = [RowInput() for _ in causal]
        plan.kept += zip(causal, rows, strict=True)
        self.segments[-1].rows += rows
        if len(self.segments[-1].rows) >= SEGMENT_ROWS:
            self.segments.append(Segment(self.head))
        del self.segments[:-MAX_SEGMENTS]
        return saves

    def _plan_tree(
        self,
        drafts: Mapping[int, int],
        tree: Mapping[int, TreeNode],
        plan: StatePlan,
        root: tuple[int, int],
        start: StateSnapshot,
    ) -> None:
        """Add draft rows (slot -> row of the batch) and those of their ancestors that have no state, which is all.

        `root`: level of the children of the last committed token, and its place in the level before; without one
        (-1) they follow the snapshot `start`."""
        needed = 0
        for slot in drafts:
            needed |= tree[slot].mask
        placed: dict[int, tuple[int, int]] = {ROOT: (root[0] - 1, root[1])}
        for slot in sorted((slot for slot in tree if needed >> slot & 1), key=lambda slot: tree[slot].position):
            depth, parent = placed[tree[slot].parent]
            source: Source = drafts[slot] if slot in drafts else self.tree[slot]
            placed[slot] = depth + 1, _add(plan, depth + 1, source, parent, start)


def _add(plan: StatePlan, depth: int, source: Source, parent: int, start: StateSnapshot) -> int:
    """Add a row to the level of this depth. -> its place there."""
    level = plan.level(depth)
    level.sources.append(source)
    if depth:
        level.parents.append(parent)
    else:
        level.starts.append(start)
    return len(level.sources) - 1
