"""The line that says who sees what, and which measured share it quotes."""

from __future__ import annotations

import pytest

from swarm.types import Chain, Hop
from swarm_client.home.exposure import RECOVERED, exposure
from swarm_client.home.local_layers import FIRST, LAST

MODEL = "smollm2-135m"


def chain(*hops: tuple[str, int, int]) -> Chain:
    return Chain(tuple(Hop(peer, start, end) for peer, start, end in hops))


@pytest.mark.parametrize("depth", range(29))
def test_the_share_is_that_of_the_nearest_depth_below(depth: int) -> None:
    said = exposure(chain((FIRST, 0, depth), ("stranger", depth, 29), (LAST, 29, 30)), MODEL)
    below = max(at for at in RECOVERED[MODEL] if at <= depth)
    plural = "s" * (below != 1)
    assert f"recovered {RECOVERED[MODEL][below]:.0%} after {below} layer{plural} (docs/privacy.md)" in said
    assert said.startswith("token ids stay here; ranger sees hidden states after")


def test_no_share_is_quoted_of_a_model_that_was_not_measured() -> None:
    said = exposure(chain((FIRST, 0, 1), ("stranger", 1, 4), (LAST, 4, 5)), "another")
    assert "give most of a text away" in said
    assert "%" not in said


def test_trusted_nodes_are_told_from_strangers() -> None:
    hops = chain(("trusted", 0, 2), ("stranger", 2, 20), ("other", 20, 28), ("friend", 28, 30))
    said = exposure(hops, MODEL, {"trusted", "friend"})
    assert said.startswith("token ids go to trusted nodes alone, rusted and friend; ranger and other see hidden states")
    assert "after 2 layers" in said
    assert exposure(chain(("trusted", 0, 30)), MODEL, {"trusted"}) == "only trusted nodes see the text: rusted"
    assert "trusted and friend see token ids" not in said
    assert "see token ids" in exposure(hops, MODEL)
