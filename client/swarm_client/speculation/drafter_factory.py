"""Which drafters a client uses. Owns the draft model that is loaded once for all of its generations.

The n-gram (prompt-lookup) drafter is always on, for it costs nothing. Beside it there may be a draft model (a file that
`swarm-draft train` made, an EAGLE-3 drafter's folder, or any local model with the target's vocabulary) or the Medusa
heads of the tail.
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
from swarm_client.speculation.controller import AsyncDrafter
from swarm_client.speculation.drafters.base import Drafter
from swarm_client.speculation.drafters.bundled import find_bundled
from swarm_client.speculation.drafters.grammar import GrammarDrafter
from swarm_client.speculation.drafters.inline import InlineDrafter
from swarm_client.speculation.drafters.medusa import MedusaDrafter
from swarm_client.speculation.drafters.mixture import MixtureDrafter
from swarm_client.speculation.drafters.ngram import NgramDrafter
from swarm_client.speculation.drafters.threaded import ThreadedDrafter
from swarm_client.speculation.late_model import LateDrafter, LateModel

if TYPE_CHECKING:  # a client that drafts with no model loads none
    from swarm_kernels.models.open import ModelSource
    from swarm_kernels.sampling.grammar import GrammarState
    from swarm_kernels.tokenizer.tokenizer import ChatTokenizer

logger = logging.getLogger(__name__)

MEDUSA = "medusa"  # the Medusa heads of the tail
NGRAM = "ngram"  # no draft model
BUNDLED = "bundled"  # the trained draft model that is shipped for the target
TRAINED_SUFFIX = ".draft"


class DrafterFactory:
    """`await DrafterFactory.load(...)`, then `drafter()` for each generation."""

    def __init__(self, model: Callable[[], Drafter] | None = None, late: LateModel | None = None) -> None:
        """`model`: makes the drafter beside the n-gram drafter; `late`: one that may be there later."""
        self._model = model
        self._late = late

    @classmethod
    async def load(cls, drafter: str, target: ModelSource, tokenizer: ChatTokenizer) -> DrafterFactory:
        """`drafter`: NGRAM, MEDUSA, BUNDLED (if there is one for the target), a trained draft's file, the folder of an
        EAGLE-3 drafter, or a model. All but BUNDLED are waited for. Close it before `target`.

        One that cannot be used is logged and left out.
        """
        if drafter == MEDUSA:
            return cls(MedusaDrafter)
        try:
            if drafter == BUNDLED and find_bundled(target) is not None:
                return cls(late=LateModel(partial(_open, drafter, target, tokenizer)))
            if drafter in (NGRAM, BUNDLED):
                return cls()
            return cls(await asyncio.to_thread(_open, drafter, target, tokenizer))
        except (DrafterFailed, ModelError) as error:
            logger.warning("drafting with n-grams alone: %s", error)
            return cls()

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
    from swarm_client.speculation.drafters.eagle import EagleDrafter
    from swarm_client.speculation.drafters.model import ModelDrafter, check_vocabulary
    from swarm_kernels.device.device import single_threaded
    from swarm_kernels.draft.eagle import open_eagle
    from swarm_kernels.draft.eagle_file import is_eagle
    from swarm_kernels.draft.models import LocalModel, open_draft
    from swarm_kernels.models.open import open_model
    from swarm_kernels.ops import dispatch
    from swarm_kernels.tokenizer.tokenizer import load_tokenizer

    path = (drafter == BUNDLED and find_bundled(target)) or Path(drafter)
    if path.suffix == TRAINED_SUFFIX:
        dispatch.isa()  # the kernels take the number of threads that torch has when they are loaded
        with single_threaded():
            trained = open_draft(path, target)
        return lambda: ModelDrafter(trained, "trained draft")
    if is_eagle(path):
        eagle = open_eagle(path, target)
        return lambda: EagleDrafter(eagle, path.name)
    source = open_model(drafter)
    check_vocabulary(source, load_tokenizer(source), target, tokenizer)
    local = LocalModel(source)
    return lambda: ModelDrafter(local, source.name)
