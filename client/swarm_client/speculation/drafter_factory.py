"""Which drafters a client uses. Owns the draft model that is loaded once for all of its generations.

The n-gram (prompt-lookup) drafter is always on, for it costs nothing. Beside it there may be a draft model (a file that
`swarm-draft train` made, the folder of an EAGLE-3 or DFlash drafter, the checkpoint's own MTP layer, or any local model
with the target's vocabulary) or the Medusa heads of the tail.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.errors import DrafterFailed, ModelError
from swarm.planner.speculation.drafter_choice import DrafterKind, DrafterOffer, explain_choice, rank_drafters
from swarm_client.speculation.controller import AsyncDrafter
from swarm_client.speculation.drafters.base import Drafter
from swarm_client.speculation.drafters.bundled import find_bundled, taps_of
from swarm_client.speculation.drafters.grammar import GrammarDrafter
from swarm_client.speculation.drafters.inline import InlineDrafter
from swarm_client.speculation.drafters.medusa import NUM_CANDIDATES, MedusaDrafter
from swarm_client.speculation.drafters.mixture import MixtureDrafter
from swarm_client.speculation.drafters.ngram import NgramDrafter
from swarm_client.speculation.drafters.threaded import ThreadedDrafter
from swarm_client.speculation.late_model import LateDrafter, LateModel

if TYPE_CHECKING:  # a client that drafts with no model loads none
    from swarm_kernels.models.open import ModelSource
    from swarm_kernels.sampling.grammar import GrammarState
    from swarm_kernels.tokenizer.tokenizer import ChatTokenizer

logger = logging.getLogger(__name__)

AUTO = "auto"  # the best of what is at hand
MEDUSA = "medusa"  # the Medusa heads of the tail
NGRAM = "ngram"  # no draft model
MTP = "mtp"  # the checkpoint's own layer for multi-token prediction
BUNDLED = "bundled"  # the trained draft model that is shipped for the target
TRAINED_SUFFIX = ".draft"


class DrafterFactory:
    """`await DrafterFactory.load(...)`, then `drafter()` for each generation."""

    def __init__(
        self,
        model: Callable[[], Drafter] | None = None,
        choice: str = "",
        *,
        medusa: bool = False,
        late: LateModel | None = None,
    ) -> None:
        """`model`: makes the drafter beside the n-gram drafter; `late`: one that may be there later. `choice`: what
        AUTO took and why. `medusa`: whether it drafts with the tail's heads."""
        self._model = model
        self._late = late
        self.choice = choice
        self.num_medusa_candidates = NUM_CANDIDATES if medusa else 0

    @classmethod
    async def load(cls, drafter: str, target: ModelSource, tokenizer: ChatTokenizer) -> DrafterFactory:
        """`drafter`: AUTO, NGRAM, MEDUSA, MTP, BUNDLED (if there is one for the target), a trained draft's file, the
        folder of an EAGLE-3 or DFlash drafter, here or on a hub, or a model. All but BUNDLED are waited for. Close it
        before `target`.

        One that cannot be used is logged and left out.
        """
        if drafter == MEDUSA:
            return cls(MedusaDrafter, medusa=True)
        if drafter == AUTO:
            return await asyncio.to_thread(cls._choose, target)
        try:
            if drafter == BUNDLED and (bundled := find_bundled(target)) is not None:
                return cls(late=LateModel(partial(_open, drafter, target, tokenizer), taps_of(bundled, target)))
            if drafter in (NGRAM, BUNDLED):
                return cls()
            return cls(await asyncio.to_thread(_open, drafter, target, tokenizer))
        except (DrafterFailed, ModelError) as error:
            logger.warning("drafting with n-grams alone: %s", error)
            return cls()

    @classmethod
    def _choose(cls, target: ModelSource) -> DrafterFactory:
        """The first of those at hand that opens."""
        from swarm_client.speculation.drafter_offers import find_offers

        found = find_offers(target)
        ranking = rank_drafters(found.open)
        left_out = [*ranking.left_out, *found.damaged]
        taken: DrafterOffer | None = None
        model: Callable[[], Drafter] | None = None
        for offer in ranking.offers:
            try:
                taken, model = offer, found.open[offer]()
                break
            except (DrafterFailed, ModelError) as error:
                left_out.append(f"{offer}: {error}")
        choice = explain_choice(taken, left_out)
        logger.info("%s", choice)
        return cls(model, choice, medusa=taken is not None and taken.kind is DrafterKind.MEDUSA)

    def drafter(
        self, compile_grammar: Callable[[], GrammarState] | None = None, threads: Executor | None = None
    ) -> AsyncDrafter:
        """`compile_grammar`: of the generation, if it has one; `threads`: where what it forces is computed."""
        drafter: Drafter = NgramDrafter()
        model = self._model if self._late is None else self._late.make
        if model is not None:
            drafter = MixtureDrafter([drafter, model()])
        elif self._late is not None and compile_grammar is None:
            return LateDrafter(self._late)
        if compile_grammar is not None:
            constrained = GrammarDrafter(drafter, compile_grammar)
            return InlineDrafter(constrained, threads) if drafter.is_synchronous else ThreadedDrafter(constrained)
        return InlineDrafter(drafter) if drafter.is_synchronous else ThreadedDrafter(drafter)

    async def close(self) -> None:
        if self._late is not None:
            await self._late.close()


def _open(drafter: str, target: ModelSource, tokenizer: ChatTokenizer) -> Callable[[], Drafter]:
    """Raises ModelError and DrafterFailed."""
    from swarm_client.speculation.drafter_offers import open_folder, open_layer, open_trained
    from swarm_client.speculation.drafters.model import ModelDrafter, check_vocabulary
    from swarm_kernels.draft.folder import drafter_kind, fetched_folder
    from swarm_kernels.draft.models import LocalModel
    from swarm_kernels.models.open import open_model
    from swarm_kernels.tokenizer.tokenizer import load_tokenizer

    if drafter == MTP:
        return open_layer(target)
    path = (drafter == BUNDLED and find_bundled(target)) or Path(drafter)
    if path.suffix == TRAINED_SUFFIX:
        return open_trained(path, target)
    if drafter_kind(path) is not None:
        return open_folder(path, target)
    if (fetched := fetched_folder(drafter)) is not None:
        return open_folder(fetched, target, drafter)
    source = open_model(drafter)
    check_vocabulary(source, load_tokenizer(source), target, tokenizer)
    local = LocalModel(source)
    return lambda: ModelDrafter(local, source.name)
