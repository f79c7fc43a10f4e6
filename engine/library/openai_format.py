"""`InferenceEngine`: the embedded engine with OpenAI's formats."""

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.core.interfaces.backend import UsageEvent
from engine.core.store.catalogue import DEFAULT_MODEL
from engine.llm import LLM
from engine.sampling_params import make_params
from engine.servers.openai.format import ChatStream, Collected, Envelope, chat_body, new_envelope
from engine.servers.openai.token_fields import TokenFields
from engine.servers.serving.sse import DONE

Messages = Sequence[Mapping[str, Any]]


class InferenceEngine:
    """A model that runs in this process, with OpenAI's formats for chat messages and responses.
    `arguments` are those of `LLM`.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **arguments: Any) -> None:
        self._llm = LLM(model, **arguments)

    def __enter__(self) -> "InferenceEngine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        self._llm.close()

    def generate(self, prompts: Sequence[str], **params: Any) -> list[str]:
        """Return a continuation of each prompt. `params` are fields of `SamplingParams`."""
        outputs = self._llm.generate(prompts, make_params(params), use_tqdm=False)
        return [output.text for output in outputs]

    def chat_completion(self, messages: Messages, **params: Any) -> dict[str, Any]:
        """Answer a conversation. Returns a complete `chat.completion` object."""
        collected = Collected(make_params(params).n)
        usage: UsageEvent | None = None
        for event in self._llm.stream_chat(messages, make_params(params)):
            if isinstance(event, UsageEvent):
                usage = event
            else:
                collected.add([event])
        assert usage is not None, "a stream that ends well ends with its usage"
        tokens = TokenFields(has_logprobs=params.get("logprobs") is not None)
        body = chat_body(self._envelope(), collected, usage, tokens=tokens)
        return dict(json.loads(body))

    def chat_completion_stream(self, messages: Messages, **params: Any) -> Iterator[dict[str, Any]]:
        """Answer a conversation. Yields `chat.completion.chunk` objects as they arrive. The last
        chunk has the token usage.
        """
        stream = ChatStream(self._envelope(), make_params(params).n, include_usage=True)
        yield from _parsed(stream.opening())
        for event in self._llm.stream_chat(messages, make_params(params)):
            if isinstance(event, UsageEvent):
                yield from _parsed(stream.closing(event))
            else:
                yield from _parsed(stream.chunk(event))

    def _envelope(self) -> Envelope:
        return new_envelope(f"chatcmpl-{secrets.token_hex(16)}", self._llm.card)


def _parsed(sse: bytes) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of server-sent events, without the final `[DONE]`."""
    for event in sse.split(b"\n\n"):
        if event and event + b"\n\n" != DONE:
            yield json.loads(event.removeprefix(b"data: "))
