"""SwarmClient: tokens from a model that none of your machines could hold.

    async with SwarmClient(peers=["/ip4/.../p2p/..."]) as client:
        async with client.chat_stream([{"role": "user", "content": "Why is the sky blue?"}]) as stream:
            async for piece in stream:
                print(piece.text, end="")

Owns the connection to one swarm and one model's tokenizer. `sync.SyncSwarmClient` is the same without async.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar, Unpack

from swarm.config import ClientConfig
from swarm.errors import UsageError
from swarm.net.libp2p.options import HostOptions
from swarm.old_names import current
from swarm.planner.costs.chain_costs import ChainCosts
from swarm.planner.generation.state_machine import GenerationRequest, GenerationState
from swarm.types import Chain, Snapshot
from swarm_client.api.options import OUTLINE, ChatMessage, GenerationKeywords, GenerationOptions, check_messages
from swarm_client.api.results import GenerationResult, GenerationStream
from swarm_client.generation.generation_loop import GenerationLoop
from swarm_client.generation.session_manager import SessionManager
from swarm_client.generation.stop_strings import StopStrings
from swarm_client.generation.text_stream import TextStream
from swarm_client.network.connection import ClientNetwork, connect
from swarm_client.outline.outliner import SkeletonDecoder, slots
from swarm_client.outline.templates import BUILT_IN, load_templates
from swarm_client.routing.prefill_chunks import POLICY as PREFILL
from swarm_client.routing.prefix_locations import PrefixLocations
from swarm_client.routing.router import ChainRouter
from swarm_client.speculation.controller import AsyncDrafter, ClientSpeculation, DraftingStats
from swarm_client.speculation.drafter_factory import MEDUSA, DrafterFactory
from swarm_client.speculation.drafters.medusa import NUM_CANDIDATES
from swarm_kernels.device.device import release_free_memory
from swarm_kernels.models.open import ModelSource, open_model
from swarm_kernels.tokenizer.tokenizer import ChatTokenizer, load_tokenizer

_T = TypeVar("_T")

RESERVED_TREE_SLOTS = 192  # draft-tree nodes that hops reserve KV slots for, beside a session's tokens


class SwarmClient:
    """One swarm, one model, any number of generations at once.

    `peers`: multiaddrs of any nodes of the swarm. `network`: a ready-made connection (tests use an in-memory one);
    by default one is made over libp2p when the context is entered. `source`, `tokenizer`: an opened model and
    its tokenizer, to share them between clients or to bring one's own. `make_drafter`: makes the drafter of one
    generation, in place of the drafters that the config names.
    """

    def __init__(
        self,
        model: str | None = None,
        peers: Sequence[str] | None = None,
        *,
        config: ClientConfig | None = None,
        network: ClientNetwork | None = None,
        source: ModelSource | None = None,
        tokenizer: ChatTokenizer | None = None,
        make_drafter: Callable[[], AsyncDrafter] | None = None,
    ) -> None:
        base = config or ClientConfig()
        self.config = replace(base, model=model or base.model, peers=tuple(peers) if peers is not None else base.peers)
        self._given_network = network
        self._given_source = source
        self._make_drafter = make_drafter
        self._drafter_factory = DrafterFactory()
        self._drafting_stats = DraftingStats()
        self._stack = AsyncExitStack()
        self._network: ClientNetwork | None = None
        self._router: ChainRouter | None = None
        self._prefix_locations = PrefixLocations()
        self._source: ModelSource | None = None
        self._tokenizer = tokenizer
        self._skeleton_decoder: SkeletonDecoder | None = None

    async def __aenter__(self) -> SwarmClient:
        """Raises ModelError, UsageError (no peers), PeerUnreachable."""
        async with AsyncExitStack() as stack:
            options = self._host_options() if self._given_network is None else None
            source = self._given_source
            if source is None:
                source = await asyncio.to_thread(open_model, self.config.model)
                stack.callback(source.close)
            network = self._given_network
            if network is None:
                assert options is not None
                direct = self.config.transport != "libp2p"
                network = await stack.enter_async_context(
                    connect(
                        options,
                        self.config.limits,
                        direct=direct,
                        secret=self.config.secret,
                        libp2p_impl=self.config.libp2p_impl,
                    )
                )
            self._source, self._network = source, network
            self._tokenizer = self._tokenizer or load_tokenizer(source)
            if self._make_drafter is None:
                self._drafter_factory = await DrafterFactory.load(self.config.drafter, source, self._tokenizer)
            self._router = ChainRouter(
                network.directory,
                network.pool,
                source.name,
                source.config.num_layers,
                dtype=self.config.dtype,
                weight_hash=source.weight_hash,
                wall_clock=network.wall_clock,
                rebootstrap=network.rebootstrap,
            )
            stack.push_async_callback(self._router.close)
            self._skeleton_decoder = SkeletonDecoder(
                self._stream,
                self._tokenizer,
                source.config.context_length,
                slots(self.config.limits.max_sessions_per_peer),
                load_templates(self.config.outline_templates) if self.config.outline_templates else BUILT_IN,
            )
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        self._router = self._skeleton_decoder = self._source = self._network = None  # every call raises UsageError now
        self._drafter_factory = DrafterFactory()  # and no draft model stays in memory with a reference to the client
        release_free_memory()

    @property
    def tokenizer(self) -> ChatTokenizer:
        return _entered(self._tokenizer)

    async def snapshot(self) -> Snapshot:
        """The swarm as it is now."""
        return await _entered(self._router).snapshot()

    def chain_costs(self, chain: Chain) -> ChainCosts:
        """What a step along `chain` costs by the last snapshot."""
        return _entered(self._router).costs(chain)

    def stream(self, prompt: str | Sequence[int], **options: Unpack[GenerationKeywords]) -> TextStream:
        """Continue a text, or token ids as they are. Options are those of `GenerationOptions`.

        Raises InvalidRequest and ContextOverflow at once; NoRoute and NetworkError while it is read.
        """
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return self._stream(ids, self._options(options))

    def chat_stream(self, messages: Sequence[ChatMessage], **options: Unpack[GenerationKeywords]) -> GenerationStream:
        """Answer a conversation, through the model's own chat template. Raises like `stream`."""
        check_messages(messages)
        checked = self._options(options)
        if checked.decoding == OUTLINE or (checked.decoding == "auto" and self.config.outline_in_auto):
            decoder = _entered(self._skeleton_decoder)
            return decoder.stream(messages, checked, decoder.route(messages, checked))
        return self._stream(self.tokenizer.apply_chat_template(messages), checked)

    async def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerationKeywords]) -> GenerationResult:
        """`stream`, read to its end."""
        return await self.stream(prompt, **options).read()

    async def chat(self, messages: Sequence[ChatMessage], **options: Unpack[GenerationKeywords]) -> GenerationResult:
        """`chat_stream`, read to its end."""
        return await self.chat_stream(messages, **options).read()

    def _options(self, options: Mapping[str, Any]) -> GenerationOptions:
        merged: dict[str, Any] = {"decoding": self.config.decoding}
        for name, value in options.items():
            flag, merged_value = current(name.replace("_", "-"), value)
            merged[flag.replace("-", "_")] = merged_value
        stop = merged.get("stop", ())
        if isinstance(stop, Iterable):
            merged["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        try:
            return GenerationOptions(**merged)
        except TypeError as error:
            raise UsageError(f"not an option of a generation: {error}") from None

    def _stream(self, prompt: Sequence[int], options: GenerationOptions) -> TextStream:
        source = _entered(self._source)
        request = GenerationRequest.checked(
            prompt,
            options.max_new_tokens,
            eos_ids=self.tokenizer.eos_token_ids,
            context_length=source.config.context_length,
            vocab_size=source.config.vocab_size,
            prefill_chunk=self.config.prefill_chunk or PREFILL.max_chunk,
            prefill_window=self.config.prefill_window,
            reserved_tree_slots=RESERVED_TREE_SLOTS if options.speculates else 0,
        )
        sampling = options.sampling()
        generation = GenerationState(request)
        network, router = _entered(self._network), _entered(self._router)
        speculation = None
        if options.speculates:
            drafter = self._make_drafter() if self._make_drafter else self._drafter_factory.drafter()
            speculation = ClientSpeculation(
                generation,
                drafter,
                router.costs,
                options.fixed_strategy,
                clock=network.clock,
                stats=self._drafting_stats,
            )
        sessions = SessionManager(
            router,
            network,
            self.config.limits,
            source.name,
            sampling,
            num_medusa_candidates=NUM_CANDIDATES if speculation is not None and self.config.drafter == MEDUSA else 0,
            plan_chunks=self.config.prefill_chunk is None,
            prefix_locations=self._prefix_locations,
        )
        loop = GenerationLoop(generation, sessions, self.config.limits, speculation)
        return TextStream(
            loop,
            self.tokenizer.stream(),
            StopStrings(options.stop),
            network.clock,
            seed=sampling.seed,
            explain=router.explain,
        )

    def _host_options(self) -> HostOptions:
        if not self.config.peers:
            raise UsageError("no peers to connect to; give the multiaddr of a node of the swarm")
        return HostOptions(peers=self.config.peers)


def _entered(value: _T | None) -> _T:
    if value is None:
        raise UsageError("the client is not connected; use it as `async with SwarmClient(...) as client`")
    return value
