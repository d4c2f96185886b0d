"""Who is served next while several wait: weighted fair queueing of a device's time, in two levels.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM '96), hierarchical as there: first among address blocks, then
among the clients of one block. What is shared is work, the time that steps take, and not the number of steps (as
tokens are in the Virtual Token Counter of Sheng et al., OSDI '24). A share that has not waited for a while may lag
behind the virtual time by `share_credit_ms` at most (borrowed virtual time: Duda and Cheriton, SOSP '99), so that a
client whose steps come one after the other is served as soon as each comes, unless it uses more than its share.

Owns the virtual times. Knows neither steps nor peers, and no clock: a share that waits while no other does gets
everything, since nothing is ever held back from the only one.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable
from dataclasses import dataclass, field

from swarm.planner.scheduling.policy import DEFAULT_POLICY, SchedulingPolicy

Tag = tuple[float, float]
"""Virtual start times, of a block among blocks and of a member within it, in ms; the smaller goes first."""


@dataclass(frozen=True, slots=True)
class Share:
    """On whose account a step runs. `weight`: its part against a member of weight 1, within a block and, for the block,
    beside other blocks. `first`: it goes before all others (the machine's owner)."""

    block: Hashable = ""
    member: Hashable = ""
    weight: float = field(default=1.0, compare=False)  # it may be another in the next session
    first: bool = False


@dataclass(slots=True)
class _Level:
    """The flows of one level. `now`: its virtual time; `finish`: of each flow, the virtual time it is served up to."""

    now: float = 0.0
    finish: dict[Hashable, float] = field(default_factory=dict)

    def join(self, key: Hashable, credit: float) -> None:
        self.finish[key] = max(self.finish.get(key, 0.0), self.now - credit)

    def trim(self, credit: float, keep: Container[Hashable], most: int) -> None:
        """Forget the flows whose past no longer matters, then those that are least ahead."""
        ahead = sorted(self.finish.items(), key=lambda flow: flow[1], reverse=True)
        self.finish = {k: at for i, (k, at) in enumerate(ahead) if k in keep or (at > self.now - credit and i < most)}


class FairShares:
    """`join` when a step of a share begins to wait; `tag` to order the shares; `charge` when its steps are taken."""

    def __init__(self, policy: SchedulingPolicy = DEFAULT_POLICY) -> None:
        self._credit = policy.share_credit_ms
        self._most_idle = policy.max_idle_shares
        self._blocks = _Level()
        self._members: dict[Hashable, _Level] = {}

    def __len__(self) -> int:
        """Shares that are remembered."""
        return sum(len(level.finish) for level in self._members.values())

    def join(self, share: Share, credit_ms: float | None = None) -> None:
        """A step of the share waits, and none did before. `credit_ms`: instead of the policy's."""
        credit = self._credit if credit_ms is None else credit_ms
        self._blocks.join(share.block, credit)
        self._members.setdefault(share.block, _Level()).join(share.member, credit)

    def tag(self, share: Share) -> Tag:
        """Of a share that has joined; of one that was forgotten, as if it joined without credit."""
        level = self._members.get(share.block)
        member = level.finish.get(share.member, level.now) if level is not None else 0.0
        return self._blocks.finish.get(share.block, self._blocks.now), member

    def tag_on_join(self, share: Share, credit_ms: float | None = None) -> Tag:
        """The tag that the share has once a step of it waits."""
        credit = self._credit if credit_ms is None else credit_ms
        block = max(self._blocks.finish.get(share.block, 0.0), self._blocks.now - credit)
        level = self._members.get(share.block)
        member = max(level.finish.get(share.member, 0.0), level.now - credit) if level is not None else 0.0
        return block, member

    def serve(self, share: Share) -> None:
        """The next work is this share's: the virtual time reaches its tag."""
        block, member = self.tag(share)
        level = self._members[share.block]
        self._blocks.now = max(self._blocks.now, block)
        level.now = max(level.now, member)

    def charge(self, share: Share, work_ms: float) -> None:
        """Account for work; a correction may be negative. Ignored for a share that was forgotten meanwhile."""
        level = self._members.get(share.block)
        if level is None or share.member not in level.finish:
            return
        level.finish[share.member] += work_ms / share.weight
        self._blocks.finish[share.block] += work_ms / share.weight

    def trim(self, busy: Iterable[Share] = ()) -> None:
        """Bound what is remembered. `busy`: the shares whose steps wait."""
        if len(self) + len(self._blocks.finish) <= 2 * self._most_idle:
            return
        kept = set(busy)
        blocks = {share.block for share in kept}
        self._blocks.trim(self._credit, blocks, self._most_idle // 2)
        self._members = {block: level for block, level in self._members.items() if block in self._blocks.finish}
        for block, level in self._members.items():
            most = 1 + self._most_idle // (2 * len(self._members))
            level.trim(self._credit, {share.member for share in kept if share.block == block}, most)
