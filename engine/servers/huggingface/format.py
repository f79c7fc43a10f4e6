"""Answers of Text Generation Inference: one JSON object, or an event for each token."""

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.core.errors import EngineError
from engine.core.interfaces.backend import (
    FinishEvent,
    TextEvent,
    TokenText,
    TopLogprob,
    UsageEvent,
)
from engine.servers.http.errors import plain_error_body
from engine.servers.huggingface.schema import TextGenerationBody
from engine.servers.serving.event_pump import EventPump, LastTokens, OutputEvent

_encode = msgspec.json.Encoder().encode


class Answer:
    """Formats the answer to a request, whole or streamed."""

    def __init__(self, body: TextGenerationBody, pump: EventPump, num_prompt_tokens: int) -> None:
        self._body = body
        self._pump = pump
        self._num_prompt_tokens = num_prompt_tokens
        self._text = body.inputs if body.return_full_text else ""
        self._prompt: Sequence[TokenText] = ()
        self._tokens: list[TokenText] = []
        self._num_sent = 0
        self._finish: FinishEvent | None = None

    def add(self, events: Sequence[OutputEvent]) -> None:
        for event in events:
            if isinstance(event, FinishEvent):
                self._finish = event
            elif isinstance(event, TextEvent):
                if event.logprobs and not event.num_tokens:
                    self._prompt = event.logprobs  # the echoed prompt
                    continue
                self._text += event.text
                if self._body.details:
                    self._tokens += event.logprobs or ()

    def whole(self) -> dict[str, Any]:
        answer: dict[str, Any] = {"generated_text": self._text}
        if self._body.details:
            details = self._ending() | {
                "prefill": [_token(each, each.token) for each in self._prompt],
                "tokens": [_token(each, each.token) for each in self._tokens],
            }
            if self._body.top_n_tokens:
                details["top_tokens"] = [
                    [_token(top, top.token) for top in each.top] for each in self._tokens
                ]
            answer["details"] = details
        return answer

    def opening(self) -> bytes:
        return b""

    def chunk(self, event: OutputEvent) -> bytes:
        if isinstance(event, LastTokens):
            self._finish = event
            self._text += event.text.text
            return self._events(event.text, ends=True)
        self.add([event])
        if isinstance(event, FinishEvent):
            # The last event has the text, and each event has a token.
            return self._events(TextEvent(event.choice, "", 0), ends=True)
        return self._events(event) if isinstance(event, TextEvent) and event.num_tokens else b""

    def closing(self, usage: UsageEvent) -> bytes:
        return b": end\n\n"  # the protocol has no end marker, and the last chunk can't be empty

    def failure(self, error: EngineError) -> bytes:
        return b"data:" + plain_error_body(error) + b"\n\n"

    def _events(self, event: TextEvent, *, ends: bool = False) -> bytes:
        """An event for each token. If parts of the text were held back, they come with the last."""
        tokens = event.logprobs or ()
        if not tokens and not ends:
            return b""
        own = [each.token if each.in_text else "" for each in tokens]
        if "".join(own) != event.text:
            own = ["" for _ in tokens]
            own[-1:] = [event.text]
        made = [_token(each, text) for each, text in zip(tokens, own, strict=False)]
        made = made or [{"id": 0, "text": event.text, "logprob": 0.0, "special": True}]
        lines = []
        for position, token in enumerate(made):
            self._num_sent += 1
            line: dict[str, Any] = {"index": self._num_sent, "token": token}
            if self._body.top_n_tokens and tokens:
                line["top_tokens"] = [_token(top, top.token) for top in tokens[position].top]
            is_last = ends and position == len(made) - 1
            line["generated_text"] = self._text if is_last else None
            line["details"] = self._ending() if is_last and self._body.details else None
            lines.append(b"data:" + _encode(line) + b"\n\n")
        return b"".join(lines)

    def _ending(self) -> dict[str, Any]:
        assert self._finish is not None
        if self._finish.reason == "length":
            reason = "length"
        else:
            reason = "eos_token" if self._finish.stop_reason is None else "stop_sequence"
        return {
            "finish_reason": reason,
            "generated_tokens": self._pump.choice_tokens[0],
            "input_length": self._num_prompt_tokens,
            "seed": self._body.seed,
        }


def _token(token: TokenText | TopLogprob, text: str) -> dict[str, Any]:
    logprob = None if token.logprob != token.logprob else token.logprob  # NaN is the first token's
    is_special = isinstance(token, TokenText) and not token.in_text
    return {"id": token.token_id, "text": text, "logprob": logprob, "special": is_special}
