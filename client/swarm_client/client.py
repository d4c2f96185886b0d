"""SwarmClient: tokens from a model that none of your machines could hold.

    async with SwarmClient(peers=["/ip4/.../p2p/..."]) as client:
        async with client.chat_stream([{"role": "user", "content": "Why is the sky blue?"}]) as stream:
            async for piece in stream:
                print(piece.text, end="")

Owns the connection to one swarm and one model's tokenizer. `sync.SyncSwarmClient` is the same without async.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, Unpack

from swarm.config import ClientConfig
from swarm.errors import InvalidRequest, UsageError
from swarm.net.base.tasks import in_thread
from swarm.planner.auditing.policy import POLICY as AUDITS
from swarm.planner.costs.chain_costs import ChainCosts
from swarm.planner.generation.state_machine import GenerationRequest, GenerationState
from swarm.types import Chain, Grammar, Snapshot
from swarm_client.api.options import (
    MAX_FORKS,
    MAX_SEED,
    OUTLINE,
    ChatMessage,
    GenerationKeywords,
    GenerationOptions,
    check_messages,
    generation_options,
)
from swarm_client.api.results import GenerationResult, GenerationStream
from swarm_client.auditing.auditor import Auditor
from swarm_client.auditing.result import AuditResult
from swarm_client.generation.answer_grammar import AnswerGrammar
from swarm_client.generation.audited_answer import read_audited
from swarm_client.generation.generation_loop import GenerationLoop
from swarm_client.generation.session_manager import SessionManager
from swarm_client.generation.session_turns import SessionTurns
from swarm_client.generation.shared_prefill import SharedPrefill
from swarm_client.generation.stop_strings import StopStrings
from swarm_client.generation.text_stream import TextStream
from swarm_client.home.ends import HomeEnds, hold_ends
from swarm_client.home.trusted_ends import TrustedEnds
from swarm_client.network.connection import ClientNetwork, connect_as, host_options
from swarm_client.outline.outliner import SkeletonDecoder
from swarm_client.outline.templates import BUILT_IN, load_templates
from swarm_client.routing.conversations import Conversations
from swarm_client.routing.home_router import HomeRouter, router_of
from swarm_client.routing.prefill_chunks import POLICY as PREFILL
from swarm_client.routing.prefix_locations import PrefixLocations
from swarm_client.routing.router import ChainRouter
from swarm_client.speculation.controller import AsyncDrafter, ClientSpeculation, DraftingStats
from swarm_client.speculation.drafter_factory import DrafterFactory
from swarm_client.trust.peer_memory import PeerMemory, memory_file
from swarm_kernels.device.device import release_free_memory
from swarm_kernels.models.open import ModelSource, open_model
from swarm_kernels.sampling.grammar import GrammarCompiler
from swarm_kernels.tokenizer.tokenizer import ChatTokenizer, load_tokenizer

_T = TypeVar("_T")

MAX_GRAMMAR_THREADS = 2  # of all generations together

RESERVED_TREE_SLOTS = 192  # draft-tree nodes that hops reserve KV slots for, beside a session's tokens


class SwarmClient:
    """One swarm, one model, any number of generations at once.

    `peers`: multiaddrs of any nodes of the swarm. `network`: a ready-made connection (tests use an in-memory one);
    by default one is made over libp2p when the context is entered. `source`, `tokenizer`: an opened model and
    its tokenizer, to share them between clients or to bring one's own. `make_drafter`: makes the drafter of one
    generation, in place of the drafters that the config names. `local_layers`: (k, m), the first k and last m layers
    that this client computes itself, with embedding, norm and head, so that no token id leaves it (docs/privacy.md).
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
        local_layers: tuple[int, int] | None = None,
        make_drafter: Callable[[], AsyncDrafter] | None = None,
    ) -> None:
        base = config or ClientConfig()
        peers = tuple(peers) if peers is not None else base.peers
        local = base.local_layers if local_layers is None else f"{local_layers[0]}:{local_layers[1]}"
        self.config = replace(base, model=model or base.model, peers=peers, local_layers=local)
        self._given_network = network
        self._given_source = source
        self._make_drafter = make_drafter
        self._drafter_factory = DrafterFactory()
        self._drafting_stats = DraftingStats()
        self._stack = AsyncExitStack()
        self._network: ClientNetwork | None = None
        self._router: ChainRouter | None = None
        self._ends: HomeEnds | TrustedEnds | None = None  # the layers that this client holds itself, or who else
        self._conversations = Conversations() if self.config.vary_first else None
        self._auditor: Auditor | None = None
        self._prefix_locations = PrefixLocations()
        self._source: ModelSource | None = None
        self._tokenizer = tokenizer
        self._grammars: GrammarCompiler | None = None
        self._grammar_threads = ThreadPoolExecutor(MAX_GRAMMAR_THREADS, thread_name_prefix="swarm-grammar")
        self._skeleton_decoder: SkeletonDecoder | None = None
        self._turns = SessionTurns(self.config.limits)

    async def __aenter__(self) -> SwarmClient:
        """Raises ModelError, UsageError (no peers), PeerUnreachable."""
        async with AsyncExitStack() as stack:
            network, source = self._given_network, self._given_source
            if network is None:
                host_options(self.config)  # before a model is opened
            if source is None:
                source = await asyncio.to_thread(open_model, self.config.model)
                stack.callback(source.close)
            loading = await stack.enter_async_context(in_thread(partial(self._load_tokenizer, source)))
            if network is None:
                network = await stack.enter_async_context(connect_as(self.config, source.name))
            self._source, self._network = source, network
            reader = network.record_reader(source.name, source.config.num_layers)
            stack.push_async_callback(reader.close)
            kept = self.config.remember_peers and self._given_network is None
            memory = PeerMemory(memory_file(source.name, source.weight_hash) if kept else None)
            held = hold_ends(self.config, source, loading, network, reader)
            self._ends = await stack.enter_async_context(held)
            self._router = router_of(self.config, source, network, reader, memory, self._ends)
            stack.push_async_callback(self._router.close)
            stack.push_async_callback(memory.save)
            self._router.look_around()
            self._tokenizer = await loading
            self._grammars = GrammarCompiler(self._tokenizer, source.config.vocab_size)
            if self._make_drafter is None:
                self._drafter_factory = await DrafterFactory.load(self.config.drafter, source, self._tokenizer)
                stack.push_async_callback(self._drafter_factory.close)
            self._auditor = self._new_auditor(source, network, self._router)
            stack.push_async_callback(self._auditor.close)
            self._skeleton_decoder = SkeletonDecoder(
                self._stream,
                self._tokenizer,
                source.config.context_length,
                self._turns.parts,
                load_templates(self.config.outline_templates) if self.config.outline_templates else BUILT_IN,
            )
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        self._router = self._skeleton_decoder = self._source = self._network = self._grammars = (
            None  # every call raises UsageError now
        )
        self._drafter_factory = DrafterFactory()  # and no draft model stays in memory with a reference to the client
        release_free_memory()

    @property
    def tokenizer(self) -> ChatTokenizer:
        return _entered(self._tokenizer)

    @property
    def home(self) -> HomeEnds | None:
        """The layers that this client holds itself, if any (`ClientConfig.local_layers`)."""
        return self._ends if isinstance(self._ends, HomeEnds) else None

    @property
    def context_length(self) -> int:
        """Tokens that prompt and answer may have together."""
        return _entered(self._source).config.context_length

    async def snapshot(self) -> Snapshot:
        """The swarm as it is now."""
        router = _entered(self._router)
        snapshot = await router.snapshot()
        return router.whole or snapshot if isinstance(router, HomeRouter) else snapshot

    def chain_costs(self, chain: Chain) -> ChainCosts:
        """What a step along `chain` costs by the last snapshot."""
        return _entered(self._router).costs(chain)

    def stream(self, prompt: str | Sequence[int], **options: Unpack[GenerationKeywords]) -> TextStream:
        """Continue a text, or token ids as they are. Options are those of `GenerationOptions`.

        Raises InvalidRequest and ContextOverflow at once; NoRoute and NetworkError while it is read.
        """
        return self._stream(self._encode(prompt), self._options(options))

    def fork_streams(
        self, prompt: str | Sequence[int], n: int, **options: Unpack[GenerationKeywords]
    ) -> tuple[TextStream, ...]:
        """`n` continuations of one prompt, whose keys and values the hops compute once: number i is what `stream`
        with `seed + i` gives. Only the first has `prompt_logprobs`.

        Read them at the same time, each in a task of its own, or one after the other to its end: the one that is read
        first computes the prompt and the others wait for its first token, and no more of them run at a time than a
        node admits sessions of one peer. Raises like `stream`.
        """
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_FORKS:
            raise InvalidRequest(f"n is {n!r}; it must be an integer from 1 to {MAX_FORKS}")
        ids, checked, prefill = self._encode(prompt), self._options(options), SharedPrefill(self._turns.parts)
        seed = checked.sampling().seed
        first = replace(checked, seed=seed)
        others = [replace(checked, seed=(seed + i) % MAX_SEED, prompt_logprobs=None) for i in range(1, n)]
        return tuple(self._stream(ids, fork, prefill) for fork in (first, *others))

    def chat_prompt(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids that `chat_stream` continues, by the model's own chat template.

        `tools`: functions that the model may call, in OpenAI's form (`tokenizer.supports_tools` tells whether it
        learns of them). `template_options`: further variables of the template, such as `enable_thinking`. Raises
        InvalidRequest, and UnsupportedModel without a chat template.
        """
        check_messages(messages)
        if not tools and not template_options:
            return self.tokenizer.apply_chat_template(messages)
        return self.tokenizer.apply_chat_template(messages, tools=tools, template_options=template_options)

    def chat_stream(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[GenerationKeywords],
    ) -> GenerationStream:
        """Answer a conversation; see `chat_prompt`. With tools the answer is no outline. Raises like `stream`."""
        checked = self._options(options)
        plain = not tools and not template_options and not checked.excludes_outline
        if plain and (checked.decoding == OUTLINE or (checked.decoding == "auto" and self.config.outline_in_auto)):
            check_messages(messages)
            decoder = _entered(self._skeleton_decoder)
            return decoder.stream(messages, checked, decoder.route(messages, checked))
        return self._stream(self.chat_prompt(messages, tools=tools, template_options=template_options), checked)

    def audit_findings(self) -> list[AuditResult]:
        """What audits have found since this was last called: hops that lied, and disputes; at most the latest few."""
        return _entered(self._auditor).take_findings()

    async def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerationKeywords]) -> GenerationResult:
        """`stream`, read to its end."""
        return await read_audited(self.stream(prompt, **options), wait=self.config.audits == "wait")

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[GenerationKeywords],
    ) -> GenerationResult:
        """`chat_stream`, read to its end."""
        stream = self.chat_stream(messages, tools=tools, template_options=template_options, **options)
        return await read_audited(stream, wait=self.config.audits == "wait")

    def _load_tokenizer(self, source: ModelSource) -> ChatTokenizer:
        """Blocks. Raises ModelError."""
        if self._tokenizer is not None:
            return self._tokenizer
        tokenizer = load_tokenizer(source)
        tokenizer.warm_up()
        return tokenizer

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _options(self, options: Mapping[str, Any]) -> GenerationOptions:
        return generation_options(options, self.config.decoding)

    def _stream(
        self,
        prompt: Sequence[int],
        options: GenerationOptions,
        prefill: SharedPrefill | None = None,
        resumed: Sequence[int] = (),
    ) -> TextStream:
        """`prefill`: of the other streams of the same prompt, if it is a fork. `resumed`: the answer's beginning."""
        source = _entered(self._source)
        vocab_size = source.config.vocab_size
        beyond = next((token for token in options.logit_bias if token >= vocab_size), None)
        if beyond is not None:
            raise InvalidRequest(f"logit_bias has token {beyond}; the model's vocabulary has {vocab_size}")
        request = GenerationRequest.checked(
            prompt,
            options.max_new_tokens,
            eos_ids=() if options.ignore_eos else self.tokenizer.eos_token_ids,
            context_length=source.config.context_length,
            vocab_size=vocab_size,
            prefill_chunk=self.config.prefill_chunk or PREFILL.max_chunk,
            prefill_window=self.config.prefill_window,
            reserved_tree_slots=RESERVED_TREE_SLOTS if options.speculates else 0,
            logprobs=options.logprobs,
            prompt_logprobs=options.prompt_logprobs,
            constrained=options.grammar is not None,
        )
        sampling = options.sampling()
        generation = GenerationState(request, resumed=resumed)
        network = _entered(self._network)
        speculation = self._speculation(generation, options)
        sessions = SessionManager(
            _entered(self._router),
            network,
            self.config.limits,
            source.name,
            sampling,
            num_medusa_candidates=self._drafter_factory.num_medusa_candidates if speculation is not None else 0,
            taps=speculation.drafter.taps if speculation is not None else None,
            plan_chunks=self.config.prefill_chunk is None,
            prefix_locations=self._prefix_locations,
            auditor=self._auditor,
            ends=self._ends,
            conversations=self._conversations,
        )
        loop = GenerationLoop(
            generation, sessions, self.config.limits, self._turns, speculation, self._answer_grammar(options.grammar)
        )
        return TextStream(
            loop,
            self.tokenizer.stream(skip_special_tokens=options.skip_special_tokens),
            StopStrings(options.stop),
            network.clock,
            seed=sampling.seed,
            explain=sessions.router.explain,
            prefill=prefill,
            redo=partial(self._redo, prompt, replace(options, seed=sampling.seed)),
        )

    def _redo(self, prompt: Sequence[int], options: GenerationOptions, confirmed: Sequence[int]) -> TextStream:
        """The same request again; from `confirmed` on, where nothing but their ids is needed of these tokens."""
        from_start = options.logprobs is not None or options.prompt_logprobs is not None or options.grammar is not None
        ended = len(confirmed) >= options.max_new_tokens or any(t in self.tokenizer.eos_token_ids for t in confirmed)
        return self._stream(prompt, options, resumed=() if from_start or ended else confirmed)

    def _new_auditor(self, source: ModelSource, network: ClientNetwork, router: ChainRouter) -> Auditor:
        audits = self.config.audits
        rate = {"off": 0.0, "wait": 1.0}.get(audits, 0.0 if self.config.secret else AUDITS.rate)
        shape = source.config.num_layers, source.config.hidden_size, source.config.context_length
        kept, ends = self._prefix_locations, self._ends
        return Auditor(router, network, self.config.limits, *shape, rate, prefix_locations=kept, ends=ends)

    def _speculation(self, generation: GenerationState, options: GenerationOptions) -> ClientSpeculation | None:
        if not options.speculates:
            return None
        grammar, compiler = options.grammar, _entered(self._grammars)
        compile_grammar = partial(compiler.compile, grammar) if grammar is not None else None
        return ClientSpeculation(
            generation,
            self._make_drafter()
            if self._make_drafter
            else self._drafter_factory.drafter(compile_grammar, self._grammar_threads),
            _entered(self._router).costs,
            options.fixed_strategy,
            clock=_entered(self._network).clock,
            stats=self._drafting_stats,
            choice=self._drafter_factory.choice,
        )

    def _answer_grammar(self, grammar: Grammar | None) -> AnswerGrammar | None:
        if grammar is None:
            return None
        return AnswerGrammar(partial(_entered(self._grammars).compile, grammar), self._grammar_threads)

    async def check_grammar(self, grammar: Grammar) -> None:
        """Compiles the grammar, as every generation does with its own before a node is asked. Raises InvalidRequest for
        one that is malformed or costs too much."""
        compile_grammar = partial(_entered(self._grammars).compile, grammar)
        await asyncio.get_running_loop().run_in_executor(self._grammar_threads, compile_grammar)


def _entered(value: _T | None) -> _T:
    if value is None:
        raise UsageError("the client is not connected; use it as `async with SwarmClient(...) as client`")
    return value
