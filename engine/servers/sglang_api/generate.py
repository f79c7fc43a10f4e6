"""POST /generate with a body in SGLang's form.

Answers have the whole text so far in each event of a stream, as in SGLang. `meta_info` has counts,
times and logprobs.
"""

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.core.errors import EngineError
from engine.core.interfaces.backend import (
    FinishEvent,
    TextEvent,
    TokenText,
    TopLogprob,
    UsageEvent,
)
from engine.servers.http.request_log import record_of
from engine.servers.serving.admission import Ticket
from engine.servers.serving.event_pump import EventPump, OutputEvent
from engine.servers.serving.prompts import Prompts, open_prompts
from engine.servers.serving.services import Services, json_bytes, new_completion_id
from engine.servers.serving.sse import DONE, answer_counted, error_event
from engine.servers.sglang_api.schema import SglangGenerateBody

_encode = msgspec.json.Encoder().encode


async def answer(
    services: Services, request: Request, ticket: Ticket, body: SglangGenerateBody
) -> Response:
    request_id = body.rid or new_completion_id("gen")
    pump = await _open(services, request, ticket, body)
    answers = Answers(body, request_id, pump, record_of(request.scope).started)
    if body.stream:
        return await answer_counted(pump, services.backend, answers.with_prompts)
    await pump.wait_whole(answers.add)
    answers.with_prompts(await pump.prompt_lengths(services.backend))
    return json_bytes(answers.whole(pump.usage))


async def _open(
    services: Services, request: Request, ticket: Ticket, body: SglangGenerateBody
) -> EventPump:
    card = services.choose_model(request, body.model)
    prompts = Prompts(
        texts=body.prompts,
        field="text",
        prefix="gen",
        params=body.params(card),
        grammar=body.structured_outputs,
        parse_special=body.parse_special,
        echo=body.scores_prompt,
    )
    return await open_prompts(services, request, ticket, card, body, prompts)


class _Answer:
    """One answer, as far as it has arrived."""

    def __init__(self) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.tokens: list[TokenText] = []
        self.prompt: Sequence[TokenText] = ()
        self.finish: FinishEvent | None = None

    def add(self, event: OutputEvent) -> None:
        if isinstance(event, FinishEvent):
            self.finish = event
        elif isinstance(event, TextEvent):
            if event.logprobs and not event.num_tokens:
                self.prompt = event.logprobs  # the echoed prompt, which is not part of the answer
                return
            self.text += event.text
            self.ids += event.token_ids
            self.tokens += event.logprobs or ()

    @property
    def finish_reason(self) -> dict[str, Any] | None:
        if self.finish is None:
            return None
        if self.finish.reason == "length":
            return {"type": "length", "length": len(self.ids)}
        matched = self.finish.stop_reason
        if matched is None and self.ids:
            matched = self.ids[-1]  # the model's own end token
        return {"type": "stop", "matched": matched}


class Answers:
    """Formats all answers of a request, whole or streamed."""

    def __init__(
        self, body: SglangGenerateBody, request_id: str, pump: EventPump, started: float
    ) -> None:
        self._body = body
        self._request_id = request_id
        self._pump = pump
        self._started = started
        self._answers = [_Answer() for _ in pump.choice_tokens]
        self._prompts: list[int] = []

    def with_prompts(self, lengths: list[int]) -> "Answers":
        """Set the number of tokens of each prompt."""
        self._prompts = lengths
        return self

    def add(self, events: Sequence[OutputEvent]) -> None:
        for event in events:
            self._answers[event.choice].add(event)

    def whole(self, usage: UsageEvent) -> bytes:
        made = [self._entry(index, usage) for index in range(len(self._answers))]
        return _encode(made[0] if self._body.is_single else made)

    def opening(self) -> bytes:
        return b""

    def chunk(self, event: OutputEvent) -> bytes:
        """An event with all of an answer so far. The last event of an answer is sent at the end of
        the stream, because it has the usage.
        """
        self.add([event])
        is_piece = isinstance(event, TextEvent) and event.num_tokens and event.text
        return self._event(event.choice, None) if is_piece else b""

    def closing(self, usage: UsageEvent) -> bytes:
        ends = [self._event(index, usage) for index in range(len(self._answers))]
        return b"".join(ends) + DONE

    def failure(self, error: EngineError) -> bytes:
        return error_event(error) + DONE

    def _event(self, index: int, usage: UsageEvent | None) -> bytes:
        number = {} if self._body.is_single else {"index": index}
        return b"data: " + _encode(self._entry(index, usage) | number) + b"\n\n"

    def _entry(self, index: int, usage: UsageEvent | None) -> dict[str, Any]:
        answer, ends = self._answers[index], usage is not None
        single = self._body.is_single
        meta: dict[str, Any] = {
            "id": self._request_id if single else f"{self._request_id}_{index}",
            "finish_reason": answer.finish_reason if ends else None,
            "prompt_tokens": self._prompts[index * len(self._prompts) // len(self._answers)],
            "completion_tokens": self._pump.choice_tokens[index],
        }
        if usage is not None:
            meta["e2e_latency"] = time.monotonic() - self._started
            if len(self._prompts) == 1:
                meta["cached_tokens"] = usage.cached_tokens
        if self._body.return_logprob:
            meta |= self._logprobs(answer)
        return {"text": answer.text, "output_ids": answer.ids, "meta_info": meta}

    def _logprobs(self, answer: _Answer) -> dict[str, Any]:
        start = max(0, self._body.logprob_start_len or 0)
        with_text = bool(self._body.return_text_in_logprobs)
        made: dict[str, Any] = {}
        for name, tokens in (("input", answer.prompt[start:]), ("output", answer.tokens)):
            made[f"{name}_token_logprobs"] = [_scored(token, with_text) for token in tokens]
            if self._body.top_logprobs_num:
                made[f"{name}_top_logprobs"] = [
                    [_scored(each, with_text) for each in token.top] or None for token in tokens
                ]
        return made


def _scored(token: TokenText | TopLogprob, with_text: bool) -> list[Any]:
    """A token as SGLang writes it: logprob, id, and the text if the client wants it."""
    logprob = None if token.logprob != token.logprob else token.logprob  # NaN is the first token's
    return [logprob, token.token_id, token.token if with_text else None]
