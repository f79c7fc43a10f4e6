"""/generate: a client submits a prompt and can read its stream later, on any connection and
repeatedly.

A submission runs until it ends or is deleted, even if no client reads its stream. Its result is
kept for `KEEP_S` seconds after the end. Only its tenant can see it. With `stream: true`, one call
submits the prompt and streams the answer. In this case, a disconnect ends the generation.

A body with `text` or `input_ids` instead of `prompt` is SGLang's; `sglang_api` answers it. One with
`inputs` is Text Generation Inference's; `huggingface` answers it.
"""

import asyncio
import functools
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from fastapi import Depends, FastAPI
from starlette.requests import Request
from starlette.responses import Response

from engine.core.errors import EngineError, NotFoundError, RateLimitError
from engine.core.forecast import may_take
from engine.core.interfaces.backend import (
    CompletionRequest,
    Event,
    FinishEvent,
    TextEvent,
    UsageEvent,
)
from engine.servers.access.auth import principal_of
from engine.servers.http.errors import AbortedError, error_fields
from engine.servers.openai.format import Collected, usage_body
from engine.servers.openai.logprobs import chat_logprobs
from engine.servers.openai.schema import GenerateBody
from engine.servers.serving.admission import Ticket
from engine.servers.serving.event_pump import EventPump, OutputEvent
from engine.servers.serving.generation import NO_TEXT, open_generation, require_grammar
from engine.servers.serving.prompts import parses_special
from engine.servers.serving.services import Services, json_response, new_completion_id
from engine.servers.serving.sse import (
    CHECK_WAIT_S,
    DONE,
    EventStream,
    answer_streaming,
    coalesce,
    error_event,
)

if TYPE_CHECKING:
    from engine.servers.huggingface.schema import TextGenerationBody
    from engine.servers.sglang_api.schema import SglangGenerateBody

MAX_SUBMISSIONS = 512
KEEP_S = 300.0
# Seconds that a submission waits for a refusal by the backend, once its prompt is checked. A later
# refusal is reported in the stream. The wait is short, so that the client gets its request id soon.
SUBMIT_WAIT_S = 0.1

_encode = msgspec.json.Encoder().encode


class CancelledSubmissionError(AbortedError):
    """The tenant deleted its submission."""

    status = 409
    type = "invalid_request_error"
    code = "CANCELLED"


class GenerateStream:
    """Formats a stream: `{"request_id", "index", "text", "finish_reason"}` for each token, then
    usage.
    """

    def __init__(self, request_id: str) -> None:
        self._head = b'data: {"request_id":' + _encode(request_id) + b","

    def opening(self) -> bytes:
        return b""

    def chunk(self, event: OutputEvent) -> bytes:
        if isinstance(event, FinishEvent):
            fields = {"text": "", "finish_reason": event.reason, "stop_reason": event.stop_reason}
        elif isinstance(event, TextEvent) and (event.text or event.logprobs):
            fields = {"text": event.text, "finish_reason": None}
            if event.logprobs:
                fields["logprobs"] = chat_logprobs(event.logprobs)["content"]
        else:
            return b""
        return self._head + _encode({"index": event.choice} | fields)[1:] + b"\n\n"

    def closing(self, usage: UsageEvent) -> bytes:
        return self._head + _encode({"usage": usage_body(usage)})[1:] + b"\n\n" + DONE

    def failure(self, error: EngineError) -> bytes:
        return error_event(error)


class Submission:
    """A submitted prompt. It keeps all events of the answer for later readers."""

    def __init__(
        self, request_id: str, owner: str, num_choices: int, pump: EventPump, ticket: Ticket
    ) -> None:
        self.request_id = request_id
        self.owner = owner
        self.num_choices = num_choices
        self.ended_at: float | None = None  # end of the generation, time.monotonic()
        self._pump = pump
        self._ticket = ticket
        self._events: list[OutputEvent] = []
        self._num_readers = 0
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def cancel(self) -> None:
        """Abort the submission if it is still running. Waits until the backend has released the
        request.
        """
        self._pump.fail(CancelledSubmissionError("The request was deleted."))
        await asyncio.shield(self._task)

    def state(self) -> dict[str, Any]:
        """The body for GET /generate/ID: the status, the text so far, and at the end the usage or
        the error.
        """
        collected = Collected(self.num_choices)
        collected.add(self._events)
        choices = [
            {"index": index, "text": choice.text} | choice.ending()
            for index, choice in enumerate(collected.choices)
        ]
        body: dict[str, Any] = {
            "request_id": self.request_id,
            "status": self._status(),
            "choices": choices,
        }
        if self.ended_at is not None:
            failure = self._pump.failure
            usage = self._pump.usage
            body |= {"error": error_fields(failure)} if failure else {"usage": usage_body(usage)}
        return body

    async def follow(self) -> AsyncIterator[Event]:
        """Yield all earlier events of the answer, then new events as they arrive."""
        position = 0
        self._num_readers += 1
        try:
            while True:
                while position < len(self._events):
                    yield self._events[position]
                    position += 1
                if self.ended_at is not None:
                    break
                await self._changed.wait()
        finally:
            self._num_readers -= 1
        if self._pump.failure is not None:
            raise self._pump.failure
        yield self._pump.usage

    async def _run(self) -> None:
        try:
            while events := await self._pump.take():
                self._events.extend(events)
                self._announce()
        except EngineError:
            pass  # `pump.failure` keeps the error for later readers
        finally:
            await self._ticket.close()
            if self._num_readers == 0:
                self._events = coalesce(self._events)
            self.ended_at = time.monotonic()
            self._announce()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _status(self) -> str:
        if self.ended_at is None:
            return "running"
        failure = self._pump.failure
        if failure is None:
            return "finished"
        return "cancelled" if isinstance(failure, CancelledSubmissionError) else "failed"


class Submissions:
    """All submissions that clients can still read. Their number is limited. Submissions that have
    ended are kept for `KEEP_S` seconds.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, Submission] = {}

    def make_room(self, owner: str) -> None:
        """Drop expired submissions. If there is still no room, drop a submission of the owner that
        has ended. Raises if all of them are running.
        """
        now = time.monotonic()
        ended = [each for each in self._by_id.values() if each.ended_at is not None]
        for each in ended:
            assert each.ended_at is not None
            if now - each.ended_at > KEEP_S:
                del self._by_id[each.request_id]
        own = [each for each in self._by_id.values() if each.owner == owner]
        if may_take(owner, len(own), len(self._by_id), MAX_SUBMISSIONS):
            return
        if not (remaining := [each for each in own if each.ended_at is not None]):
            raise RateLimitError(
                f"Too many submissions are running: {len(own)} of yours, and the server keeps"
                f" {MAX_SUBMISSIONS} in all. Retry later.",
                retry_after=1,
            )
        del self._by_id[remaining[0].request_id]

    def add(self, submission: Submission) -> None:
        self._by_id[submission.request_id] = submission

    def find(self, request_id: str, owner: str) -> Submission:
        submission = self._by_id.get(request_id)
        if submission is None or submission.owner != owner:
            raise NotFoundError("There is no such request, or its result is no longer kept.")
        return submission


def add_generate_routes(app: FastAPI, services: Services) -> None:
    submissions = Submissions()
    dialects = services.settings.server.dialects

    # Few clients send the forms of other servers, so these are imported late.
    def choose(
        raw: dict[str, Any],
    ) -> "type[GenerateBody | SglangGenerateBody | TextGenerationBody]":
        if "sglang" in dialects and "prompt" not in raw and ("text" in raw or "input_ids" in raw):
            from engine.servers.sglang_api.schema import SglangGenerateBody

            return SglangGenerateBody
        if "huggingface" in dialects and "prompt" not in raw and "inputs" in raw:
            from engine.servers.huggingface.schema import TextGenerationBody

            return TextGenerationBody
        return GenerateBody

    @app.post("/generate")
    async def submit(
        request: Request, ticket: Annotated[Ticket, Depends(services.admitted)]
    ) -> Response:
        body = await services.read_chosen(request, choose)
        if not isinstance(body, GenerateBody):
            return await _answer_other(services, request, ticket, body)
        request_id, pump = await _start(services, request, body, ticket)
        if body.stream:
            return await answer_streaming(pump, GenerateStream(request_id))
        await pump.accepted(CHECK_WAIT_S, SUBMIT_WAIT_S)
        submissions.make_room(principal_of(request).name)
        owner = principal_of(request).name
        submissions.add(Submission(request_id, owner, body.num_choices, pump, ticket.detach()))
        return json_response({"request_id": request_id})

    @app.get("/generate/{request_id}")
    async def state(request: Request, request_id: str) -> Response:
        return json_response(submissions.find(request_id, principal_of(request).name).state())

    @app.get("/generate/{request_id}/stream", response_class=EventStream, status_code=200)
    async def stream(request: Request, request_id: str) -> Response:
        submission = submissions.find(request_id, principal_of(request).name)
        reader = EventPump(
            1,
            choices_per_source=submission.num_choices,
            timeout_s=None,
            on_tokens=_uncounted,
        )
        reader.watch(request.receive)
        reader.read([submission.follow()])
        try:
            return await answer_streaming(reader, GenerateStream(request_id))
        except BaseException:
            await reader.close()
            raise

    @app.delete("/generate/{request_id}")
    async def delete(request: Request, request_id: str) -> Response:
        submission = submissions.find(request_id, principal_of(request).name)
        await submission.cancel()
        return json_response(submission.state())


async def _answer_other(
    services: Services,
    request: Request,
    ticket: Ticket,
    body: "SglangGenerateBody | TextGenerationBody",
) -> Response:
    from engine.servers.sglang_api.schema import SglangGenerateBody

    if isinstance(body, SglangGenerateBody):
        from engine.servers.sglang_api import generate as sglang

        return await sglang.answer(services, request, ticket, body)
    from engine.servers.huggingface import routes as huggingface

    return await huggingface.answer(services, request, ticket, body)


async def _start(
    services: Services, request: Request, body: GenerateBody, ticket: Ticket
) -> tuple[str, EventPump]:
    card = services.choose_model(request, body.model)
    services.require(card, "completions", "prompt", NO_TEXT)
    parses = await parses_special(services, request, card, body.parse_special, [body.prompt])
    request_id = new_completion_id("gen")
    params = body.params(card)
    require_grammar(services, card, body.structured_outputs)
    prompt = functools.partial(
        CompletionRequest,
        prompt=body.prompt,
        parse_special=parses,
        add_special_tokens=body.add_special_tokens is not False,
    )
    pump = await open_generation(
        *(services, request, ticket, card, body, params, request_id),
        [prompt],
        grammar=body.structured_outputs,
        is_watched=bool(body.stream),
    )
    return request_id, pump


def _uncounted(seconds: float, num_tokens: int) -> None:
    """Does nothing, because the tokens of a submission are timed when they are generated, not when
    they are read.
    """
