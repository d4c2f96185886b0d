"""Creating a response: whole, streamed or in the background. Owns how an answer of the swarm feeds a ResponseAnswer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from swarm.errors import ContextOverflow, SwarmError
from swarm_gateway.answering.run import RunningAnswer, answer
from swarm_gateway.errors import ApiError
from swarm_gateway.responses.answers import ResponseAnswer, StreamEvent
from swarm_gateway.responses.items import Item, canonical_items
from swarm_gateway.responses.requests import ResponsesBody, chat_request, check_served
from swarm_gateway.responses.store import ResponseStore, StoredResponse
from swarm_gateway.serving.gateway import Gateway
from swarm_gateway.serving.served_model import ServedModel
from swarm_gateway.streaming.sse import event


@dataclass(frozen=True, slots=True)
class Creation:
    """One request being answered. `owner`: whose it is in the store. `running`: of the swarm, not read yet."""

    stored: StoredResponse
    owner: str
    store: ResponseStore | None  # None: not to be stored
    running: RunningAnswer

    @classmethod
    async def begin(
        cls, body: ResponsesBody, gateway: Gateway, store: ResponseStore, owner: str, caller: str
    ) -> Creation:
        """Raises ApiError and SwarmError for what is known before anything is sent."""
        check_served(body)
        model = gateway.model(body.model)
        conversation = _conversation(body, store, owner)
        running = await _answer(model, body, conversation, caller)
        tokenizer = model.client.tokenizer
        writer = ResponseAnswer(body, model.name, lambda token: tokenizer.decode([token], skip_special_tokens=False))
        stored = StoredResponse(writer, tuple(conversation))
        return cls(stored, owner, store if body.store is not False else None, running)

    async def events(self) -> AsyncGenerator[StreamEvent, None]:
        """All events of the answer, those of its failure too."""
        writer = self.stored.answer
        for begun in writer.start():
            yield begun
        try:
            async with self.running as running:
                async for _, happened in running:
                    for written in writer.push(happened):
                        yield written
        except (ApiError, SwarmError) as error:
            for written in writer.fail(error if isinstance(error, ApiError) else ApiError.of(error)):
                yield written

    async def whole(self) -> dict[str, object]:
        """The finished response. Raises ApiError and SwarmError: an answer that fails has a status of its own."""
        writer = self.stored.answer
        writer.start()
        async with self.running as running:
            async for _, happened in running:
                writer.push(happened)
        self.keep()
        return writer.response()

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """The stream, for who waits for it."""
        events = self.events()
        try:
            async for each in events:
                if self.stored.answer.done:
                    self.keep()  # before the reader knows the end, so that it can continue from it at once
                yield event(each["type"], each)
        finally:
            await events.aclose()

    async def run(self) -> None:
        """The answer in the background, kept as it comes."""
        events = self.events()
        try:
            async for each in events:
                self.stored.keep([each])
        finally:
            await events.aclose()
            if not self.stored.answer.done:
                self.stored.answer.cancel()
            self.stored.end()

    def keep(self) -> None:
        """Once. An answer that was written is given to its reader even if the store has no room for it."""
        if self.store is not None and self.stored.stored_at is None:
            with suppress(ApiError):
                self.store.put(self.owner, self.stored)


def _conversation(body: ResponsesBody, store: ResponseStore, owner: str) -> list[Item]:
    """Everything before the answer, without instructions, which hold for one response only."""
    new = canonical_items(body.input)
    if body.previous_response_id is None:
        return new
    try:
        previous = store.get(owner, body.previous_response_id)
    except ApiError as error:
        raise ApiError(400, "previous_response_not_found", error.message, param="previous_response_id") from None
    if not previous.answer.done:
        raise ApiError(400, "invalid_request", "the previous response is still running", param="previous_response_id")
    return [*previous.conversation, *previous.answer.output, *new]


async def _answer(model: ServedModel, body: ResponsesBody, items: Sequence[Item], caller: str) -> RunningAnswer:
    """With `truncation: auto`, the oldest turns are left out until it fits: 1, 2, 4, ... of them."""
    turns = [index for index, item in enumerate(items) if item.get("role") == "user"]
    dropped = 0
    while True:
        kept = items if not dropped else [*_system(items[: turns[0]]), *items[turns[dropped] :]]
        try:
            return await answer(model, replace(chat_request(body, kept), model=model.name), caller)
        except ContextOverflow:
            if body.truncation != "auto" or dropped >= len(turns) - 1:
                raise
            dropped = min(max(1, 2 * dropped), len(turns) - 1)


def _system(items: Sequence[Item]) -> list[Item]:
    return [item for item in items if item.get("role") in ("system", "developer")]
