"""Answers of the Open Inference Protocol: output tensors, JSON objects and streams of them."""

from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response

from engine.backends.base import InferenceBackend
from engine.core.errors import EngineError
from engine.core.interfaces.backend import FinishEvent, ModelCard, TextEvent, UsageEvent
from engine.servers.http.errors import plain_error_body, problem
from engine.servers.kserve import tensors
from engine.servers.kserve.schema import InferBody, TextBody
from engine.servers.serving.event_pump import EventPump, LastTokens, OutputEvent

VERSION = "1"  # the only version of each model
# Output tensors with their data types. All of them have the shape of `text_input`.
OUTPUTS = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}
HEADER_LENGTH = "inference-header-content-length"
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Results:
    """The outputs of all texts of a request: output name → one value per text."""

    columns: dict[str, list[Any]]

    @classmethod
    async def collect(cls, pump: EventPump, backend: InferenceBackend) -> "Results":
        """Take what the pump has until its end."""
        texts = [""] * len(pump.choice_tokens)

        def add(events: list[OutputEvent]) -> None:
            for event in events:
                if isinstance(event, TextEvent):
                    texts[event.choice] += event.text

        await pump.wait_whole(add)
        return cls(
            {
                "text_output": texts,
                "finish_reason": [each or "stop" for each in pump.finish_reasons],
                "num_input_tokens": await pump.prompt_lengths(backend),
                "num_output_tokens": list(pump.choice_tokens),
            }
        )

    def generated(self, body: TextBody, card: ModelCard) -> bytes:
        """The answer to `generate`. A text in the request has a text in the answer, a list has a
        list.
        """
        is_one = isinstance(body.text_input, str)
        chosen = ((name, self.columns[name]) for name in body.returned)
        return _encode(
            _head(body.id, card)
            | {name: column[0] if is_one else column for name, column in chosen}
        )

    def inferred(self, body: InferBody, card: ModelCard) -> Response:
        """The answer to `infer`. Tensors that the client wants as bytes follow the JSON."""
        wanted = {each.name: each.is_binary for each in body.outputs}
        for position, name in enumerate(wanted):
            if name not in OUTPUTS:
                known = ", ".join(OUTPUTS)
                raise problem(f"outputs[{position}].name", f"is unknown; there are {known}")
        described: list[dict[str, Any]] = []
        blobs: list[bytes] = []
        for name in wanted or OUTPUTS:
            datatype, column = OUTPUTS[name], self.columns[name]
            entry: dict[str, Any] = {"name": name, "datatype": datatype, "shape": body.prompt_shape}
            is_binary = wanted.get(name)
            if body.is_binary if is_binary is None else is_binary:
                blobs.append(tensors.to_raw(datatype, column))
                entry["parameters"] = {"binary_data_size": len(blobs[-1])}
            else:
                entry["data"] = column
            described.append(entry)
        head = _encode(_head(body.id, card) | {"outputs": described})
        if not blobs:
            return Response(head, media_type="application/json")
        headers = {HEADER_LENGTH: str(len(head))}
        return Response(
            head + b"".join(blobs), headers=headers, media_type="application/octet-stream"
        )


def _head(request_id: str, card: ModelCard) -> dict[str, Any]:
    named = {"id": request_id} if request_id else {}
    return {**named, "model_name": card.id, "model_version": VERSION}


class GenerateStream:
    """The stream of `generate_stream`. Each event has the new text in `text_output`, and the number
    of tokens since the last event. Tokens without text are counted in the next event that is sent.
    """

    def __init__(
        self, body: TextBody, card: ModelCard, pump: EventPump, prompt_tokens: int
    ) -> None:
        self._head = _head(body.id, card)
        self._returned = body.returned
        self._pump = pump
        self._prompt_tokens = prompt_tokens
        self._num_tokens = self._num_told = 0

    def opening(self) -> bytes:
        return b""

    def chunk(self, event: OutputEvent) -> bytes:
        if isinstance(event, TextEvent):
            self._num_tokens += event.num_tokens
            return self._event(event.text) if event.text else b""
        if not isinstance(event, FinishEvent):
            return b""
        # Events without text are dropped if the client is slow, so their tokens are missing.
        self._num_tokens = self._pump.choice_tokens[event.choice]
        if isinstance(event, LastTokens):
            return self._event(event.text.text, event.reason)
        is_told = self._num_tokens == self._num_told or "num_output_tokens" not in self._returned
        if is_told and "finish_reason" not in self._returned:
            return b""
        return self._event("", event.reason)

    def closing(self, usage: UsageEvent) -> bytes:
        return b": end\n\n"  # the protocol has no end marker, and the last chunk can't be empty

    def failure(self, error: EngineError) -> bytes:
        return b"data: " + plain_error_body(error) + b"\n\n"

    def _event(self, text: str, finish_reason: str | None = None) -> bytes:
        values = {
            "text_output": text,
            "finish_reason": finish_reason,
            "num_input_tokens": self._prompt_tokens,
            "num_output_tokens": self._num_tokens - self._num_told,
        }
        self._num_told = self._num_tokens
        told = {name: values[name] for name in self._returned}
        return b"data: " + _encode(self._head | told) + b"\n\n"
